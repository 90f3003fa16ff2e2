"""A held lease, and the context manager that holds one around a body, for threads."""

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
    """Set once the lease is lost; a release never sets it."""

    __slots__ = ("_core", "_event", "_session")

    def __init__(self, core: LeaseCore, session: SyncSession) -> None:
        self._core = core
        self._session = session
        self._event = threading.Event()

    def is_set(self) -> bool:
        """Tell whether the lease is lost at this moment, by the clock and not by a timer."""
        return self._core.state_at(self._session.now_ms()) is LeaseState.LOST

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the lease is lost, for at most `timeout` seconds; return whether it is."""
        return self.is_set() or self._event.wait(timeout) or self.is_set()

    def _set(self) -> None:
        self._event.set()


class Lease:
    """One timed grant, kept alive in the background until it is released or lost.

    Attributes:
        resource: the locked name.
        token: the fencing token: send it with every write that this lock protects.
        lost: an event that is set once the lease is lost.
    """

    __slots__ = ("_core", "_session", "lost", "resource", "token")

    def __init__(self, core: LeaseCore, session: SyncSession) -> None:
        self._core = core
        self._session = session
        self.resource = core.resource
        self.token = core.token
        self.lost = LossEvent(core, session)
        core.on_lost = self.lost._set  # noqa: SLF001  (one class in two)
        if core.state is LeaseState.LOST:
            # It was lost in another thread before this one got here.
            self.lost._set()  # noqa: SLF001  (one class in two)

    def __repr__(self) -> str:
        return f"<Lease {self.resource!r} token={self.token} {self.state.value}>"

    @property
    def state(self) -> LeaseState:
        """The state at this moment, by the clock."""
        return self._core.state_at(self._session.now_ms())

    def remaining(self) -> float:
        """Return the seconds for which the lease may be counted on from now; 0 once it has ended."""
        return self._core.remaining_ms(self._session.now_ms()) / 1000

    def raise_if_lost(self) -> None:
        """Return only if the lease protects the work at this moment.

        Raises:
            LeaseLostError: it was lost or released.
        """
        if error := self._core.lost_error(self._session.now_ms()):
            raise error

    def release(self) -> bool:
        """Give the lease back; return whether it was still held. Repeating it is harmless, and so is a lost one.

        Raises:
            UnavailableError: the server reached no quorum; the lease ends by its ttl at the latest.
            OutcomeUnknownError: no answer came in time, or the client was closed meanwhile; the same holds.
        """
        if self._core.state is LeaseState.RELEASED:
            return False
        if self.lost.is_set():
            # Only tidying up; nothing to wait for.
            self._session.release_soon(self._core)
            return False
        return self._session.release(self._core)


class Lock:
    """Holds a lease around the body of a `with`; made by `Client.lock`.

    It can be entered again after it was left, and every time is a new acquisition; it cannot be entered twice at once.
    """

    __slots__ = ("_entered", "_lease", "_order", "_session")

    def __init__(self, order: AcquireOrder, session: SyncSession) -> None:
        self._order = order
        self._session = session
        self._entered = threading.Lock()
        self._lease: Lease | None = None

    def __enter__(self) -> Lease:
        """Acquire; the body is entered with a lease or not at all.

        Raises:
            RedfenceError: as `Client.acquire`.
        """
        if not self._entered.acquire(blocking=False):
            raise RuntimeError("this lock is already entered; make another one with client.lock()")
        try:
            self._lease = Lease(self._session.acquire(self._order), self._session)
        except BaseException:
            self._entered.release()
            raise
        return self._lease

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release, within the rpc timeout. What the body raised goes on; else a lost lease raises.

        Raises:
            LeaseLostError: the lease was lost during the body.
        """
        lease, self._lease = self._lease, None
        assert lease is not None, "left what was never entered"
        self._entered.release()
        core = lease._core  # noqa: SLF001  (one class in two)
        if core.state is LeaseState.RELEASED:
            return
        lost = core.lost_error(self._session.now_ms())
        if lost is None:
            self._release_and_log(core)
            return
        # Only tidying up; nothing to wait for.
        self._session.release_soon(core)
        if exc is None:
            raise lost

    def _release_and_log(self, core: LeaseCore) -> None:
        try:
            self._session.release(core)
        except RedfenceError as error:
            # It ends by its ttl; the body's outcome matters more.
            _log.warning("release_failed resource=%r error=%r", core.resource, str(error))
