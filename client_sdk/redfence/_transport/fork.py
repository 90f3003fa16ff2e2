"""Turns the fork handlers of gRPC off, and refuses gRPC in a child where a fork has broken it.

This module imports gRPC with its fork handlers off, unless the program has set GRPC_ENABLE_FORK_SUPPORT.

Without that variable gRPC 1.85 runs one half of its handlers: 1 of 30 children of a process with an open
stream crashed inside `os.fork`, and others hung later. With the variable set to 1, a fork waits up to 5 s
for busy threads of gRPC, and the parent lost a lease meanwhile. With the handlers off, a fork does the
parent no harm, and gRPC never works in the child.
"""

from __future__ import annotations

import os
from weakref import WeakSet

_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_is_set = _VARIABLE in os.environ
os.environ.setdefault(_VARIABLE, "0")

import grpc as grpc  # noqa: E402, PLC0414  (gRPC reads the variable when Python imports it)

HAS_FORK_SUPPORT = os.environ[_VARIABLE].lower() in {"1", "true", "yes"}
"""Whether the program asked gRPC to work after a fork; gRPC accepts these values."""

if not _is_set:
    # Programs that this one starts decide for themselves.
    del os.environ[_VARIABLE]

from redfence._errors import ClosedError  # noqa: E402  (it imports gRPC)

_channels: WeakSet[object] = WeakSet()
_used_in = 0  # the process that opened the first channel
# Ending an inherited channel can hang or crash, so these live until the process ends.
_inherited: list[object] = []


def check_fork() -> None:
    """Refuse to open a channel that would hang or crash.

    Raises:
        ClosedError: a fork has broken gRPC in this process.
    """
    if _used_in not in {0, os.getpid()} and not HAS_FORK_SUPPORT:
        raise ClosedError(
            f"gRPC does not work in process {os.getpid()}, because process {_used_in} used it and then "
            "forked it; connect no redfence client before the fork, or start processes by spawn"
        )


def note_channel(channel: object) -> None:
    """Record an open channel; a forked child must not end it."""
    global _used_in  # noqa: PLW0603  (gRPC's state is the process's, too)
    _used_in = _used_in or os.getpid()
    _channels.add(channel)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=lambda: _inherited.extend(_channels))
