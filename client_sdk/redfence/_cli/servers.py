"""Adds the `--server` flag to the client commands, and reads it."""

from __future__ import annotations

import argparse

from redfence._defaults import SERVERS_VARIABLE, server_addresses
from redfence_proto import addresses as defaults


def add_server_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--server`, which may be repeated."""
    parser.add_argument(
        "--server",
        action="append",
        metavar="ADDR",
        help=f"HOST:PORT of a lock server; repeat the flag for several servers, tried in this order "
        f"(default: ${SERVERS_VARIABLE}, separated by commas, else {defaults.LOCK_SERVER})",
    )


def addresses(arguments: argparse.Namespace) -> list[str]:
    """Return the server addresses: from the flag, else from the environment, else the local default."""
    return list(arguments.server or server_addresses()) or [defaults.LOCK_SERVER]
