"""Share a bounded number of places between peers, so that no peer can take those of all others."""

from __future__ import annotations

from collections import Counter


class Budget:
    """Counts the places that each peer has taken.

    A peer may take no more than it leaves free. So one peer alone gets half of them, two peers get a third
    each, and a new peer always finds some.

    Attributes:
        size: the number of places. A smaller one takes nothing back from the peers that have places.
        taken: how many of them peers have.
        refusals: how many times a peer asked for more than its part.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self.refusals = 0
        self._taken_by: Counter[str] = Counter()

    def take(self, peer: str, count: int = 1) -> bool:
        """Take so many places if the peer may; return whether it may."""
        its = self._taken_by[peer] + count
        if its > self.size - self.taken - count:
            self.refusals += 1
            if its == count:
                del self._taken_by[peer]
            return False
        self._taken_by[peer] = its
        self.taken += count
        return True

    def taken_by(self, peer: str) -> int:
        """Return how many places the peer has taken."""
        return self._taken_by[peer]

    def give_back(self, peer: str, count: int = 1) -> None:
        """Give back places that were taken."""
        self.taken -= count
        self._taken_by[peer] -= count
        if not self._taken_by[peer]:
            del self._taken_by[peer]
