"""Reads from the environment what a program did not tell its client: the servers and the holder's label."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from functools import lru_cache

from redfence._errors import InvalidArgumentError
from redfence._messages.requests import AcquireOrder

SERVERS_VARIABLE = "REDFENCE_SERVER"
_USER_CHARACTERS_MAX = 64


def server_addresses() -> tuple[str, ...]:
    """Return the addresses in REDFENCE_SERVER, which commas separate; () if it is unset or empty."""
    named = (address.strip() for address in os.environ.get(SERVERS_VARIABLE, "").split(","))
    return tuple(address for address in named if address)


def required_server_addresses() -> tuple[str, ...]:
    """Return the addresses in REDFENCE_SERVER.

    Raises:
        InvalidArgumentError: it is unset or empty.
    """
    if addresses := server_addresses():
        return addresses
    raise InvalidArgumentError(
        f'no server address given; pass at least one, e.g. "127.0.0.1:50051", or set {SERVERS_VARIABLE}',
        metadata={"field": "addresses"},
    )


def with_holder(order: AcquireOrder) -> AcquireOrder:
    """Return the order with the label of this process, if it has none.

    A lock or a decorator can be made before a fork, so that the label must be that of the process
    that acquires.
    """
    return order if order.holder is not None else replace(order, holder=holder_label())


def holder_label() -> str:
    """Return "user@host/pid" for this process; the user's number where no usable name is known."""
    return _label_of(os.getpid())


@lru_cache(maxsize=1)
def _label_of(pid: int) -> str:
    user = os.environ.get("USER") or os.environ.get("USERNAME") or ""
    if not (user.isascii() and user.isprintable() and 0 < len(user) <= _USER_CHARACTERS_MAX):
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()}/{pid}"
