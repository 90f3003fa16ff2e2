"""Defines the lease and the lock context manager for threads."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import ParamSpec, TypeVar

from redfence._core import lease_stack
from redfence._core.callbacks import Callbacks, LeaseWatch
from redfence._core.functions import check_function
from redfence._core.lease import LeaseCore, LeaseState
from redfence._errors import LeaseLostError, LossReason, RedfenceError
from redfence._messages.requests import AcquireOrder
from redfence._threads.session import SyncSession
from redfence._threads.watch import LossEvent

_log = logging.getLogger("redfence")

P = ParamSpec("P")
R = TypeVar("R")


class Lease:
    """A held lock, which the client renews in the background until it is released or lost.

    Attributes:
        resource: the locked name.
        token: the fencing token; send it with every write that this lock protects.
        lost: an event that is set when the lease is lost.
    """

    __slots__ = ("__weakref__", "_callbacks", "_core", "_session", "lost", "resource", "token")

    def __init__(self, core: LeaseCore, session: SyncSession, callbacks: Callbacks[Lease]) -> None:
        self._core = core
        self._session = session
        self._callbacks = callbacks
        self.resource = core.resource
        self.token = core.token
        self.lost = LossEvent(core, session)
        if callbacks:
            session.watch(LeaseWatch(core, self._call_back, session.callbacks.put))

    def __del__(self) -> None:
        """Release a lease that the program dropped, and warn; it would be renewed until the client closes."""
        if not self._session.owner.is_parent and self._core.ended(self._session.now_ms()) is None:
            self._session.release_dropped(self._core)
            warnings.warn(f"{self!r} was dropped without a release", ResourceWarning, 2, self)

    def __copy__(self) -> Lease:
        """Refuse a copy, because dropping it would release the lease."""
        raise TypeError("a lease cannot be copied or pickled; pass its token instead")

    __reduce__ = __copy__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Lease {self.resource!r} token={self.token} {self.state.value}>"

    @property
    def state(self) -> LeaseState:
        """The present state, as the clock shows it; LOST in a child of the process that holds the lease."""
        return LeaseState.LOST if self.lost.is_set() else self._core.state_at(self._session.now_ms())

    def remaining(self) -> float:
        """Return the seconds of validity that are left; 0 once the lease has ended."""
        return 0.0 if self.lost.is_set() else self._core.remaining_ms(self._session.now_ms()) / 1000

    def owned(self) -> bool:
        """Return whether the lease is neither lost nor released. Asks the clock, no server."""
        return self._lost_error() is None

    def raise_if_lost(self) -> None:
        """Raise if the lease no longer protects the work.

        Raises:
            LeaseLostError: the lease was lost or released.
        """
        if error := self._lost_error():
            raise error

    def _call_back(self, state: LeaseState) -> None:
        self._callbacks.call(self, state)

    def _lost_error(self) -> LeaseLostError | None:
        if self._session.owner.is_parent:
            return LeaseLostError(resource=self.resource, token=self.token, reason=LossReason.FORKED)
        return self._core.lost_error(self._session.now_ms())

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
            self._session.release_soon(self._core, holder=self)
            return False
        return self._session.release(self._core)


class Lock:
    """Holds a lock for the body of a `with`; made by `Client.lock`.

    After the body has ended it can be entered again, which acquires a new lease. Entering it twice at once
    raises RuntimeError. It also decorates functions: each call acquires a lease of its own, even
    concurrently.
    """

    __slots__ = ("_callbacks", "_entered", "_lease", "_order", "_session")

    def __init__(self, order: AcquireOrder, session: SyncSession, callbacks: Callbacks[Lease]) -> None:
        self._order = order
        self._session = session
        self._callbacks = callbacks
        self._entered = threading.Lock()
        self._lease: Lease | None = None

    def __enter__(self) -> Lease:
        """Acquire the lock, and return the lease.

        Raises:
            RedfenceError: as `Client.acquire`.
            RuntimeError: this object is entered already.
        """
        if not self._entered.acquire(blocking=False):
            raise RuntimeError("this lock is already entered; create another one with client.lock()")
        try:
            self._lease = self._session.acquire(
                self._order, partial(Lease, session=self._session, callbacks=self._callbacks)
            )
            lease_stack.push(self._lease)
        except BaseException:
            # Ctrl-C may come when the lease is already here.
            lease, self._lease = self._lease, None
            self._entered.release()
            lease_stack.remove(lease)
            if lease is not None:
                self._session.release_soon(lease._core)  # noqa: SLF001  (they share their private parts)
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
        lease_stack.remove(lease)
        core = lease._core  # noqa: SLF001  (the two classes share their private parts)
        if core.state is LeaseState.RELEASED:
            return
        lost = lease._lost_error()  # noqa: SLF001  (the two classes share their private parts)
        if lost is None:
            self._release_and_log(core)
            return
        # The release only tidies up, so do not wait for it.
        self._session.release_soon(core, holder=lease)
        if exc is None:
            raise lost

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with the lock around each call; `current_lease()` is the call's lease.

        A call raises what `with` raises, LeaseLostError too; then its result is lost.

        Raises:
            TypeError: it is an async function or a generator, or not callable.
        """
        check_function(function, is_async=False)

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            with Lock(self._order, self._session, self._callbacks):
                return function(*args, **kwargs)

        return locked

    def locked(self) -> bool:
        """Return whether this object is entered and its lease still held. Asks the clock, no server.

        False while another object or a decorated call holds the lock.
        """
        lease = self._lease
        return lease is not None and lease.owned()

    def _release_and_log(self, core: LeaseCore) -> None:
        try:
            self._session.release(core)
        except RedfenceError as error:
            # The lease ends by its ttl, and the outcome of the body matters more.
            _log.warning("release_failed resource=%r error=%r", core.resource, str(error))
