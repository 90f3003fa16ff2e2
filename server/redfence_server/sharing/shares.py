"""Hold what the calls and the connections of a server share."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from redfence_server.clock import Clock
from redfence_server.sharing.budget import Budget
from redfence_server.sharing.new_names import NewNames
from redfence_server.sharing.turns import Turns

# File descriptors that connections of clients leave for nodes, logs and the interpreter.
_OTHER_FILES: Final = 128


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """How much there is for all peers.

    Attributes:
        commands: how many commands of streams may be unanswered.
        connections: how many may be open; 0 for as many as the limit of files allows.
        new_names_per_second: how many each peer may acquire; 0 for any number.
    """

    commands: int
    connections: int
    new_names_per_second: int


class Shares:
    """Gives every peer its part of the server.

    Args:
        has_room: see `Turns`.

    Attributes:
        turns: when commands may begin.
        commands: the unanswered commands of streams.
        connections: the open connections, where the transport shows them.
        new_names: the names of resources that were not used lately.
    """

    def __init__(self, limits: ShareLimits, *, has_room: Callable[[int], bool], clock: Clock) -> None:
        self.commands = Budget(limits.commands)
        self.turns = Turns(has_room, self.commands.taken_by)
        self.connections = connection_places(limits.connections)
        self.new_names = NewNames(limits.new_names_per_second, clock)

    def set_limits(self, limits: ShareLimits) -> None:
        """Bound what peers take from now on."""
        self.commands.size = limits.commands
        self.connections.size = connection_places(limits.connections).size
        self.new_names.per_second = limits.new_names_per_second


def connection_places(connections_max: int = 0) -> Budget:
    """Return the places for open connections; 0 for as many as the limit of files allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Budget(connections_max or max(1, soft - _OTHER_FILES))
