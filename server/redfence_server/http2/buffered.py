"""Count the bytes that one connection makes the server keep, and take them from its peer's part."""

from __future__ import annotations

from redfence_server.sharing.budget import Budget


class BufferedBytes:
    """Counts calls that have not ended, bodies that no method has read, and answers that wait for the peer.

    Args:
        budget: the bytes for all connections.
        peer: the part of this peer is used.
    """

    __slots__ = ("_budget", "_count", "_peer")

    def __init__(self, budget: Budget, peer: str) -> None:
        self._budget = budget
        self._peer = peer
        self._count = 0

    def add(self, count: int) -> bool:
        """Count so many bytes more; return False, and count none, if the peer may have no more."""
        if not self._budget.take(self._peer, count):
            return False
        self._count += count
        return True

    def remove(self, count: int) -> None:
        """Count so many bytes less; after `close`, do nothing."""
        if count and self._count:
            self._count -= count
            self._budget.give_back(self._peer, count)

    def close(self) -> None:
        """Give everything back."""
        self.remove(self._count)
