"""Plays stories that show why fencing tokens are needed: `redfence demo`."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from redfence_proto import addresses as defaults

HELP = "show with real processes why fencing tokens are needed"

EXIT_REFUSED = 0
EXIT_CORRUPTED = 1
EXIT_NOT_PLAYED = 2
_CONNECT_TIMEOUT_S = 1.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each story."""
    stories = parser.add_subparsers(dest="story", required=True, metavar="STORY")
    gc_pause = stories.add_parser(
        "gc-pause",
        help="pause a holder past its lease; it writes when it wakes up",
        description="Stops a real process with SIGSTOP until its lease is over, then lets it write. "
        "Exit status: 0 if the storage refused the stale write, 1 if the write corrupted the data "
        "(as it does with --no-fencing), 2 if the story could not be played.",
    )
    gc_pause.add_argument(
        "--no-fencing", action="store_true", help="keep the data in a plain file, which does not check tokens"
    )
    gc_pause.add_argument(
        "--server",
        default=os.environ.get("REDFENCE_SERVER"),
        metavar="HOST:PORT",
        help=f"the lock server [$REDFENCE_SERVER; {defaults.LOCK_SERVER}, or a new one if none runs there]",
    )
    gc_pause.add_argument(
        "--storage",
        default=os.environ.get("REDFENCE_STORAGE"),
        metavar="HOST:PORT",
        help=f"the storage demo [$REDFENCE_STORAGE; {defaults.STORAGE}, or a new one if none runs there]",
    )


def run(args: argparse.Namespace) -> int:
    """Play the story; return the exit status."""
    import tempfile
    from pathlib import Path

    from redfence_storage.pause_demo.conductor import DemoError, Stage, play

    try:
        with _servers(args) as (server, storage), tempfile.TemporaryDirectory() as folder:
            stage = Stage(
                server=server,
                storage=None if args.no_fencing else storage,
                folder=Path(folder),
                narrate=_narrate,
            )
            survived = play(stage)
    except DemoError as error:
        print(f"redfence demo: {error}", file=sys.stderr)
        return EXIT_NOT_PLAYED
    return EXIT_REFUSED if survived else EXIT_CORRUPTED


def _narrate(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _servers(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the addresses of a lock server and a storage; start both if none is named or running."""
    server, storage = args.server or defaults.LOCK_SERVER, args.storage or defaults.STORAGE
    if args.server or args.storage or (_is_listening(server) and _is_listening(storage)):
        yield server, storage
        return
    _narrate(f"(No servers run on {server} and {storage}: starting a quorum for this story.)")
    from redfence_storage.pause_demo.conductor import DemoError

    command = [
        sys.executable,
        "-m",
        "redfence",
        "dev",
        "--listen",
        "127.0.0.1:0",
        "--storage-listen",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            # The line is: redfence ready: lock server on HOST:PORT, storage on HOST:PORT, …
            words = process.stdout.readline().replace(",", "").split()
            addresses = [after for word, after in pairwise(words) if word == "on"]
            if len(addresses) != 2:
                raise DemoError("could not start a lock server; its error is printed above")
            yield addresses[0], addresses[1]
        finally:
            process.terminate()


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
