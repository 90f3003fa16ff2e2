"""Prints the held locks as a quorum of nodes sees them: `redfence locks list`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from redfence._cli import output, servers
from redfence._messages.admin_reports import ListedLock
from redfence._threads.admin_client import AdminClient

HELP = "show the locks that are held or closed"

_COLUMNS = ("RESOURCE", "TOKEN", "REMAINING", "WAITERS", "HOLDER")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("prefix", nargs="?", default="", help="the start of the names (default: all)")
    servers.add_server_arguments(parser)
    output.add_output_argument(parser)
    parser.epilog = (
        "WAITERS counts the acquires that wait at the server that answered. `closed` behind REMAINING: the "
        "lease was lost, and its lock delay keeps the lock closed for that time. A lock that begins or ends "
        "meanwhile may be missing. -o json prints one object for each lock, a line each."
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the locks, sorted by name as a table, or as they come as JSON; return 0."""
    with AdminClient(*servers.addresses(arguments), **servers.credentials(arguments)) as client:
        if arguments.output == "json":
            for lock in client.list_locks(arguments.prefix):
                print(json.dumps(asdict(lock)))
            return 0
        locks = {lock.resource: lock for lock in client.list_locks(arguments.prefix)}
    print("\n".join(output.table(_COLUMNS, [_row(locks[name]) for name in sorted(locks)])))
    return 0


def _row(lock: ListedLock) -> tuple[str, ...]:
    current = lock.current
    return (lock.resource, *output.hold(current)[:2], str(lock.waiters), current.holder or "-")
