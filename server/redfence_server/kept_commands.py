"""What ends a hold, kept for a node that is away: late is better than never, for a missed one would block the lock until its ttl ends."""

from __future__ import annotations

from collections import deque
from typing import Final

from redfence_server.lock_node import Command, Mint, Release, Undo

# Beyond it the oldest are dropped: their holds end by their ttl.
_KEPT_MAX: Final = 10_000


class KeptCommands:
    """Undos and releases, in the order in which they were to be sent.

    An undo goes by an attempt's nonce and so can end nothing else; a release goes by the lease id, which the contract tells
    callers never to use for a second acquisition. Of a hand-over, what it ends is kept; what it mints is the attempt's to undo.
    """

    def __init__(self) -> None:
        self._kept: deque[Undo | Release] = deque(maxlen=_KEPT_MAX)

    def keep(self, command: Command) -> None:
        """Keep a command that did not reach the node, if it is worth anything later."""
        ends = command.ends if isinstance(command, Mint) else command
        if isinstance(ends, Undo | Release):
            self._kept.append(ends)

    def take(self, *, now_ms: float, at_most: int | None = None) -> list[Undo | Release]:
        """Return, and keep no longer, the oldest that can still end something; all if `at_most` is None."""
        taken: list[Undo | Release] = []
        while self._kept and len(taken) != at_most:
            command = self._kept.popleft()
            if command.worthless_at_ms > now_ms:
                taken.append(command)
        return taken
