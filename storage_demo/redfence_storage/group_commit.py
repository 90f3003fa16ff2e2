"""Commits the commands of many callers of one event loop in batches.

One thread owns the store. It takes all queued commands, runs them in one transaction, and wakes the
loop once for the whole batch. The next batch gathers while the disk syncs. So a busy server needs
fewer syncs per write.

Each caller gets its answer after the commit, in the order of submission. Reads use the same queue,
which is the simplest way for them to see every acknowledged write.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, TypeVar

import structlog

from redfence_storage.errors import StorageFailed, StoreClosed, TooManyWrites
from redfence_storage.sqlite_store import Outcome, SqliteStore
from redfence_storage.store import Command

ResultT = TypeVar("ResultT")
_Entry = tuple[Command[Any], "asyncio.Future[Any]"]

# Bounds the memory. A queue full of the largest values has a third of a gigabyte.
QUEUE_MAX = 10_000


class GroupCommit:
    """Runs each command once, durably, in the order of submission; belongs to one event loop."""

    def __init__(self, store: SqliteStore, *, queue_max: int = QUEUE_MAX) -> None:
        """Take over an open store; `close` closes it.

        Args:
            store: the store. From now on only this object's thread may use it.
            queue_max: how many commands may be unanswered at a time; further commands are refused.
        """
        self._store = store
        self._queue_max = queue_max
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._work = threading.Condition()
        # Guarded by _work.
        self._queue: list[_Entry] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="storage-writer", daemon=True)
        self._thread.start()

    async def carry_out(self, command: Command[ResultT]) -> ResultT:
        """Run a command, and return its result when its changes are on disk.

        Cancellation: gives up the answer; the command still runs.

        Raises:
            StaleToken: a higher token was seen; nothing was changed.
            TooManyWrites: the queue is full.
            StorageFailed: the database did not commit the command's batch.
            StoreClosed: `close` was called.
        """
        if self._unanswered >= self._queue_max:
            raise TooManyWrites(self._queue_max)
        future: asyncio.Future[ResultT] = self._loop.create_future()
        with self._work:
            if self._closing:
                raise StoreClosed
            self._queue.append((command, future))
            self._work.notify()
        self._unanswered += 1
        return await future

    async def close(self) -> None:
        """Answer every submitted command, then close the store and end the thread. Repeating it is harmless.

        Cancellation: gives up waiting; the thread still ends.
        """
        with self._work:
            self._closing = True
            self._work.notify()
        await asyncio.shield(self._closed)

    def _run(self) -> None:
        try:
            while batch := self._take():
                outcomes = self._transact(batch)
                self._loop.call_soon_threadsafe(self._answer, batch, outcomes)
            self._store.close()
        finally:
            # `close` must return even if the thread fails.
            self._loop.call_soon_threadsafe(self._closed.set_result, None)

    def _take(self) -> list[_Entry]:
        """Wait for commands and return all queued ones; an empty list means that the thread must end."""
        with self._work:
            self._work.wait_for(lambda: self._queue or self._closing)
            batch, self._queue = self._queue, []
        return batch

    def _transact(self, batch: list[_Entry]) -> list[Outcome] | Exception:
        try:
            return self._store.transact([command for command, _ in batch])
        except StorageFailed as error:
            structlog.get_logger().error("batch_failed", commands=len(batch), error=str(error))
            return error
        except Exception as error:  # noqa: BLE001  (a bug must reach the callers, or they would wait for ever)
            return error

    def _answer(self, batch: list[_Entry], outcomes: list[Outcome] | Exception) -> None:
        self._unanswered -= len(batch)
        each = [outcomes] * len(batch) if isinstance(outcomes, Exception) else outcomes
        for (_, future), outcome in zip(batch, each, strict=True):
            # A cancelled caller has cancelled its future.
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
