"""Releases and undos kept for a node that is away, and replayed when it votes again.

A missed one would block the lock until its ttl ends.
"""

from __future__ import annotations

from typing import Final

from redfence_server.locking.node import Command, Mint, Release, Undo

# Beyond it the oldest are dropped: their holds end by their ttl.
_KEPT_MAX: Final = 10_000


class ReplayQueue:
    """Undos and releases, each once, in the order in which they were first to be sent.

    An undo goes by an attempt's nonce and so can end nothing else; a release goes by the lease id, which the contract tells
    callers never to use for a second acquisition. For a hand-over, only the release is kept; the attempt undoes its own mint.
    """

    def __init__(self) -> None:
        self._commands: dict[tuple[str, str], Undo | Release] = {}

    def keep(self, command: Command) -> None:
        """Keep a command that did not reach the node, if it is worth anything later."""
        ended = command.release_first if isinstance(command, Mint) else command
        if not isinstance(ended, Undo | Release):
            return
        key = ended.nonce if isinstance(ended, Undo) else ended.digest
        self._commands[ended.resource, key] = ended
        if len(self._commands) > _KEPT_MAX:
            del self._commands[next(iter(self._commands))]

    def take(self, *, now_ms: float, at_most: int | None = None) -> list[Undo | Release]:
        """Return, and keep no longer, the oldest that can still end something; all if `at_most` is None."""
        taken: list[Undo | Release] = []
        while self._commands and len(taken) != at_most:
            command = self._commands.pop(next(iter(self._commands)))
            if command.expires_at_ms > now_ms:
                taken.append(command)
        return taken
