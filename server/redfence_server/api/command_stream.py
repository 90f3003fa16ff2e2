"""Run the commands of one stream at the same time, and write their results back in batches.

Each command is its own task, so a slow command delays no other. The stream ends after `finish`, once every
result has been written.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Generic, TypeVar

from redfence_server.errors import TooManyCommandsError

Item = TypeVar("Item")


class CommandStream(Generic[Item]):
    """Runs a stream's commands and passes their results to one writer.

    Args:
        open_max: the most commands without a written result; bounds the memory of a peer that does not read.
        batch_max: the most results in one write.
    """

    def __init__(self, *, open_max: int, batch_max: int) -> None:
        self._open_max = open_max
        self._batch_max = batch_max
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox: deque[Item] = deque()
        self._wake = asyncio.Event()
        self._no_more_commands = False

    def start(
        self,
        begin: Callable[[], Coroutine[None, None, Item]],
        *,
        never_begun: Callable[[], Item] | None = None,
    ) -> asyncio.Task[None]:
        """Run the command that `begin` returns, and write its result.

        `never_begun` returns the result of a command that is cancelled before its first step.

        Raises:
            TooManyCommandsError: `open_max` is reached; the command was not started.
        """
        if len(self._tasks) + len(self._outbox) >= self._open_max:
            raise TooManyCommandsError(self._open_max)
        command = begin()
        task = asyncio.create_task(self._carry_out(command))
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, command, never_begun))
        return task

    def put(self, item: Item) -> None:
        """Queue a result or a notice to write."""
        self._outbox.append(item)
        self._wake.set()

    def finish(self) -> None:
        """End the stream once every started command is answered."""
        self._no_more_commands = True
        self._wake.set()

    def cancel(self) -> None:
        """Cancel every unfinished command."""
        for task in self._tasks:
            task.cancel()

    async def write_all(self, write: Callable[[list[Item]], Awaitable[None]]) -> None:
        """Write results as they come; return when the stream is finished and every result is written."""
        outbox = self._outbox
        while True:
            if outbox:
                size = min(len(outbox), self._batch_max)
                await write([outbox.popleft() for _ in range(size)])
            elif self._no_more_commands and not self._tasks:
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _carry_out(self, command: Coroutine[None, None, Item]) -> None:
        item = await command
        # `open_max` counts a command or its result, never both.
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)
        self.put(item)

    def _forget(
        self,
        command: Coroutine[None, None, Item],
        never_begun: Callable[[], Item] | None,
        task: asyncio.Task[None],
    ) -> None:
        # Close it, or Python warns about a coroutine that never ran.
        never_ran = inspect.getcoroutinestate(command) == inspect.CORO_CREATED
        command.close()
        self._tasks.discard(task)
        if never_ran and never_begun is not None:
            self._outbox.append(never_begun())
        self._wake.set()
