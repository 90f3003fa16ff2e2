"""Runs one holder of the demo as a process: lock, read the balance, wait for the order, write the balance.

It reports each step to the conductor as a line of JSON on standard output. It waits for one line on
standard input before it writes. It does not check its lease again before the write: a pause can
always come after the last check.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import redfence
from redfence._cli import servers
from redfence_storage.client import StorageClient
from redfence_storage.pause_demo.account import Account, FencedAccount, PlainAccount


def report(event: str, **fields: object) -> None:
    """Report an event to the conductor."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def deposit(client: redfence.Client, account: Account, options: argparse.Namespace) -> None:
    """Add the amount to the balance under the lock, and report each step."""
    with client.lock(options.resource, ttl=options.ttl, wait=options.wait, holder=options.name) as lease:
        balance = account.read(lease.token)
        report("ready_to_write", token=lease.token, balance=balance, remaining=round(lease.remaining(), 1))
        sys.stdin.readline()
        try:
            account.write(balance + options.amount, lease.token)
        except redfence.StaleTokenError as error:
            report("refused", message=str(error), highest_token=error.highest_token)
        else:
            report("written", balance=balance + options.amount)


def main() -> int:
    """Run one worker; return its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    servers.add_server_arguments(parser)
    parser.add_argument("--resource", required=True)
    parser.add_argument("--ttl", type=float, required=True)
    parser.add_argument("--wait", type=float, required=True)
    parser.add_argument("--amount", type=int, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--storage")
    where.add_argument("--file", type=Path)
    options = parser.parse_args()
    # The SDK also logs the loss, but only the conductor prints the story.
    logging.getLogger("redfence").setLevel(logging.ERROR)
    try:
        credentials = servers.credentials(options)
        with redfence.Client(*servers.addresses(options), **credentials) as client:
            if options.file is not None:
                deposit(client, PlainAccount(options.file), options)
            else:
                with StorageClient(options.storage, **credentials) as storage:
                    deposit(client, FencedAccount(storage, options.resource), options)
    except redfence.LeaseLostError as error:
        # The paused holder sees the loss only after its write. That is too late unless the storage
        # checks tokens.
        report("lease_lost", message=str(error))
    except redfence.RedfenceError as error:
        report("failed", message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
