"""Count the bytes that one connection makes the server keep, and take them from its peer's part."""

from __future__ import annotations

from typing import Final

from redfence_server.sharing.budget import Budget

# A connection takes a quarter more than it needs, and at least this; so most calls take nothing anew.
_STEP_BYTES: Final = 1024


class BufferedBytes:
    """Counts headers of calls that have not ended, bodies that no method has read, and unsent answers.

    Args:
        budget: the bytes for all connections.
        peer: the part of this peer is used.
    """

    __slots__ = ("_budget", "_count", "_peer", "_taken")

    def __init__(self, budget: Budget, peer: str) -> None:
        self._budget = budget
        self._peer = peer
        self._count = 0
        self._taken = 0

    def add(self, count: int) -> bool:
        """Count so many bytes more; return False, and count none, if the peer may have no more."""
        self._count += count
        if self._count <= self._taken:
            return True
        more = self._count - self._taken + max(_STEP_BYTES, self._count // 4)
        if self._budget.take(self._peer, more):
            self._taken += more
            return True
        self._count -= count
        return False

    def remove(self, count: int) -> None:
        """Count so many bytes less."""
        self._count -= count
        surplus = self._taken - self._count
        if surplus > 4 * _STEP_BYTES + self._count:
            self._give_back(surplus - _STEP_BYTES)

    def close(self) -> None:
        """Give everything back."""
        self._give_back(self._taken)

    def _give_back(self, count: int) -> None:
        self._taken -= count
        self._budget.give_back(self._peer, count)
