"""Writes a comparison as Markdown: one table for each workload."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping

from bench import figures
from bench.comparison import Comparison
from bench.figures import Measurement, Spread, Target

# The measurements of one workload: for the name of each target that has some, by round.
_Table = Mapping[str, Mapping[int, Measurement]]

_PROSE_COLUMNS = 100


def markdown(comparison: Comparison) -> str:
    """Return the tables, and the targets that are absent."""
    sections = [_section(comparison, workload) for workload in comparison.workloads]
    reasons = [f"Absent: {name}: {reason}" for name, reason in comparison.absent.items()]
    return "\n\n".join(
        [*sections, *(textwrap.fill(each, _PROSE_COLUMNS, break_on_hyphens=False) for each in reasons)]
    )


def title(workload: str) -> str:
    """Return what the workload is, as a heading."""
    if workload == "open":
        return "Open loop at half of the maximum"
    if (count := figures.lease_count(workload)) is not None:
        return f"{count:,} leases of 30 s kept alive"
    if workload == "one":
        return "16 workers on one resource"
    return "1 worker" if workload == "1" else f"{workload} workers, each its own resource"


def _section(comparison: Comparison, workload: str) -> str:
    """Return the table of one workload; a target without measurements has no row."""
    table = {
        each.name: found
        for each in comparison.targets
        if (found := figures.by_round(comparison.measurements, target=each.name, workload=workload))
    }
    rows = [
        {"": target.name} | _cells(target, comparison, workload, table)
        for target in comparison.targets
        if target.name in table
    ]
    if not rows:
        return f"### {title(workload)}\n\nNothing was measured."
    lines = [list(rows[0]), ["---"] + ["---:"] * (len(rows[0]) - 1), *(list(each.values()) for each in rows)]
    return "\n".join([f"### {title(workload)}", "", *("| " + " | ".join(line) + " |" for line in lines)])


def _cells(target: Target, comparison: Comparison, workload: str, table: _Table) -> dict[str, str]:
    """Return the cells of a row by the heads of their columns."""
    rounds = table[target.name]
    if workload == "open":
        return _rate(rounds, "pairs/s") | _latency(rounds) | _cpu(target, rounds)
    if figures.lease_count(workload) is not None:
        return _lease_cells(target, rounds)
    cells = _rate(rounds, "hand-overs/s" if workload == "one" else "pairs/s")
    peers: dict[str, Mapping[int, Measurement]] = {
        each.kind: {} for each in comparison.targets if not each.variant
    }
    peers |= {
        each.kind: table.get(each.name, {})
        for each in comparison.targets
        if not each.variant and each.node_count in {0, target.node_count}
    }
    for kind, theirs in peers.items():
        cells[f"÷ {kind}"] = _number(figures.ratio(rounds, theirs), "{:.2f}")
    if len({each.variant for each in comparison.targets if each.variant}) > 1:
        first = next(each for each in comparison.targets if each.is_same_but_variant(target))
        theirs = table.get(first.name, {}) if target.variant else {}
        cells["÷ first"] = _number(figures.ratio(rounds, theirs), "{:.2f}")
    cells |= _latency(rounds)
    if "etcd" in peers:
        cells["p50: etcd ÷"] = _number(figures.ratio(rounds, peers["etcd"], of_latency=True), "{:.2f}")
    return cells | _cpu(target, rounds)


def _rate(rounds: Mapping[int, Measurement], unit: str) -> dict[str, str]:
    rate = Spread.over([each.rate for each in rounds.values()])
    return {f"{unit} (min to max)": f"{rate.median:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})"}


def _latency(rounds: Mapping[int, Measurement]) -> dict[str, str]:
    columns = {"p50 ms": "p50_ms", "p99": "p99_ms", "p99.9": "p99_9_ms"}
    return {
        head: _number(_median(each.latency_ms(name) for each in rounds.values()), "{:.2f}")
        for head, name in columns.items()
    }


def _cpu(target: Target, rounds: Mapping[int, Measurement]) -> dict[str, str]:
    """Return the columns of CPU time per pair; a target without the role has an empty cell."""
    found = rounds.values()
    nodes = _median(each.cpu_us_per_pair("node") for each in found)
    return {
        "server µs/pair": _number(_median(each.cpu_us_per_pair("server") for each in found), "{:.0f}"),
        "each node": _number(nodes and nodes / target.node_count, "{:.0f}"),
        "client": _number(_median(each.cpu_us_per_pair("client") for each in found), "{:.0f}"),
        "all": _number(
            _median(sum(each.cpu_s.values()) * 1e6 / each.result["pairs"] for each in found), "{:.0f}"
        ),
    }


def _lease_cells(target: Target, rounds: Mapping[int, Measurement]) -> dict[str, str]:
    found = rounds.values()
    nodes = _median(each.cores("node") for each in found)
    return {
        "lost": str(sum(each.result["lost"] for each in found)),
        "renewals/s": _number(_median(each.rate for each in found), "{:,.0f}"),
        "without effect": str(sum(each.result["at_risk"] for each in found)),
        "p50 ms": _number(_median(each.result["renewal"]["p50_ms"] for each in found), "{:.2f}"),
        "p99": _number(_median(each.result["renewal"]["p99_ms"] for each in found), "{:.2f}"),
        "server cores": _number(_median(each.cores("server") for each in found), "{:.2f}"),
        "each node": _number(nodes and nodes / target.node_count, "{:.2f}"),
        "client": _number(_median(each.cores("client") for each in found), "{:.2f}"),
    }


def _median(values: Iterable[float | None]) -> float | None:
    found = [each for each in values if each is not None]
    return statistics.median(found) if found else None


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
