"""Tells a thread that a lease is lost."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue

from redfence._core.lease import LeaseCore, LeaseState
from redfence._seconds import Seconds
from redfence._threads.session import SyncSession

_ENDED = (LeaseState.LOST, LeaseState.RELEASED)


class LossEvent:
    """An event that is set when the lease is lost; a release never sets it."""

    __slots__ = ("_core", "_session")

    def __init__(self, core: LeaseCore, session: SyncSession) -> None:
        self._core = core
        self._session = session

    def is_set(self) -> bool:
        """Return whether the lease is lost now. Compares the clock and waits for no timer."""
        return self._state() is LeaseState.LOST

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until the lease is lost or released; return whether it is lost.

        It waits at most `timeout` seconds; None waits without end.
        """
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        core = self._core
        # As in `Answer`: a signal handler must not meet a lock that its own thread holds.
        ended: SimpleQueue[None] = SimpleQueue()

        def watch() -> None:
            if core.state in _ENDED:
                ended.put(None)

        core.watchers.append(watch)
        try:
            if self._state() not in _ENDED:
                with suppress(Empty):
                    ended.get(timeout=None if timeout is None else max(0.0, timeout))
        finally:
            core.watchers.remove(watch)
        return self.is_set()

    def _state(self) -> LeaseState:
        if self._session.owner.is_parent:
            return LeaseState.LOST
        return self._core.state_at(self._session.now_ms())
