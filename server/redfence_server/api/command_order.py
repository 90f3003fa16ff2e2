"""Order the commands of one message: releases first, for waiters; cancels last, after their acquires."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from redfence_proto.v1 import lock_pb2

# Reading a command from its message takes a fiftieth of the time of carrying it out.
_PER_PART: Final = 256
_RANKS: Final[Mapping[str | None, int]] = MappingProxyType({"release": 0, "cancel": 2})


def rank(command: lock_pb2.SessionCommand) -> int:
    """Return 0 for a release, 2 for a cancel, 1 for any other command."""
    return _RANKS.get(command.WhichOneof("command"), 1)


async def in_order(
    commands: Sequence[lock_pb2.SessionCommand], turn: Callable[[], Awaitable[None]]
) -> Sequence[int]:
    """Return the indices of the commands sorted by `rank`; wait for a turn before reading each part of them.

    A message may have 10,000 commands, and Python takes 10 ms to read them. A command that Python has read
    takes 100 bytes until it is dropped, an index 4.
    """
    ranked = array("I"), array("I"), array("I")
    for first in range(0, len(commands), _PER_PART):
        await turn()
        for index, command in enumerate(commands[first : first + _PER_PART], first):
            ranked[rank(command)].append(index)
    releases, others, cancels = ranked
    return releases + others + cancels
