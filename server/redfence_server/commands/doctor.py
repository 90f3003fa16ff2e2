"""`redfence doctor`: look at every node from here, and say what is the matter and what to do about it."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from redfence_server.commands import cluster_flags
from redfence_server.errors import StartupError
from redfence_server.finding import Diagnosis, Finding, Severity
from redfence_server.node_facts import NodeFacts

HELP = "look at every node: is it fit to vote, and what to do if not"
EXIT_WELL = 0
EXIT_SERIOUS = 1
EXIT_CANNOT_RUN = 2

_WIDTH_MAX = 120
_INDENT = " " * 10


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    cluster_flags.add_node_flags(parser)
    parser.epilog = (
        "It needs no lock server, changes nothing, and takes about a second. Run it where the lock servers run, for it is their way to the "
        f"nodes that counts. {cluster_flags.EPILOG} "
        "exit status: 0 nothing serious was found, 1 something serious was, 2 it could not run (wrong usage or setting)"
    )
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="(default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Look, print, and tell by the status whether anything is serious."""
    from redfence_server import composition
    from redfence_server.clock import SystemClock
    from redfence_server.doctor import diagnose
    from redfence_server.node_ailments import Limits
    from redfence_server.node_checkup import CheckupSettings, check_up
    from redfence_server.node_cluster import check_urls

    try:
        settings = cluster_flags.settings_of(arguments)
        urls = check_urls(settings.nodes)
    except StartupError as error:
        sys.stderr.write(f"redfence doctor: {error}\n")
        return EXIT_CANNOT_RUN
    how = CheckupSettings(keys=composition.keyspace(settings), dial_timeout_ms=settings.dial_timeout_ms)
    nodes = asyncio.run(check_up(urls, how, clock=SystemClock()))
    limits = Limits(
        node_timeout_ms=settings.node_timeout_ms,
        assume_durable=settings.assume_durable,
        key_prefix=settings.key_prefix,
    )
    diagnosis = diagnose(nodes, limits)
    if arguments.output == "json":
        print(as_json(nodes, diagnosis))
    else:
        width = min(_WIDTH_MAX, shutil.get_terminal_size((_WIDTH_MAX, 0)).columns)
        print(as_table(nodes, diagnosis, width=width))
    return EXIT_SERIOUS if diagnosis.serious else EXIT_WELL


def as_json(nodes: Sequence[NodeFacts], diagnosis: Diagnosis) -> str:
    """Return all of it for programs; what is not known is null."""
    return json.dumps(
        {
            "serious": diagnosis.serious,
            "cluster_id": diagnosis.cluster_id or None,
            "quorum": diagnosis.quorum,
            "nodes": [_node_as_json(node, diagnosis) for node in nodes],
            "findings": [
                {
                    "node": finding.node,
                    "severity": finding.severity.value,
                    "kind": finding.kind.value,
                    "what": finding.what,
                    "advice": finding.advice,
                    "keeps_out": finding.keeps_out,
                }
                for finding in diagnosis.findings
            ],
        },
        indent=2,
    )


def _node_as_json(node: NodeFacts, diagnosis: Diagnosis) -> dict[str, object]:
    process, sample, latency = node.process, node.clock_sample, node.latency
    identity = node.found.identity if node.found else None
    return {
        "index": node.index,
        "address": node.address,
        "can_vote": node.index in diagnosis.voters,
        "well": diagnosis.worst_of(node.index) is Severity.NOTE,
        "state": identity.phase.value if identity else None,
        "engine": process.engine if process else None,
        "version": process.version if process else None,
        "run_id": process.run_id if process else None,
        "memory_used_bytes": process.memory_used if process else None,
        "memory_max_bytes": process.memory_max if process else None,
        "latency_ms": {"median": latency.median_ms, "worst": latency.worst_ms} if latency else None,
        "clock_offset_ms": {"offset": sample.offset_ms, "unsure": sample.unsure_ms} if sample else None,
    }


_VERDICTS = {Severity.SERIOUS: "SERIOUS", Severity.WARNING: "warning", Severity.NOTE: "well"}
_COLUMNS = ("NODE", "VERDICT", "VOTE", "SERVER", "LATENCY", "CLOCK", "ADDRESS")


def as_table(nodes: Sequence[NodeFacts], diagnosis: Diagnosis, *, width: int) -> str:
    """Return all of it for people: a line for each node, what is the matter, and what it comes to."""
    rows = [_COLUMNS, *(_row(node, diagnosis) for node in nodes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    for concerned, findings in _grouped(diagnosis.findings):
        lines += ["", _heading(concerned, nodes)]
        for finding in findings:
            lines += _paragraph(finding.severity.value, finding.what, width)
            lines += _paragraph("", f"-> {finding.advice}", width)
    return "\n".join([*lines, "", _summary(nodes, diagnosis)])


def _row(node: NodeFacts, diagnosis: Diagnosis) -> tuple[str, ...]:
    process, sample, latency = node.process, node.clock_sample, node.latency
    return (
        str(node.index),
        _VERDICTS[diagnosis.worst_of(node.index)],
        "yes" if node.index in diagnosis.voters else "no",
        f"{process.engine} {process.version}" if process else "-",
        f"{latency.median_ms:.1f}ms" if latency else "-",
        f"{round(sample.offset_ms, 1) + 0.0:+.1f}ms" if sample else "-",
        node.address,
    )


def _grouped(findings: Sequence[Finding]) -> Iterator[tuple[tuple[int, ...], list[Finding]]]:
    """Yield the findings with the nodes that they concern, none for the cluster; the group with the worst finding first.

    What is the same on several nodes is said once.
    """
    nodes_by_text: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        same = (finding.node is None, finding.kind, finding.what, finding.advice)
        nodes_by_text.setdefault(same, []).append(finding)
    groups: dict[tuple[int, ...], list[Finding]] = {}
    for alike in nodes_by_text.values():
        concerned = tuple(finding.node for finding in alike if finding.node is not None)
        groups.setdefault(concerned, []).append(alike[0])
    # The findings came in order of their weight, and so do the groups.
    yield from groups.items()


def _heading(concerned: tuple[int, ...], nodes: Sequence[NodeFacts]) -> str:
    match concerned:
        case ():
            return "the cluster"
        case (index,):
            return f"node {index} ({nodes[index].address})"
    return f"nodes {', '.join(map(str, concerned))}"


def _paragraph(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {label}".ljust(len(_INDENT)),
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(nodes: Sequence[NodeFacts], diagnosis: Diagnosis) -> str:
    numbers = {severity: diagnosis.count(severity) for severity in Severity}
    found = ", ".join(
        f"{number} {severity.value}{'s' if number > 1 and severity is not Severity.SERIOUS else ''}"
        for severity, number in numbers.items()
        if number
    )
    well = not numbers[Severity.SERIOUS] and not numbers[Severity.WARNING]
    voting = f"{len(diagnosis.voters)} of {len(nodes)} nodes can vote (quorum {diagnosis.quorum})"
    return f"cluster {diagnosis.cluster_id or '(not formed)'}: {voting}; {'all is well' if well else f'found: {found}'}"
