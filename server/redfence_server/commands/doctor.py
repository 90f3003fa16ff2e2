"""`redfence doctor`: examine every node from this machine, and print its problems with advice."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from statistics import median

from redfence_server.clock import SystemClock
from redfence_server.commands import startup
from redfence_server.diagnosis.checkup import Checkup, check_up
from redfence_server.diagnosis.doctor import diagnose
from redfence_server.diagnosis.finding import Diagnosis, Finding, Severity
from redfence_server.nodes.cluster import check_urls

HELP = "examine every node: can it vote, and what to do if not"
EXIT_WELL = 0
EXIT_SERIOUS = 1

_WIDTH_MAX = 120
_INDENT = " " * 10


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    startup.add_node_flags(parser)
    parser.epilog = (
        "It needs no lock server, changes nothing, and takes about a second. Run it where the lock servers "
        f"run, to test their network path to the nodes. {startup.EPILOG} "
        "exit status: 0 no serious finding, 1 a serious finding, 2 it could not run (wrong usage or setting)"
    )
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="(default: %(default)s)"
    )


@startup.explain_refusal
def run(arguments: argparse.Namespace) -> int:
    """Examine the nodes and print the findings; the exit status tells whether any is serious."""
    settings = startup.settings_of(arguments)
    nodes = asyncio.run(
        check_up(
            check_urls(settings.nodes, settings.node_tls),
            settings.keyspace,
            dial_timeout_ms=settings.dial_timeout_ms,
            clock=SystemClock(),
        )
    )
    diagnosis = diagnose(nodes, settings)
    if arguments.output == "json":
        print(as_json(nodes, diagnosis))
    else:
        width = min(_WIDTH_MAX, shutil.get_terminal_size((_WIDTH_MAX, 0)).columns)
        print(as_table(nodes, diagnosis, width=width))
    return EXIT_SERIOUS if diagnosis.serious else EXIT_WELL


def as_json(nodes: Sequence[Checkup], diagnosis: Diagnosis) -> str:
    """Return the diagnosis for programs; an unknown value is null."""
    document = {
        "serious": diagnosis.serious,
        "cluster_id": diagnosis.cluster_id or None,
        "quorum": diagnosis.quorum,
        "nodes": [_node_as_json(node, diagnosis) for node in nodes],
        "findings": [asdict(finding) for finding in diagnosis.findings],
    }
    return json.dumps(document, indent=2, default=lambda severity_or_kind: severity_or_kind.value)


def _node_as_json(node: Checkup, diagnosis: Diagnosis) -> dict[str, object]:
    identity = node.found.identity if node.found else None
    engine, version = node.software if node.info else (None, None)
    memory_used, memory_max = node.memory_bytes if node.info else (None, None)
    trips_ms, offset = node.trips_ms, node.clock_offset_ms
    return {
        "index": node.index,
        "address": node.address,
        "can_vote": node.index in diagnosis.voters,
        "well": diagnosis.worst_of(node.index) is Severity.NOTE,
        "state": identity.phase.value if identity else None,
        "engine": engine,
        "version": version,
        "run_id": node.info.get("run_id"),
        "memory_used_bytes": memory_used,
        "memory_max_bytes": memory_max,
        "latency_ms": {"median": median(trips_ms), "worst": max(trips_ms)} if trips_ms else None,
        "clock_offset_ms": {"offset": offset[0], "unsure": offset[1]} if offset else None,
    }


_VERDICTS = {Severity.SERIOUS: "SERIOUS", Severity.WARNING: "warning", Severity.NOTE: "well"}
_COLUMNS = ("NODE", "VERDICT", "VOTE", "SERVER", "LATENCY", "CLOCK", "ADDRESS")


def as_table(nodes: Sequence[Checkup], diagnosis: Diagnosis, *, width: int) -> str:
    """Return the diagnosis for people: a line for each node, the findings, and a summary."""
    rows = [_COLUMNS, *(_row(node, diagnosis) for node in nodes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    for concerned, findings in _grouped(diagnosis.findings).items():
        heading = f"nodes {', '.join(map(str, concerned))}" if concerned else "the cluster"
        if len(concerned) == 1:
            heading = f"node {concerned[0]} ({nodes[concerned[0]].address})"
        lines += ["", heading]
        for finding in findings:
            for label, text in ((finding.severity.value, finding.what), ("", f"-> {finding.advice}")):
                first = f"  {label}".ljust(len(_INDENT))
                lines += wrap(text, initial_indent=first, subsequent_indent=_INDENT)
    return "\n".join([*lines, "", _summary(nodes, diagnosis)])


def _row(node: Checkup, diagnosis: Diagnosis) -> tuple[str, ...]:
    offset = node.clock_offset_ms
    return (
        str(node.index),
        _VERDICTS[diagnosis.worst_of(node.index)],
        "yes" if node.index in diagnosis.voters else "no",
        " ".join(node.software) if node.info else "-",
        f"{median(node.trips_ms):.1f}ms" if node.trips_ms else "-",
        f"{round(offset[0], 1) + 0.0:+.1f}ms" if offset else "-",
        node.address,
    )


def _grouped(findings: Sequence[Finding]) -> dict[tuple[int, ...], list[Finding]]:
    """Return the findings by the nodes that they concern, none for the cluster; the worst first.

    A finding that is the same on several nodes appears once.
    """
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for each in findings:
        alike.setdefault((each.kind, each.what, each.advice, each.node is None), []).append(each)
    groups: dict[tuple[int, ...], list[Finding]] = {}
    for same in alike.values():
        concerned = tuple(each.node for each in same if each.node is not None)
        groups.setdefault(concerned, []).append(same[0])
    return groups


def _summary(nodes: Sequence[Checkup], diagnosis: Diagnosis) -> str:
    numbers = {severity: diagnosis.count(severity) for severity in Severity}
    found = ", ".join(
        f"{number} {severity.value}{'s' if number > 1 and severity.value != 'serious' else ''}"
        for severity, number in numbers.items()
        if number
    )
    well = not numbers[Severity.SERIOUS] and not numbers[Severity.WARNING]
    voting = f"{len(diagnosis.voters)} of {len(nodes)} nodes can vote (quorum {diagnosis.quorum})"
    result = "all is well" if well else f"found: {found}"
    return f"cluster {diagnosis.cluster_id or '(not formed)'}: {voting}; {result}"
