"""Count the commands of one stream, and write their results back in batches.

A command may end in any order, so a slow one delays no other. The stream ends after `finish`, once every
result has been written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from redfence_server.errors import TooManyCommandsError
from redfence_server.sharing.budget import Budget

Item = TypeVar("Item")

# A stream takes room in blocks of this many commands. It takes the first block when it opens, because an open
# stream costs about the memory of 16 commands.
_BLOCK: Final = 16
# How much unused room a stream keeps for its next commands.
_KEPT: Final = 256


class CommandStream(Generic[Item]):
    """Passes the results of a stream's commands to one writer.

    Args:
        open_max: the most commands without a written result; bounds the memory of a peer that does not read.
        batch_max: the most results in one write.
        budget: bounds the commands without a written result of all streams.
        peer: the stream takes its room from the part of this peer.
    """

    def __init__(self, *, open_max: int, batch_max: int, budget: Budget, peer: str) -> None:
        self._open_max = open_max
        self._batch_max = batch_max
        self._budget = budget
        self._peer = peer
        self._room = 0
        # So many commands begin soon; their room is kept for them.
        self._announced = 0
        self._unanswered = 0
        self._outbox: deque[Item] = deque()
        self._wake = asyncio.Event()
        self._no_more_commands = False

    def begin(self) -> None:
        """Count one more command; its result must follow.

        Raises:
            TooManyCommandsError: `open_max` or the peer's part of the budget is reached; the command was not
                counted.
        """
        if self._unanswered + len(self._outbox) >= self._room:
            self._make_room(1)
        if self._announced:
            self._announced -= 1
        self._unanswered += 1

    def make_room(self, count: int) -> None:
        """Take room for the `count` commands that begin next, or for fewer up to `open_max`.

        Raises:
            TooManyCommandsError: the stream has `open_max` commands, or the peer's part has too little room.
        """
        self._make_room(count)
        self._announced = count

    def _make_room(self, count: int) -> None:
        taken = self._unanswered + len(self._outbox)
        if taken >= self._open_max:
            raise TooManyCommandsError(self._open_max)
        wanted = min(taken + count, self._open_max) - self._room
        if wanted > 0:
            wanted = min(wanted + -wanted % _BLOCK, self._open_max - self._room)
            if not self._budget.take(self._peer, wanted):
                # A client keeps to the limit in the error. With a limit of 0 it could never send again.
                raise TooManyCommandsError(max(taken, _BLOCK), "peer")
            self._room += wanted

    def close(self) -> None:
        """Give back the room; nothing is written any more."""
        self._budget.give_back(self._peer, self._room)
        self._room = 0

    def answer(self, result: Item) -> None:
        """Queue the result of a command to write."""
        self._unanswered -= 1
        self.put(result)

    def put(self, item: Item) -> None:
        """Queue a notice to write."""
        self._outbox.append(item)
        self._wake.set()

    def finish(self) -> None:
        """End the stream once every command is answered."""
        self._no_more_commands = True
        self._wake.set()

    @property
    def unanswered(self) -> int:
        """How many commands have no written result."""
        return self._unanswered + len(self._outbox)

    @property
    def unwritten(self) -> tuple[Item, ...]:
        """The results that no write has taken yet."""
        return tuple(self._outbox)

    def _give_back(self) -> None:
        """Give back the room that is neither used nor kept for the next commands."""
        used = self._unanswered + len(self._outbox) + self._announced
        surplus = self._room - max(used, _KEPT)
        if surplus > _KEPT:
            self._budget.give_back(self._peer, surplus)
            self._room -= surplus

    async def write_all(self, write: Callable[[list[Item]], Awaitable[None]]) -> None:
        """Write results as they come; return when the stream is finished and every result is written."""
        outbox = self._outbox
        while True:
            if outbox:
                size = min(len(outbox), self._batch_max)
                await write([outbox.popleft() for _ in range(size)])
                if self._room > _KEPT:
                    self._give_back()
            elif self._no_more_commands and not self._unanswered:
                return
            else:
                self._wake.clear()
                await self._wake.wait()
