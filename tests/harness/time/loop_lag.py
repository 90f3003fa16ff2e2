"""The lag of this event loop, which a test with a bound on time must not blame on the product."""

from __future__ import annotations

import asyncio
import threading
from typing import Final, Self

from harness.processes.servers import now_ms

_BEAT_MS: Final = 10.0
# A beat this late was held up by more than the work of others in the loop.
_LATE_MS: Final = 50.0
# A server in this loop notices such a stall. It then does nothing for its waiters for the time below.
_NOTICED_MS: Final = 200.0
_QUIET_MS: Final = 250.0


class LoopLag:
    """Measures within `async with` how late the loop runs its timers."""

    def __init__(self) -> None:
        self._noted: list[tuple[float, float]] = []  # when it ended, and how late it was
        self._beaten_at_ms = now_ms()
        self._task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()  # the question may come from another thread

    async def __aenter__(self) -> Self:
        self._beaten_at_ms = now_ms()
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def late_ms(self, *, since_ms: float) -> float:
        return sum(self._since(since_ms))

    def cost_ms(self, *, since_ms: float) -> float:
        """Return how much later a waiter may have been served: a stalled server is quiet for a while."""
        return sum(ms + (_QUIET_MS if ms > _NOTICED_MS else 0) for ms in self._since(since_ms))

    def _since(self, since_ms: float) -> list[float]:
        self._note()
        # Only the part of a stall after that instant counts.
        return [min(ms, ended_at_ms - since_ms) for ended_at_ms, ms in self._noted if ended_at_ms > since_ms]

    def _note(self) -> None:
        with self._lock:
            now = now_ms()
            late_ms = now - self._beaten_at_ms - _BEAT_MS
            if late_ms > _LATE_MS:
                self._noted.append((now, late_ms))
            self._beaten_at_ms = now

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_MS / 1000)
            self._note()
