"""Adds the flags by which the client commands reach a server, and reads them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypedDict

from redfence._defaults import SERVERS_VARIABLE, server_addresses
from redfence._transport.bearer import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from redfence._transport.tls import Tls, tls_of
from redfence_proto import addresses as defaults


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--server`, which may be repeated, the files of TLS, and the file of a bearer token."""
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

    parser.add_argument(
        "--bearer-token-file",
        metavar="FILE",
        type=Path,
        help="a file with this client's bearer token, read again for each call "
        f"(default: ${TOKEN_VARIABLE}, which is the token itself, else ${TOKEN_FILE_VARIABLE})",
    )


class Credentials(TypedDict):
    """What a client shows to a server; None is what the environment names, if it names anything."""

    tls: Tls | None
    token: Path | None


def credentials(arguments: argparse.Namespace) -> Credentials:
    """Return the files of TLS and of the token: each from its flag, else from the environment.

    Raises:
        InvalidArgumentError: only one of certificate and key is given.
    """
    tls = tls_of(ca=arguments.tls_ca, cert=arguments.tls_cert, key=arguments.tls_key)
    return {"tls": tls, "token": arguments.bearer_token_file}


def credential_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the given flags of TLS and of the token, for a process that also has `add_server_arguments`."""
    files = {
        "--tls-ca": arguments.tls_ca,
        "--tls-cert": arguments.tls_cert,
        "--tls-key": arguments.tls_key,
        "--bearer-token-file": arguments.bearer_token_file,
    }
    return [word for flag, file in files.items() if file is not None for word in (flag, str(file))]


def addresses(arguments: argparse.Namespace) -> list[str]:
    """Return the server addresses: from the flag, else from the environment, else the local default."""
    return list(arguments.server or server_addresses()) or [defaults.LOCK_SERVER]
