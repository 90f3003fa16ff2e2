"""Keep releases and undos for an unavailable node, and replay them when it votes again.

A missed one would block the lock until its ttl ends.
"""

from __future__ import annotations

from typing import Final

from redfence_server.locking.node import Command, Mint, Release, Undo

# Beyond this number the oldest are dropped: their holds end by their ttl.
_KEPT_MAX: Final = 10_000


class ReplayQueue:
    """Queues undos and releases, each once, in the order of their first sending.

    A late replay is safe. An undo ends only the hold with its nonce. A release ends only the hold with its
    lease id, and the contract forbids a second acquisition with one lease id.
    """

    def __init__(self) -> None:
        self._commands: dict[tuple[str, str], Undo | Release] = {}

    def keep(self, command: Command) -> None:
        """Queue a release or an undo that did not reach the node; ignore any other command.

        For a handover, queue only the release; the attempt undoes its own mint.
        """
        ended = command.release_first if isinstance(command, Mint) else command
        if not isinstance(ended, Undo | Release):
            return
        key = ended.nonce if isinstance(ended, Undo) else ended.digest
        self._commands[ended.resource, key] = ended
        if len(self._commands) > _KEPT_MAX:
            del self._commands[next(iter(self._commands))]

    def take(self, *, now_ms: float, at_most: int | None = None) -> list[Undo | Release]:
        """Remove and return the oldest commands that can still end a hold; all if `at_most` is None."""
        taken: list[Undo | Release] = []
        while self._commands and len(taken) != at_most:
            command = self._commands.pop(next(iter(self._commands)))
            if command.expires_at_ms > now_ms:
                taken.append(command)
        return taken
