"""Spread a burst of calls over several turns of the event loop, so that nothing else waits long for it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

# A call takes about 0.1 ms. Higher: a burst delays the replies of the nodes until they count as lost.
_CALLS_PER_TURN: Final = 100


class Turns:
    """Lets at most 100 calls of a server begin in one turn of the loop; the others follow in order."""

    def __init__(self) -> None:
        self._left = _CALLS_PER_TURN
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._counts = False

    async def begin(self) -> None:
        """Return when the call may begin.

        Cancellation: the call gives up its place.
        """
        if not self._counts:
            self._counts = True
            self._loop.call_soon(self._next)
        if self._left:
            self._left -= 1
            return
        place: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(place)
        await place

    def _next(self) -> None:
        self._left = _CALLS_PER_TURN
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._left -= 1
        self._counts = bool(self._waiting)
        if self._counts:
            self._loop.call_soon(self._next)
