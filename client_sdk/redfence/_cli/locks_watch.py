"""Prints how locks change, a line for each change: `redfence locks watch`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime

from redfence._cli import output, servers
from redfence._messages.watch_reports import LockChanges, LockEvent
from redfence._threads.admin_client import AdminClient
from redfence_proto import durations

HELP = "show how locks change, until Ctrl-C"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("prefix", nargs="?", default="", help="the start of the names (default: all)")
    parser.add_argument(
        "--interval",
        type=durations.seconds,
        default=1.0,
        metavar="DURATION",
        help="how long from one picture of the cluster to the next, 0.1s to 60s (default: 1s)",
    )
    servers.add_server_arguments(parser)
    output.add_output_argument(parser)
    parser.epilog = (
        "A line has the time, the change, the token, the lock and the holder. Changes: held (when the watch "
        "begins), acquired, released, expired, lost, forced. A lock that its lock delay keeps closed is not "
        "held: the watch prints expired or forced when the lease ends, and nothing when the lock opens. The "
        "watch may miss a lease that begins and ends between two pictures. It surely tells released from "
        "expired only if the ttl is at least twice the interval. After a broken connection the watch goes on "
        "at another --server, and first prints the locks that are held then. -o json prints one object for "
        "each change, a line each. "
        "exit status: 1 the watch failed, e.g. no server was reachable; 130 Ctrl-C"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print changes until the watch fails or the operator stops it.

    Raises:
        RedfenceError: the watch failed.
    """
    as_line = as_json if arguments.output == "json" else as_text
    begun = False
    with AdminClient(*servers.addresses(arguments), **servers.credentials(arguments)) as client:
        for changes in client.watch_locks(arguments.prefix, interval=arguments.interval):
            if notice := _notice(changes, begun=begun):
                print(f"redfence locks watch: {notice}", file=sys.stderr)
            begun = begun or changes.is_first
            for event in changes.events:
                assert changes.taken_at is not None
                print(as_line(event, changes.taken_at))
            if sys.stdout is not None:
                sys.stdout.flush()
    raise AssertionError("a watch ends only by an error")


def _notice(changes: LockChanges, *, begun: bool) -> str:
    """Return what the operator must know beside the changes, or an empty text."""
    if changes.problem is not None:
        return f"{changes.problem}; the server tries again"
    if begun and changes.is_first:
        return "the connection broke; the watch goes on with the locks that are held now"
    return ""


def as_json(event: LockEvent, at: datetime) -> str:
    """Return the change as a JSON object, with the time as ISO 8601."""
    return json.dumps({"time": at.isoformat()} | asdict(event) | {"kind": event.kind.name.lower()})


def as_text(event: LockEvent, at: datetime) -> str:
    """Return the change as a line of columns; the time is that of this machine's time zone."""
    time = at.astimezone().strftime("%H:%M:%S.%f")[:-3]
    return f"{time}  {event.kind.name.lower():8}  {event.token:>10}  {event.resource}  {event.holder or '-'}"
