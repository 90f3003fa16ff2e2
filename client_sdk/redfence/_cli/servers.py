"""Adds the flags by which the client commands reach a server, and reads them."""

from __future__ import annotations

import argparse

from redfence._defaults import SERVERS_VARIABLE, server_addresses
from redfence._transport.tls import Tls, tls_of
from redfence_proto import addresses as defaults


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--server`, which may be repeated, and the files of TLS."""
    parser.add_argument(
        "--server",
        action="append",
        metavar="ADDR",
        help=f"HOST:PORT of a lock server; repeat the flag for several servers, tried in this order "
        f"(default: ${SERVERS_VARIABLE}, separated by commas, else {defaults.LOCK_SERVER})",
    )
    for name, purpose in (
        ("ca", "the authorities of servers; without it and the others, the connection is plain text"),
        ("cert", "this client's certificate, if the server wants one"),
        ("key", "the private key of that certificate"),
    ):
        parser.add_argument(
            f"--tls-{name}",
            metavar="FILE",
            help=f"PEM file: {purpose} (default: $REDFENCE_TLS_{name.upper()})",
        )


def tls(arguments: argparse.Namespace) -> Tls | None:
    """Return the files of TLS: each from its flag, else from the environment; None for plain text.

    Raises:
        InvalidArgumentError: only one of certificate and key is given.
    """
    return tls_of(ca=arguments.tls_ca, cert=arguments.tls_cert, key=arguments.tls_key)


def addresses(arguments: argparse.Namespace) -> list[str]:
    """Return the server addresses: from the flag, else from the environment, else the local default."""
    return list(arguments.server or server_addresses()) or [defaults.LOCK_SERVER]
