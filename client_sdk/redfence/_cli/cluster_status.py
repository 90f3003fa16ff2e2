"""Prints whether each node votes, and if not, why: `redfence cluster status`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from redfence._cli import output, servers
from redfence._errors import OutcomeUnknownError, UnavailableError
from redfence._messages.reports import ClusterReport, Durability, NodeReport
from redfence._threads.client import Client

HELP = "show the state of every node"
EXIT_READY = 0
EXIT_NO_QUORUM = 1
EXIT_UNREACHABLE = 2

_COLUMNS = ("NODE", "STATE", "LATENCY", "CLOCK", "RUN", "HIGH", "DURABLE", "SINCE", "ADDRESS")
_UNKNOWN = "-"
# Enough to see a change; `-o json` shows the whole id.
_RUN_ID_SHOWN = 8
_OFFSET_MS_SHOWN_MAX = 10_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    servers.add_server_arguments(parser)
    output.add_output_argument(parser)
    parser.epilog = (
        "CLOCK is the node's clock minus the server's. RUN changes at every restart. HIGH is the greatest "
        "fencing token that the node knows. DURABLE shows whether the node votes again at once after a "
        "restart: proven by its settings, declared by you, or none. "
        "exit status: 0 a quorum of nodes is ready, 1 no quorum is ready, 2 no server was reachable"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the nodes; return an exit status that shows whether a quorum is ready."""
    try:
        with Client(*servers.addresses(arguments), **servers.credentials(arguments)) as client:
            report = client.cluster_status()
    except (UnavailableError, OutcomeUnknownError) as error:
        print(f"redfence cluster status: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    print(as_json(report) if arguments.output == "json" else as_table(report))
    return EXIT_READY if report.ready else EXIT_NO_QUORUM


def as_json(report: ClusterReport) -> str:
    """Return the report as JSON, with seconds as numbers or null, and states as lower-case words."""
    nodes = [
        asdict(node) | {"state": node.state.name.lower(), "durability": node.durability.name.lower()}
        for node in report.nodes
    ]
    return json.dumps(asdict(report) | {"ready": report.ready, "nodes": nodes}, indent=2)


def as_table(report: ClusterReport) -> str:
    """Return the report as a table: a line for each node with its problem below, and a verdict at the end."""
    heading, *lines = output.table(_COLUMNS, [_row(node) for node in report.nodes])
    table = [heading]
    for node, line in zip(report.nodes, lines, strict=True):
        table.append(line)
        if node.detail:
            table.append(f"{'':{len(_COLUMNS[0])}}  {node.detail}")
    ready = "ready" if report.ready else "NO QUORUM"
    table.append(f"cluster {report.cluster_id or '(not formed)'}: {ready} (quorum {report.quorum})")
    return "\n".join(table)


def _row(node: NodeReport) -> tuple[str, ...]:
    durable = _UNKNOWN if node.durability is Durability.UNKNOWN else node.durability.name.lower()
    return (
        str(node.index),
        node.state.name.lower(),
        _UNKNOWN if node.latency is None else f"{node.latency * 1000:.1f}ms",
        _UNKNOWN if node.clock_offset is None else _offset(node.clock_offset),
        node.run_id[:_RUN_ID_SHOWN] or _UNKNOWN,
        str(node.high),
        durable,
        _length(node.since),
        node.address,
    )


def _offset(seconds: float) -> str:
    """Return a clock offset as text, with its sign."""
    milliseconds = round(seconds * 1000, 1)
    if abs(milliseconds) < _OFFSET_MS_SHOWN_MAX:
        return f"{milliseconds + 0.0:+.1f}ms"  # + 0.0 turns -0.0 into 0.0
    return f"{'-' if seconds < 0 else '+'}{_length(abs(seconds))}"


def _length(seconds: float) -> str:
    for limit, unit, unit_seconds in ((120, "s", 1), (7200, "m", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / unit_seconds:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"
