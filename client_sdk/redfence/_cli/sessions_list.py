"""Prints the open streams of the server process that answers: `redfence sessions list`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from redfence._cli import output, servers
from redfence._messages.admin_reports import OpenSession
from redfence._threads.admin_client import AdminClient

HELP = "show the open streams of a server process"

_COLUMNS = ("NUMBER", "KIND", "AGE", "UNANSWERED", "WAITING", "PEER")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    servers.add_server_arguments(parser)
    output.add_output_argument(parser)
    parser.epilog = (
        "UNANSWERED counts the commands without a written result, WAITING the acquires among them. The list "
        "includes the session of this command. With several server processes on one port, the list has the "
        "streams of one of them. -o json prints one object for each stream, a line each."
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the streams, the oldest first; return 0."""
    with AdminClient(*servers.addresses(arguments), **servers.credentials(arguments)) as client:
        sessions = list(client.list_sessions())
    if arguments.output == "json":
        for session in sessions:
            print(json.dumps(asdict(session) | {"kind": session.kind.name.lower()}))
    else:
        print("\n".join(output.table(_COLUMNS, [_row(session) for session in sessions])))
    return 0


def _row(session: OpenSession) -> tuple[str, ...]:
    kind, age = session.kind.name.lower(), output.seconds(session.age)
    return (str(session.number), kind, age, str(session.unanswered), str(session.waiting), session.peer)
