"""Adds the `--server` flag to the client commands, and reads it."""

from __future__ import annotations

import argparse
import os

ENVIRONMENT = "REDFENCE_SERVER"
DEFAULT = "127.0.0.1:50051"


def add_server_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--server`, which may be repeated."""
    parser.add_argument(
        "--server",
        action="append",
        metavar="ADDR",
        help=f"HOST:PORT of a lock server; repeat the flag for several servers, tried in this order "
        f"(default: ${ENVIRONMENT}, separated by commas, else {DEFAULT})",
    )


def addresses(arguments: argparse.Namespace) -> list[str]:
    """Return the server addresses: from the flag, else from the environment, else the local default."""
    if arguments.server:
        return list(arguments.server)
    named = [address.strip() for address in os.environ.get(ENVIRONMENT, "").split(",")]
    return [address for address in named if address] or [DEFAULT]
