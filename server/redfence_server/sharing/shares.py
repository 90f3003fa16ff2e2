"""Hold what the calls and the connections of a server share."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from redfence_server.clock import Clock
from redfence_server.sharing.budget import Budget
from redfence_server.sharing.new_names import NewNames
from redfence_server.sharing.turns import Turns

# File descriptors that connections of clients leave for nodes, logs and the interpreter.
_OTHER_FILES: Final = 128
BUFFERED_BYTES_MAX_DEFAULT: Final = 128 * 1024 * 1024
"""One peer gets at most half of it: enough for 10,000 waiting calls with tokens of 2 KB."""


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """How much there is for all peers.

    Attributes:
        commands: how many commands of streams may be unanswered.
        connections: how many may be open; 0 for as many as the limit of files allows.
        buffered_bytes: how many bytes of open calls and unread answers may be kept.
        new_names_per_second: how many each peer may acquire; 0 for any number.
    """

    commands: int
    connections: int
    buffered_bytes: int
    new_names_per_second: int


def _places(connections_max: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections_max or max(1, soft - _OTHER_FILES)


@dataclass(frozen=True, slots=True)
class ConnectionShares:
    """Bounds what the connections of the transport `fast` take together.

    Attributes:
        places: the open connections.
        buffered_bytes: calls that have not ended, bodies that no method has read, and unread answers.
    """

    places: Budget
    buffered_bytes: Budget

    @classmethod
    def of(cls, connections_max: int = 0, buffered_bytes_max: int = BUFFERED_BYTES_MAX_DEFAULT) -> Self:
        """Return shares of so many connections, 0 for as many as the limit of files allows, and bytes."""
        return cls(Budget(_places(connections_max)), Budget(buffered_bytes_max))


class Shares:
    """Gives every peer its part of the server.

    Args:
        has_room: see `Turns`.

    Attributes:
        turns: when commands may begin.
        commands: the unanswered commands of streams.
        connections: what the connections of the transport `fast` share.
        new_names: the names of resources that were not used lately.
    """

    def __init__(self, limits: ShareLimits, *, has_room: Callable[[int], bool], clock: Clock) -> None:
        self.commands = Budget(limits.commands)
        self.turns = Turns(has_room, self.commands.taken_by)
        self.connections = ConnectionShares.of(limits.connections, limits.buffered_bytes)
        self.new_names = NewNames(limits.new_names_per_second, clock)

    def set_limits(self, limits: ShareLimits) -> None:
        """Bound what peers take from now on."""
        self.commands.size = limits.commands
        self.connections.places.size = _places(limits.connections)
        self.connections.buffered_bytes.size = limits.buffered_bytes
        self.new_names.per_second = limits.new_names_per_second
