"""Does to the bytes of one direction what a broken network does; tcp_proxy.py carries them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

MARK_BYTES_MAX = 64
"""The longest text to look for."""


class Flow(Enum):
    """Names what happens to the bytes of one direction."""

    PASS = "they arrive"
    HOLD = "they arrive when the network heals"
    DROP = "they never arrive"


@dataclass(frozen=True, slots=True)
class _Mark:
    """Bytes at which a fault begins.

    Attributes:
        begin: sets the fault, before the bytes go on.
        came: set as soon as they were seen.
    """

    text: bytes
    begin: Callable[[], None]
    came: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Direction:
    """One direction of every connection, and what it has carried.

    Attributes:
        flow: change it by `set_flow`.
        delay_ms: how much later than sent bytes arrive; their order stays.
        slice_bytes: bytes arrive at most so many at a time; None as they come.
        chunks_to_lose: so many are swallowed, and their connections reset.
        taken_bytes: how many were sent so far, whatever became of them.
        passed_bytes: how many arrived.
        kept_bytes: how many were held back or lost so far, for tests to wait for.
    """

    flow: Flow = Flow.PASS
    delay_ms: float = 0.0
    slice_bytes: int | None = None
    chunks_to_lose: int = 0
    taken_bytes: int = 0
    passed_bytes: int = 0
    kept_bytes: int = 0
    _mark: _Mark | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set_flow(self, flow: Flow) -> None:
        self.flow = flow
        # A task that waits holds this event. A later one waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    def heal(self) -> None:
        """End every fault; what was held back arrives now."""
        self.delay_ms, self.slice_bytes, self.chunks_to_lose, self._mark = 0.0, None, 0, None
        self.set_flow(Flow.PASS)

    async def until_not_held(self) -> None:
        while self.flow is Flow.HOLD:
            await self._changed.wait()

    def watch_for(self, text: bytes, begin: Callable[[], None] = lambda: None) -> asyncio.Event:
        """Return an event that is set when `text` was sent; `begin` is called before it goes on."""
        assert 1 < len(text) <= MARK_BYTES_MAX, "it might be missed"
        self._mark = mark = _Mark(text, begin)
        return mark.came

    def look_for_mark(self, before: bytes, chunk: bytes) -> None:
        mark = self._mark
        # A text that comes in pieces is found with the last of them.
        if mark is not None and mark.text in before[1 - len(mark.text) :] + chunk:
            self._mark = None
            mark.begin()
            mark.came.set()
