"""Hold what the calls of a server share."""

from __future__ import annotations

from dataclasses import dataclass

from redfence_server.sharing.budget import Budget
from redfence_server.sharing.new_names import NewNames
from redfence_server.sharing.turns import Turns


@dataclass(frozen=True, slots=True)
class Shares:
    """What every peer gets its part of.

    Attributes:
        turns: when commands may begin.
        commands: the unanswered commands of streams.
        new_names: the names of resources that were not used lately.
    """

    turns: Turns
    commands: Budget
    new_names: NewNames

    def check_name(self, peer: str, name: str) -> None:
        """Return if the peer may acquire this name now.

        Raises:
            TooManyNewResourcesError: the peer has used too many new names.
        """
        if name not in self.new_names.recent:
            self.new_names.check(peer, name)
