"""`redfence cluster status`: does each node vote, and if not, why."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from redfence._cli import servers
from redfence._errors import OutcomeUnknownError, UnavailableError
from redfence._reports import ClusterReport
from redfence._sync_client import Client

HELP = "show the state of every node"
EXIT_READY = 0
EXIT_NO_QUORUM = 1
EXIT_UNREACHABLE = 2

_COLUMNS = ("NODE", "STATE", "LATENCY", "SINCE", "ADDRESS", "DETAIL")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    servers.add_server_argument(parser)
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="(default: %(default)s)"
    )
    parser.epilog = "exit status: 0 a quorum of nodes is ready, 1 it is not, 2 no server could be reached"


def run(arguments: argparse.Namespace) -> int:
    """Print the nodes; the status tells whether a quorum is ready."""
    try:
        with Client(*servers.addresses(arguments)) as client:
            report = client.cluster_status()
    except (UnavailableError, OutcomeUnknownError) as error:
        print(f"redfence cluster status: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    print(as_json(report) if arguments.output == "json" else as_table(report))
    return EXIT_READY if report.ready else EXIT_NO_QUORUM


def as_json(report: ClusterReport) -> str:
    """Return the report for programs: seconds as numbers, states as lower-case words."""
    nodes = [asdict(node) | {"state": node.state.name.lower()} for node in report.nodes]
    return json.dumps(asdict(report) | {"ready": report.ready, "nodes": nodes}, indent=2)


def as_table(report: ClusterReport) -> str:
    """Return the report for people."""
    rows = [_COLUMNS]
    for node in report.nodes:
        latency = "-" if node.latency is None else f"{node.latency * 1000:.1f}ms"
        state = node.state.name.lower()
        rows.append((str(node.index), state, latency, _length(node.since), node.address, node.detail))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    ready = "ready" if report.ready else "NO QUORUM"
    lines.append(f"cluster {report.cluster_id or '(not formed)'}: {ready} (quorum {report.quorum})")
    return "\n".join(lines)


def _length(seconds: float) -> str:
    for limit, unit, unit_seconds in ((120, "s", 1), (7200, "m", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / unit_seconds:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"
