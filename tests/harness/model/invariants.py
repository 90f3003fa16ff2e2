"""States the invariants of the adversary's world: they hold *under every fault*, as no time passes there.

T1  No two grants of different leases carry the same token.
T2  A grant is greater than every grant of another lease that was answered before its attempt began.
K   Only the release or the expiry of a grant ends the holds under it: no undo of another attempt does, and no
    handover of another lease. A handover of the lease is its release.
C   An undo leaves nothing of its attempt on the node, but what a retry shares.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from harness.doubles.node_memory import Hold
from harness.model.moves import Message
from harness.model.players import Player, copy_of
from redfence_server.locking.attempt import AttemptGranted as Grant
from redfence_server.locking.node import Mint, Undo

_HoldName = tuple[int, str]
"""The node and the nonce: no two holds ever share both."""


class Violation(AssertionError):  # noqa: N818  (what was found, not an error of the harness)
    """An invariant is broken; the message tells which, and by what."""


class Invariants:
    """Tracks each hold, and tells whether an event breaks an invariant."""

    def __init__(self) -> None:
        self.ended: frozenset[str] = frozenset()  # leases that were released
        self.taken: frozenset[_HoldName] = frozenset()  # ended, and not by a release
        self.shared: frozenset[_HoldName] = frozenset()  # found by a retry
        self.stood_on: dict[_HoldName, int] = {}  # and by which attempt's grant

    def copy(self) -> Invariants:
        twin = copy_of(self)
        twin.stood_on = self.stood_on.copy()
        return twin

    def key(self) -> Hashable:
        return self.ended, self.taken, self.shared, frozenset(self.stood_on.items())

    def check_grant(self, players: Sequence[Player], index: int) -> None:
        player = players[index]
        assert player.attempt is not None
        granted = player.attempt.outcome
        assert isinstance(granted, Grant)
        token = player.token = granted.token
        if token <= player.floor:
            raise Violation(f"T2: attempt {index} got {token}; {player.floor} was granted before it began")
        for other, rival in enumerate(players):
            if rival.lease != player.lease and rival.token == token:
                raise Violation(f"T1: attempts {other} and {index} both got {token}")
        for node, standing in enumerate(player.attempt._tally._standing):
            if standing != token:
                continue
            hold = (node, player.nonces[node])
            if hold in self.taken and player.lease not in self.ended:
                raise Violation(f"K: attempt {index} got {token} by {hold}, which was taken from it")
            self.stood_on[hold] = index

    def check_hold(
        self, players: Sequence[Player], message: Message, before: Hold, after: Hold | None
    ) -> None:
        name, command = (message.node, before.nonce), message.command
        if after is not None and (after.digest, after.nonce) == (before.digest, before.nonce):
            if isinstance(command, Mint) and command.digest == before.digest:
                self.shared |= {name}
            elif isinstance(command, Undo) and command.nonce == before.nonce and name not in self.shared:
                raise Violation(f"C: an undo left {name}, the hold of its attempt, which no retry shares")
        elif before.digest not in self.ended:
            self.taken |= {name}
            index = self.stood_on.get(name)
            if index is not None and players[index].lease not in self.ended:
                raise Violation(f"K: attempt {message.attempt} took {name}, on which attempt {index} stands")
