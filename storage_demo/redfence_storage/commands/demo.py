"""Plays stories that show why fencing tokens are needed: `redfence demo`."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from redfence._cli import servers
from redfence._defaults import server_addresses
from redfence_proto import addresses as defaults
from redfence_proto import variables

if TYPE_CHECKING:
    from redfence_storage.pause_demo.conductor import Stage

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
        epilog="The files of TLS and the token are for the lock server and for the storage. If no flag and "
        "no variable names a server, and no flag gives credentials, the story looks for servers on "
        f"{defaults.LOCK_SERVER} and {defaults.STORAGE}. Unless both run, it starts a lock server and a "
        "storage of its own, with a quorum. These have no TLS and no access control, whatever the "
        "environment says.",
    )
    gc_pause.add_argument(
        "--no-fencing", action="store_true", help="keep the data in a plain file, which does not check tokens"
    )
    servers.add_server_arguments(gc_pause)
    gc_pause.add_argument(
        "--storage",
        default=os.environ.get("REDFENCE_STORAGE"),
        metavar="ADDR",
        help=f"HOST:PORT of the storage demo (default: $REDFENCE_STORAGE, else {defaults.STORAGE})",
    )


def run(args: argparse.Namespace) -> int:
    """Play the story; return the exit status."""
    import tempfile
    from pathlib import Path

    from redfence_storage.pause_demo.conductor import DemoError, Stage, play

    try:
        with tempfile.TemporaryDirectory() as folder:
            stage = Stage(
                servers=servers.addresses(args),
                storage=args.storage or defaults.STORAGE,
                credentials=servers.credential_flags(args),
                environment=os.environ,
                folder=Path(folder),
                narrate=_narrate,
            )
            named = bool(args.server or server_addresses() or args.storage)
            with _served(stage, named=named, fenced=not args.no_fencing) as served:
                survived = play(replace(served, storage=None) if args.no_fencing else served)
    except DemoError as error:
        print(f"redfence demo: {error}", file=sys.stderr)
        return EXIT_NOT_PLAYED
    return EXIT_REFUSED if survived else EXIT_CORRUPTED


def _narrate(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _served(stage: Stage, *, named: bool, fenced: bool) -> Iterator[Stage]:
    """Yield the stage with a lock server and a storage; start both if none is `named` and not both run.

    Raises:
        DemoError: the story is `fenced`, and its storage does not run.
    """
    from redfence_storage.pause_demo.conductor import DemoError

    assert stage.storage is not None
    stored = _is_listening(stage.storage)
    if named or stage.credentials or (_is_listening(stage.servers[0]) and stored):
        if fenced and not stored:
            raise DemoError(
                f"no storage runs on {stage.storage}: start `redfence storage`, or name another by --storage"
            )
        yield stage
        return
    _narrate(
        f"(No lock server runs on {stage.servers[0]}, or no storage on {stage.storage}: "
        "starting both for this story, with a quorum.)"
    )
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
    # The credentials of other servers would keep the workers out, or would go to these ones.
    environment = variables.without_protection()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            # The line is: redfence ready: lock server on HOST:PORT, storage on HOST:PORT, …
            words = process.stdout.readline().replace(",", "").split()
            addresses = [after for word, after in pairwise(words) if word == "on"]
            if len(addresses) != 2:
                raise DemoError("could not start a lock server; its error is printed above")
            yield replace(stage, servers=addresses[:1], storage=addresses[1], environment=environment)
        finally:
            process.terminate()


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
