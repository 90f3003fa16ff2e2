"""How a node that forgot comes back: the others tell what it may have lost, and vouch for it before it votes.

What must never happen: a number that was granted is granted again, because the node that minted it forgot it. Place i,
N = 2f + 1 nodes. Every grant stands on a quorum, f + 1 nodes; besides i on at least f of the 2f others.

1. *Recall*: `high` of f + 1 others that vote, so of at least one node j on which a given grant stands, whichever it is. (Of f others
   all could have missed it.) The floor R is above all of these, and the node's numbers start above R.
2. *Vouch*: on f + 1 of those, in one step on each and only if its `high` is still below R: R is written back to `high`, and the
   admission id is renewed. Take a grant in flight that stands on i as it was, and on such a j. If it stands on j before the vouch, its
   token is at most j's `high`, which is below R. If it is to stand there after, it cannot: a commit goes under the id under which its
   mint was answered, and j refuses the old one. Who is admitted under the new one has read `floor:<i>`, by which it knows that what it
   was connected to at place i is a thing of the past.
   So it makes no difference whether that process is dead, wiped, or lives on where it cannot be seen from here.
3. *Readmit*: only then does the node get its floor and its vote, and only in the very quarantine that was found (each has a random id).

`high` is written back so that R is found on every quorum when another node is lost next. What other places must know (`floor:<j>`) is
part of what a node loses, so it is given back with the vote: f + 1 others know each of them, and those who were asked include one.

Two servers that rejoin one node at once both need f + 1 of 2f nodes, so they share one, whose admission id the later one finds void. A
server that dies in between has raised numbers on other nodes, which is harmless. A second loss finds no quarantine to end.

R also jumps by 2^20, past any number that is in flight; each of the two, the jump and the renewed ids, would do without the other where
no two processes have ever stood at one place. docs/model checks both, alone and together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final

from redfence_server.lock_node import LockNode, Plain, Pulse, Pulsed, Reply, Vouch
from redfence_server.randomness import Randomness

NUMBERS_JUMP: Final = 2**20
"""Past any number that was minted and is not yet on a quorum. Each rejoin uses up so many of 2^53."""
CHANGES_JUMP: Final = 2**32
"""Past any change that the node has made and nobody knows of, so that an older state never shows as many."""


@dataclass(frozen=True, slots=True)
class Vouched:
    """The others are ready for the node to vote again.

    Attributes:
        floor: its numbers start above it.
        changes: what its changes begin with.
        known_floors: what it must know of each place.
    """

    floor: int
    changes: int
    known_floors: tuple[int, ...]


class Failure(Enum):
    """Why the others did not vouch. Trying again is harmless."""

    TOO_FEW = auto()
    """Fewer than a quorum of other nodes answered."""
    OVERTAKEN = auto()
    """Numbers were minted past the floor meanwhile, or another server was at it."""


class Rejoin:
    """Steps 1 and 2 for one place, once.

    Attributes:
        floor: that the others are asked to vouch for; 0 before.

    Args:
        place: of the node that is to come back.
        others: every other node, votes or not.
        number: the greatest number that was ever heard from the node; its own `high` as well, if it has one.
        changes: the most changes that it is known to have made.
    """

    def __init__(
        self, place: int, others: Sequence[LockNode], *, number: int, changes: int, randomness: Randomness
    ) -> None:
        self._place = place
        self._others = {node.index: node for node in others}
        # A majority of all nodes, but of others.
        self._needed = (len(others) + 1) // 2 + 1
        self._number = number
        self._changes = changes
        self._randomness = randomness
        self._recalled: dict[int, Pulsed] = {}
        self.floor = 0
        self._awaited = len(others)
        self._vouched = 0
        self.outcome: asyncio.Future[Vouched | Failure] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Ask every other node what it knows."""
        if len(self._others) < self._needed:
            self.outcome.set_result(Failure.TOO_FEW)
            return
        known = [0] * (len(self._others) + 1)
        known[self._place] = self._changes
        for index, node in self._others.items():
            node.send(Pulse(tuple(known)), partial(self.on_recall, index))

    def on_recall(self, node: int, reply: Reply) -> None:
        """Note what a node knows. Once enough have told, the floor is fixed and they are asked to vouch."""
        if self.outcome.done() or self.floor:
            return
        self._awaited -= 1
        if isinstance(reply, Pulsed):
            self._recalled[node] = reply
        if len(self._recalled) >= self._needed:
            self._vouch()
        elif len(self._recalled) + self._awaited < self._needed:
            self.outcome.set_result(Failure.TOO_FEW)

    def _vouch(self) -> None:
        told = self._recalled.values()
        self.floor = max(self._number, *(each.high for each in told)) + NUMBERS_JUMP
        self._changes = max(self._changes, *(each.known_changes[self._place] for each in told)) + CHANGES_JUMP
        for index, recalled in self._recalled.items():
            vouch = Vouch(self._randomness.hex_id(), self._place, self.floor, self._changes, recalled.under)
            self._others[index].send(vouch, self.on_vouch)

    def on_vouch(self, reply: Reply) -> None:
        """Note whether a node vouches; all that were asked must."""
        if self.outcome.done():
            return
        if reply is not Plain.VOUCHED:
            self.outcome.set_result(Failure.OVERTAKEN)
            return
        self._vouched += 1
        if self._vouched == len(self._recalled):
            told = self._recalled.values()
            floors = [
                max(each.known_floors[place] for each in told) for place in range(len(self._others) + 1)
            ]
            floors[self._place] = self.floor
            self.outcome.set_result(Vouched(self.floor, self._changes, tuple(floors)))
