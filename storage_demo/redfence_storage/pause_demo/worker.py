"""One holder of the demo, a process of its own: lock, read the balance, think, write it back.

Speaks to its conductor by lines of JSON on standard output, and waits for one line on standard input before it writes. It does not
look at its lease again before the write. That is the point: however late one looks, the pause can come after the look.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import redfence
from redfence_storage.client import StorageClient
from redfence_storage.pause_demo.account import Account, FencedAccount, PlainAccount


def report(event: str, **fields: object) -> None:
    """Tell the conductor."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def deposit(client: redfence.Client, account: Account, options: argparse.Namespace) -> None:
    """Add to the balance under the lock; tell each step."""
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
    """Run one worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--resource", required=True)
    parser.add_argument("--ttl", type=float, required=True)
    parser.add_argument("--wait", type=float, required=True)
    parser.add_argument("--amount", type=int, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--storage")
    where.add_argument("--file", type=Path)
    options = parser.parse_args()
    # The SDK warns of the loss as well, but the conductor tells the story.
    logging.getLogger("redfence").setLevel(logging.ERROR)
    try:
        with redfence.Client(options.server) as client:
            if options.file is not None:
                deposit(client, PlainAccount(options.file), options)
            else:
                with StorageClient(options.storage) as storage:
                    deposit(client, FencedAccount(storage, options.resource), options)
    except redfence.LeaseLostError as error:
        # Only now does the paused holder learn it, after its write: too late, if nobody else checked.
        report("lease_lost", message=str(error))
    except redfence.RedfenceError as error:
        report("failed", message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
