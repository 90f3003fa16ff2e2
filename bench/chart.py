"""Draws a comparison: a panel of rates for each workload, and one of CPU time."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench import figures, report
from bench.comparison import Comparison
from bench.figures import Spread

_OURS, _PEERS = "#2563a8", "#9aa3ad"
_ROLES = {"server": "#2563a8", "node": "#c8553d", "client": "#e3b448"}
_COLUMNS = 2


def draw(comparison: Comparison, path: Path) -> None:
    """Write the chart as PNG; it needs matplotlib."""
    from matplotlib.figure import Figure

    closed = [each for each in comparison.workloads if each == "one" or each.isdecimal()]
    numbers = [each for each in closed if each.isdecimal()]
    panels = [*closed, *(["64"] if "64" in numbers else numbers[-1:])]
    row_count = -(-len(panels) // _COLUMNS)
    names = [each.name for each in comparison.targets if each.name not in comparison.absent]
    height = row_count * (1.1 + 0.22 * len(names))
    figure = Figure(figsize=(11, height), layout="constrained")
    axes = list(figure.subplots(row_count, _COLUMNS, squeeze=False).flat)
    for workload, panel in zip(closed, axes, strict=False):
        _draw_rates(panel, comparison, workload)
    if numbers:
        _draw_cpu(axes[len(closed)], comparison, panels[-1])
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    figure.savefig(path, dpi=80, metadata={"Software": None})


def _draw_rates(panel: Any, comparison: Comparison, workload: str) -> None:
    """Draw the medians, and a line from the least to the greatest rate."""
    for target in reversed(comparison.targets):
        rounds = figures.by_round(comparison.measurements, target=target.name, workload=workload)
        if rounds:
            rate = Spread.over([each.rate for each in rounds.values()])
            error = [[rate.median - rate.low], [rate.high - rate.median]]
            color = _OURS if target.variant else _PEERS
            panel.barh(target.name, rate.median, xerr=error, color=color, ecolor="#333333")
    unit = "hand-overs/s" if workload == "one" else "pairs/s"
    _finish(panel, f"{report.title(workload)}: {unit}")


def _draw_cpu(panel: Any, comparison: Comparison, workload: str) -> None:
    """Draw the CPU time of a pair, stacked by role; of nodes, the sum."""
    from matplotlib.patches import Patch

    for target in reversed(comparison.targets):
        rounds = figures.by_round(comparison.measurements, target=target.name, workload=workload)
        left = 0.0
        for role, color in _ROLES.items():
            values = [value for each in rounds.values() if (value := each.cpu_us_per_pair(role)) is not None]
            if values:
                panel.barh(target.name, statistics.median(values), left=left, color=color)
                left += statistics.median(values)
    handles = [
        Patch(color=color, label="all nodes" if role == "node" else role) for role, color in _ROLES.items()
    ]
    panel.legend(handles=handles, fontsize=8)
    _finish(panel, f"{report.title(workload)}: CPU µs per pair")


def _finish(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=10, loc="left")
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
