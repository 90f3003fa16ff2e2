"""Defines the lease and the lock context manager for threads."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from redfence._core.lease import LeaseCore, LeaseState
from redfence._errors import RedfenceError
from redfence._messages.requests import AcquireOrder
from redfence._threads.session import SyncSession

_log = logging.getLogger("redfence")


class LossEvent:
    """An event that is set when the lease is lost; a release never sets it."""

    __slots__ = ("_core", "_event", "_session")

    def __init__(self, core: LeaseCore, session: SyncSession) -> None:
        self._core = core
        self._session = session
        self._event = threading.Event()

    def is_set(self) -> bool:
        """Return whether the lease is lost now. Compares the clock and waits for no timer."""
        return self._core.state_at(self._session.now_ms()) is LeaseState.LOST

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until the lease is lost; return whether it is lost."""
        return self.is_set() or self._event.wait(timeout) or self.is_set()

    def _set(self) -> None:
        self._event.set()


class Lease:
    """A held lock, which the client renews in the background until it is released or lost.

    Attributes:
        resource: the locked name.
        token: the fencing token; send it with every write that this lock protects.
        lost: an event that is set when the lease is lost.
    """

    __slots__ = ("_core", "_session", "lost", "resource", "token")

    def __init__(self, core: LeaseCore, session: SyncSession) -> None:
        self._core = core
        self._session = session
        self.resource = core.resource
        self.token = core.token
        self.lost = LossEvent(core, session)
        core.on_lost = self.lost._set  # noqa: SLF001  (the two classes share their private parts)
        if core.state is LeaseState.LOST:
            # Another thread saw the loss before this line.
            self.lost._set()  # noqa: SLF001  (the two classes share their private parts)

    def __repr__(self) -> str:
        return f"<Lease {self.resource!r} token={self.token} {self.state.value}>"

    @property
    def state(self) -> LeaseState:
        """The present state, as the clock shows it."""
        return self._core.state_at(self._session.now_ms())

    def remaining(self) -> float:
        """Return the seconds of validity that are left; 0 once the lease has ended."""
        return self._core.remaining_ms(self._session.now_ms()) / 1000

    def raise_if_lost(self) -> None:
        """Raise if the lease no longer protects the work.

        Raises:
            LeaseLostError: the lease was lost or released.
        """
        if error := self._core.lost_error(self._session.now_ms()):
            raise error

    def release(self) -> bool:
        """Release the lease; return whether it was still held. Harmless if it was released or lost before.

        Raises:
            UnavailableError: the server reached no quorum; the lease ends by its ttl at the latest.
            OutcomeUnknownError: no answer came in time, or the client was closed meanwhile; the lease ends
                by its ttl at the latest.
        """
        if self._core.state is LeaseState.RELEASED:
            return False
        if self.lost.is_set():
            # The release only tidies up, so do not wait for it.
            self._session.release_soon(self._core)
            return False
        return self._session.release(self._core)


class Lock:
    """Holds a lock for the body of a `with`; made by `Client.lock`.

    After the body has ended it can be entered again, which acquires a new lease. It cannot be entered twice
    at once.
    """

    __slots__ = ("_entered", "_lease", "_order", "_session")

    def __init__(self, order: AcquireOrder, session: SyncSession) -> None:
        self._order = order
        self._session = session
        self._entered = threading.Lock()
        self._lease: Lease | None = None

    def __enter__(self) -> Lease:
        """Acquire the lock, and return the lease.

        Raises:
            RedfenceError: as `Client.acquire`.
        """
        if not self._entered.acquire(blocking=False):
            raise RuntimeError("this lock is already entered; create another one with client.lock()")
        try:
            self._lease = Lease(self._session.acquire(self._order), self._session)
        except BaseException:
            self._entered.release()
            raise
        return self._lease

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release the lock within the rpc timeout; raise if the lease was lost. An error of the body wins.

        Raises:
            LeaseLostError: the lease was lost during the body.
        """
        lease, self._lease = self._lease, None
        assert lease is not None, "the lock was left but never entered"
        self._entered.release()
        core = lease._core  # noqa: SLF001  (the two classes share their private parts)
        if core.state is LeaseState.RELEASED:
            return
        lost = core.lost_error(self._session.now_ms())
        if lost is None:
            self._release_and_log(core)
            return
        # The release only tidies up, so do not wait for it.
        self._session.release_soon(core)
        if exc is None:
            raise lost

    def _release_and_log(self, core: LeaseCore) -> None:
        try:
            self._session.release(core)
        except RedfenceError as error:
            # The lease ends by its ttl, and the outcome of the body matters more.
            _log.warning("release_failed resource=%r error=%r", core.resource, str(error))
