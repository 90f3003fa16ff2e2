"""Prints one lock, node by node, with its queue: `redfence locks inspect`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from redfence._cli import output, servers
from redfence._messages.reports import Hold, LockReport
from redfence._threads.client import Client

HELP = "show the holder, the nodes and the queue of one lock"

_COLUMNS = ("NODE", "ANSWER", "TOKEN", "REMAINING", "HOLDER")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("resource", help="the name of the lock")
    servers.add_server_arguments(parser)
    output.add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the lock; return 0."""
    with Client(*servers.addresses(arguments), **servers.credentials(arguments)) as client:
        report = client.get_lock(arguments.resource)
    print(as_json(report) if arguments.output == "json" else as_table(report))
    return 0


def as_json(report: LockReport) -> str:
    """Return the report as JSON, with seconds as numbers, and answers as lower-case words."""
    nodes = [asdict(node) | {"answer": node.answer.name.lower()} for node in report.nodes]
    return json.dumps(asdict(report) | {"nodes": nodes}, indent=2)


def as_table(report: LockReport) -> str:
    """Return the report as text: the holder, a line for each node, and a line for each waiter."""
    current = report.current
    state = "closed by its lock delay" if current and current.closed else "held"
    held = f"{state}: token {current.token}" if current else "free"
    rows = [(str(node.index), node.answer.name.lower(), *_cells(node.hold)) for node in report.nodes]
    lines = [f"{report.resource}: {held}; {report.waiters} waiting at this server"]
    lines += output.table(_COLUMNS, rows)
    lines += [
        f"waiting {number}: {each.holder or '-'} for {output.seconds(each.waited)}"
        for number, each in enumerate(report.queue, 1)
    ]
    return "\n".join(lines)


def _cells(hold: Hold | None) -> tuple[str, str, str]:
    if hold is None:
        return "-", "-", "-"
    return (*output.hold(hold), hold.holder or "-")
