"""Count the commands of one stream, and write their results back in batches.

A command may end in any order, so a slow one delays no other. The stream ends after `finish`, once every
result has been written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from redfence_server.errors import TooManyCommandsError

Item = TypeVar("Item")


class CommandStream(Generic[Item]):
    """Passes the results of a stream's commands to one writer.

    Args:
        open_max: the most commands without a written result; bounds the memory of a peer that does not read.
        batch_max: the most results in one write.
    """

    def __init__(self, *, open_max: int, batch_max: int) -> None:
        self._open_max = open_max
        self._batch_max = batch_max
        self._unanswered = 0
        self._outbox: deque[Item] = deque()
        self._wake = asyncio.Event()
        self._no_more_commands = False

    def begin(self) -> None:
        """Count one more command; its result must follow.

        Raises:
            TooManyCommandsError: `open_max` is reached; the command was not counted.
        """
        if self._unanswered + len(self._outbox) >= self._open_max:
            raise TooManyCommandsError(self._open_max)
        self._unanswered += 1

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

    async def write_all(self, write: Callable[[list[Item]], Awaitable[None]]) -> None:
        """Write results as they come; return when the stream is finished and every result is written."""
        outbox = self._outbox
        while True:
            if outbox:
                size = min(len(outbox), self._batch_max)
                await write([outbox.popleft() for _ in range(size)])
            elif self._no_more_commands and not self._unanswered:
                return
            else:
                self._wake.clear()
                await self._wake.wait()
