"""Ends the lease that holds a lock with a given token: `redfence locks force-release`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from redfence._cli import output, servers
from redfence._messages.admin_reports import ForceOutcome, ForceReport
from redfence._threads.admin_client import AdminClient

HELP = "end the lease that holds a lock"
EXIT_RELEASED = 0
EXIT_NOT_RELEASED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("resource", help="the name of the lock")
    parser.add_argument(
        "--token", type=int, required=True, help="the token of the lease to end; see `redfence locks inspect`"
    )
    parser.add_argument("--reason", default="", help="why; the server logs it")
    servers.add_server_arguments(parser)
    output.add_output_argument(parser)
    parser.epilog = (
        "The holder may go on until its next renewal: only a storage that checks the token stops it. "
        "exit status: 0 the lease has ended, 1 it does not hold the lock, or a quorum did not answer"
    )


def run(arguments: argparse.Namespace) -> int:
    """End the lease; return an exit status that shows whether this call ended it."""
    with AdminClient(*servers.addresses(arguments), **servers.credentials(arguments)) as client:
        report = client.force_release(arguments.resource, arguments.token, reason=arguments.reason)
    if arguments.output == "json":
        print(json.dumps(asdict(report) | {"outcome": report.outcome.name.lower()}, indent=2))
    else:
        is_error = report.outcome is not ForceOutcome.RELEASED
        print(as_text(arguments.resource, arguments.token, report), file=sys.stderr if is_error else None)
    return EXIT_RELEASED if report.outcome is ForceOutcome.RELEASED else EXIT_NOT_RELEASED


def as_text(resource: str, token: int, report: ForceReport) -> str:
    """Return the outcome as a sentence; if nothing was released, with what to do."""
    if report.outcome is ForceOutcome.RELEASED:
        return f"{resource}: the lease with token {token} has ended"
    if report.current is None:
        return f"redfence locks force-release: {resource} is not held; nothing was released"
    current = report.current
    return (
        f"redfence locks force-release: {resource} is held with token {current.token}, not {token}, by "
        f"{current.holder or 'a holder without a label'}; nothing was released. Look again with: "
        f"redfence locks inspect {resource}"
    )
