"""Lets many callers of one event loop share a store that commits one batch at a time.

One thread owns the store. It takes everything that is queued, carries it out in one transaction, and wakes the loop once for the whole
batch; while the disk syncs, the next batch gathers. So the busier the server, the fewer syncs a write costs. Answers are given in the order
of submission, and only after the commit. Reads go the same way: the simplest path on which they see every acknowledged write.
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

# Bounds memory: full of the largest values, the queue holds a third of a gigabyte.
QUEUE_MAX = 10_000


class GroupCommit:
    """Carries out each command once, durably, in the order of submission; for the event loop it was made in."""

    def __init__(self, store: SqliteStore, *, queue_max: int = QUEUE_MAX) -> None:
        """Take over the store, which `close` closes.

        Args:
            store: opened; from now on used by this object's thread alone.
            queue_max: how many commands may be unanswered; more are refused.
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
        """Carry out the command and return its result when it is on disk.

        Cancellation: gives up the answer, not the command.

        Raises:
            StaleToken: a higher token was seen; nothing was changed.
            TooManyWrites: the queue is full.
            StorageFailed: the database did not take the command's batch.
            StoreClosed: `close` was called before.
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
        """Answer what was submitted before, then close the store and end the thread. Repeating it is harmless.

        Cancellation: gives up waiting; the thread ends all the same.
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
            # However the thread ends, `close` returns.
            self._loop.call_soon_threadsafe(self._closed.set_result, None)

    def _take(self) -> list[_Entry]:
        """Wait for work and return all of it; nothing means that `close` was called and all is done."""
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
        except Exception as error:  # noqa: BLE001  (the thread's boundary: a defect must reach the callers, not hang them)
            return error

    def _answer(self, batch: list[_Entry], outcomes: list[Outcome] | Exception) -> None:
        self._unanswered -= len(batch)
        each = [outcomes] * len(batch) if isinstance(outcomes, Exception) else outcomes
        for (_, future), outcome in zip(batch, each, strict=True):
            # A caller that went away has cancelled its future.
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
