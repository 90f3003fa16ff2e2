"""Tells a task of the changes of a lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator

from redfence._aio.session import AsyncSession
from redfence._core.lease import LeaseCore, LeaseState

_ENDED = (LeaseState.LOST, LeaseState.RELEASED)


def call_soon(run: Callable[[], None]) -> None:
    """Run a callback in the event loop, after the session's present step."""
    asyncio.get_running_loop().call_soon(run)


class AsyncLossEvent:
    """An event that is set when the lease is lost; a release never sets it. Await it or its `wait()`."""

    __slots__ = ("_core", "_session")

    def __init__(self, core: LeaseCore, session: AsyncSession) -> None:
        self._core = core
        self._session = session

    def is_set(self) -> bool:
        """Return whether the lease is lost now. Compares the clock and waits for no timer."""
        return self._state() is LeaseState.LOST

    async def wait(self) -> bool:
        """Wait until the lease is lost or released, and return whether it is lost.

        Cancellation: has no side effect.
        """
        while self._state() not in _ENDED:
            await self._next_change()
        return self.is_set()

    def __await__(self) -> Generator[None, None, bool]:
        return self.wait().__await__()

    def _state(self) -> LeaseState:
        return (
            LeaseState.LOST if self._session.owner.is_parent else self._core.state_at(self._session.now_ms())
        )

    async def _changes(self) -> AsyncIterator[LeaseState]:
        """Yield as `AsyncLease.events`; without the lease, so that the program can drop it."""
        seen = LeaseState.ACTIVE
        while seen not in _ENDED:
            # Not AT_RISK by the clock: no watcher is told if a renewal succeeds before the session warns.
            state = LeaseState.LOST if self.is_set() else self._core.state
            if state is seen:
                await self._next_change()
            else:
                seen = state
                yield state

    async def _next_change(self) -> None:
        changed = asyncio.Event()
        self._core.watchers.append(changed.set)
        try:
            await changed.wait()
        finally:
            self._core.watchers.remove(changed.set)
