"""Writes a comparison as Markdown tables and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import figures
from bench.figures import Measurement, Spread
from bench.services import ETCD, Target


def markdown(
    targets: Sequence[Target],
    measurements: Sequence[Measurement],
    workloads: Sequence[str],
    absent: Mapping[str, str],
) -> str:
    """Return one table for each workload, and the targets that are absent."""
    sections = [_table(targets, measurements, workload) for workload in workloads]
    sections += [f"Absent: {name}: {reason}" for name, reason in absent.items()]
    return "\n\n".join(sections)


def save(path: Path, measurements: Sequence[Measurement], absent: Mapping[str, str]) -> None:
    """Write everything that was measured, for later comparisons."""
    content: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "absent": dict(absent),
        "measurements": [asdict(each) for each in measurements],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _title(workload: str) -> str:
    return "16 workers on one resource" if workload == "one" else f"{workload} workers, each its own resource"


def _table(targets: Sequence[Target], measurements: Sequence[Measurement], workload: str) -> str:
    """Return the table of one workload; a target without measurements has no row."""
    rounds = {
        each.name: found
        for each in targets
        if (found := figures.by_round(measurements, target=each.name, workload=workload))
    }
    unit = "hand-overs/s" if workload == "one" else "pairs/s"
    header = [
        *("", f"{unit} (min to max)", *(f"÷ {peer}" for peer in _peers(targets))),
        *(["÷ first"] if _compares_variants(targets) else []),
        *("p50 ms", "p99", "p99.9", *(["p50: etcd ÷"] if "etcd" in _peers(targets) else [])),
        *("server µs/pair", "each node", "client", "all"),
    ]
    rows = [_row(each, targets, rounds) for each in targets if each.name in rounds]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join([f"### {_title(workload)}", "", *("| " + " | ".join(line) + " |" for line in lines)])


def _row(target: Target, targets: Sequence[Target], rounds: dict[str, dict[int, Measurement]]) -> list[str]:
    own = rounds[target.name]
    etcd = rounds.get("etcd", {})
    rate = Spread.over([each.rate for each in own.values()])
    ratios = [_ratio(own, rounds.get(_peer_name(peer, target), {})) for peer in _peers(targets)]
    if _compares_variants(targets):
        first = next((each for each in targets if _is_same_but_variant(each, target)), target)
        ratios.append(_ratio(own, rounds.get(first.name, {})))
    node_us = _median(each.cpu_us_per_pair("node") for each in own.values())
    total_us = statistics.median(
        sum(each.cpu_s.values()) * 1e6 / each.result["pairs"] for each in own.values()
    )
    return [
        *(target.name, f"{rate.median:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})", *ratios),
        *(_milliseconds(own, name) for name in ("p50_ms", "p99_ms", "p99_9_ms")),
        *(
            [_number(figures.ratio(own, etcd, of_latency=True), "{:.2f}")]
            if "etcd" in _peers(targets)
            else []
        ),
        _number(_median(each.cpu_us_per_pair("server") for each in own.values()), "{:.0f}"),
        _number(None if node_us is None else node_us / target.node_count, "{:.0f}"),
        _number(_median(each.cpu_us_per_pair("client") for each in own.values()), "{:.0f}"),
        f"{total_us:.0f}",
    ]


def _peers(targets: Sequence[Target]) -> list[str]:
    """Return the kinds of the peers, in the order of their rows."""
    return list(dict.fromkeys(each.kind for each in targets if not each.variant))


def _compares_variants(targets: Sequence[Target]) -> bool:
    return len({each.variant for each in targets if each.variant}) > 1


def _is_same_but_variant(one: Target, other: Target) -> bool:
    return (one.kind, one.node_count) == (other.kind, other.node_count)


def _peer_name(kind: str, target: Target) -> str:
    """Return the name of the peer's row to compare with: the one with as many nodes."""
    return kind if kind in ETCD else f"{kind} N={target.node_count}"


def _ratio(own: dict[int, Measurement], theirs: dict[int, Measurement]) -> str:
    return _number(figures.ratio(own, theirs), "{:.2f}")


def _milliseconds(rounds: dict[int, Measurement], name: str) -> str:
    return f"{statistics.median(each.latency_ms(name) for each in rounds.values()):.2f}"


def _median(values: Any) -> float | None:
    found = [each for each in values if each is not None]
    return statistics.median(found) if found else None


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
