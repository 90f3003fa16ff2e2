"""How a node that forgot comes back: the others tell what it may have lost, and vouch for it before it votes.

What must never happen: a number that was granted is granted again, because the node that minted it forgot it. Place i,
N = 2f + 1 nodes. Every grant stands on a quorum, f + 1 nodes; besides i on at least f of the 2f others.

1. *Recall*: `high` of f + 1 others that vote, so of at least one node j on which a given grant stands, whichever it is. (Of f others
   all could have missed it.) The floor R is above all of these, and the node's numbers start above R.
2. *Claim*: R is noted on the node itself, in its quarantine, and only if no driver has claimed as much. It counts for nothing as long as the node
   does not vote; but of several drivers only the one with the greatest R can go on to the end, and one that comes after another has died
   starts above its R. So what the others are told of place i is never more than what the node there comes to have.
3. *Vouch*: on f + 1 of those, in one step on each and only if its `high` is still below R: R is written back to `high`, and the
   admission id is renewed. Take a grant in flight that stands on i as it was, and on such a j. If it stands on j before the vouch, its
   token is at most j's `high`, which is below R. If it is to stand there after, it cannot: a commit goes under the id under which its
   mint was answered, and j refuses the old one. Who is admitted under the new one has read `floor:<i>`, by which it knows that what it
   was connected to at place i is a thing of the past.
   So it makes no difference whether that process is dead, wiped, or lives on where it cannot be seen from here.
4. *Readmit*: only then does the node get its vote, and only in the very quarantine that was found (each has a random id).

`high` is written back so that R is found on every quorum when another node is lost next. What other places must know (`floor:<j>`) is
part of what a node loses, so it is given back with the vote: f + 1 others know each of them, and those who were asked include one.

Two servers that rejoin one node at once both need f + 1 of 2f nodes, so they share one, whose admission id the later one finds void. A
server that dies in between has raised numbers on other nodes, which is harmless. A second loss finds no quarantine to end; and as it takes
the claim along, a driver whose R some of the others have heard of meanwhile may after all be followed by one with a lesser R, if it can reach none of them.
Then the node is taken for a replaced one, which is safe, and an operator has to replace it.

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

from redfence_proto import bounds
from redfence_server.lock_node import LockNode, Plain, Pulse, Pulsed, Reply, Vouch
from redfence_server.randomness import Randomness

NUMBERS_JUMP: Final = 2**20
"""Past any number that was minted and is not yet on a quorum. Each rejoin uses up so many of 2^53."""
CHANGES_JUMP: Final = 2**32
"""Past any change that the node has made and nobody knows of, so that an older state never shows as many."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the node is to have when it votes again, and what the others will be told of it.

    Attributes:
        floor: its numbers start above it.
        changes: what its changes begin with.
    """

    floor: int
    changes: int


@dataclass(frozen=True, slots=True)
class Vouched:
    """The others are ready for the node to vote again.

    Attributes:
        claim: what the node gets.
        known_floors: what it must know of each place.
    """

    claim: Claim
    known_floors: tuple[int, ...]


class Failure(Enum):
    """Why the others did not vouch. Trying again is harmless."""

    TOO_FEW = auto()
    """Fewer than a quorum of other nodes answered."""
    EXHAUSTED = auto()
    """No numbers would be left above the floor."""
    OVERTAKEN = auto()
    """Numbers were minted past the floor meanwhile, or another server was at it."""


class Rejoin:
    """Steps 1 and 3 for one place, once; what lies between them is for who is connected to the node.

    Attributes:
        recalled: the result of step 1.
        outcome: the result of step 3.

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
        self._told: dict[int, Pulsed] = {}
        self._awaited = len(others)
        self._vouched = 0
        loop = asyncio.get_running_loop()
        self.recalled: asyncio.Future[Claim | Failure] = loop.create_future()
        self.outcome: asyncio.Future[Vouched | Failure] = loop.create_future()

    def start(self) -> None:
        """Ask every other node what it knows."""
        if len(self._others) < self._needed:
            self.recalled.set_result(Failure.TOO_FEW)
            return
        known = [0] * (len(self._others) + 1)
        known[self._place] = self._changes
        for index, node in self._others.items():
            node.send(Pulse(tuple(known)), partial(self.on_recall, index))

    def on_recall(self, node: int, reply: Reply) -> None:
        """Note what a node knows. Once enough have told, the claim is fixed."""
        if self.recalled.done():
            return
        self._awaited -= 1
        if isinstance(reply, Pulsed):
            self._told[node] = reply
        if len(self._told) >= self._needed:
            told = self._told.values()
            floor = max(self._number, *(each.high for each in told)) + NUMBERS_JUMP
            changes = max(self._changes, *(each.known_changes[self._place] for each in told)) + CHANGES_JUMP
            spent = floor >= bounds.FENCING_TOKEN_MAX
            self.recalled.set_result(Failure.EXHAUSTED if spent else Claim(floor, changes))
        elif len(self._told) + self._awaited < self._needed:
            self.recalled.set_result(Failure.TOO_FEW)

    def vouch(self, claim: Claim) -> None:
        """Ask those that told to vouch for what the node has claimed: for what was `recalled`."""
        for index, told in self._told.items():
            command = Vouch(self._randomness.hex_id(), self._place, claim.floor, claim.changes, told.under)
            self._others[index].send(command, partial(self.on_vouch, claim))

    def on_vouch(self, claim: Claim, reply: Reply) -> None:
        """Note whether a node vouches; all that were asked must."""
        if self.outcome.done():
            return
        if reply is not Plain.VOUCHED:
            self.outcome.set_result(Failure.OVERTAKEN)
            return
        self._vouched += 1
        if self._vouched == len(self._told):
            told = self._told.values()
            floors = [
                max(each.known_floors[place] for each in told) for place in range(len(self._others) + 1)
            ]
            floors[self._place] = claim.floor
            self.outcome.set_result(Vouched(claim, tuple(floors)))
