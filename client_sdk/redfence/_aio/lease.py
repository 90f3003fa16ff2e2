"""Defines the lease and the lock context manager for asyncio."""

from __future__ import annotations

import asyncio
import functools
import logging
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from redfence._aio.session import AsyncSession
from redfence._aio.watch import AsyncLossEvent, call_soon
from redfence._core import lease_stack
from redfence._core.callbacks import Callbacks, LeaseWatch
from redfence._core.functions import check_function
from redfence._core.lease import LeaseCore, LeaseState
from redfence._errors import LeaseLostError, LossReason, RedfenceError
from redfence._messages.requests import AcquireOrder

_log = logging.getLogger("redfence")

P = ParamSpec("P")
R = TypeVar("R")


class AsyncLease:
    """A held lock, which the client renews in the background until it is released or lost.

    Attributes:
        resource: the locked name.
        token: the fencing token; send it with every write that this lock protects.
        lost: an event that is set when the lease is lost.
    """

    __slots__ = ("__weakref__", "_callbacks", "_core", "_session", "lost", "resource", "token")

    def __init__(self, core: LeaseCore, session: AsyncSession, callbacks: Callbacks[AsyncLease]) -> None:
        self._core = core
        self._session = session
        self._callbacks = callbacks
        self.resource = core.resource
        self.token = core.token
        self.lost = AsyncLossEvent(core, session)
        if callbacks:
            LeaseWatch(core, self._call_back, call_soon).start()

    def __del__(self) -> None:
        """Release a lease that the program dropped, and warn; it would be renewed until the client closes."""
        if not self._session.owner.is_parent and self._core.ended(self._session.now_ms()) is None:
            self._session.release_dropped(self._core)
            warnings.warn(f"{self!r} was dropped without a release", ResourceWarning, 2, self)

    def __copy__(self) -> AsyncLease:
        """Refuse a copy, because dropping it would release the lease."""
        raise TypeError("a lease cannot be copied or pickled; pass its token instead")

    __reduce__ = __copy__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<AsyncLease {self.resource!r} token={self.token} {self.state.value}>"

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

    def events(self) -> AsyncIterator[LeaseState]:
        """Yield each change of the state, and end after LOST or RELEASED. Any number of tasks may iterate.

            async for state in lease.events():
                if state is LeaseState.AT_RISK: ...

        If the lease is not ACTIVE when the iteration begins, it yields that state first. A slow reader gets
        only the latest state. The iteration does not keep the lease: a lease that is dropped is released.

        Cancellation: has no side effect.
        """
        return self.lost._changes()  # noqa: SLF001  (the two classes share their private parts)

    def _call_back(self, state: LeaseState) -> None:
        # These two end the event loop, as in any callback of asyncio.
        self._callbacks.call(self, state, passes=(KeyboardInterrupt, SystemExit))

    def _lost_error(self) -> LeaseLostError | None:
        if self._session.owner.is_parent:
            return LeaseLostError(resource=self.resource, token=self.token, reason=LossReason.FORKED)
        return self._core.lost_error(self._session.now_ms())

    async def release(self) -> bool:
        """Release the lease; return whether it was still held. Harmless if it was released or lost before.

        Cancellation: the release continues in the background, within the rpc timeout.

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
        return await self._session.release(self._core)


class AsyncLock:
    """Holds a lock for the body of an `async with`; made by `AsyncClient.lock`.

    If the lease is lost, it cancels the task that entered it. If another task runs the body (an
    `AsyncExitStack` of a framework), that task must watch `lease.lost` itself; a warning is logged.

    After the body has ended it can be entered again, which acquires a new lease. Entering it twice at once
    raises RuntimeError. It also decorates async functions: each call acquires a lease of its own, even
    concurrently.
    """

    __slots__ = (
        "__weakref__",
        "_body",
        "_callbacks",
        "_cancelling",
        "_interrupted",
        "_lease",
        "_order",
        "_session",
    )

    def __init__(self, order: AcquireOrder, session: AsyncSession, callbacks: Callbacks[AsyncLease]) -> None:
        self._order = order
        self._session = session
        self._callbacks = callbacks
        self._lease: AsyncLease | None = None
        self._body: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._interrupted = False

    async def __aenter__(self) -> AsyncLease:
        """Acquire the lock, and return the lease.

        Cancellation: the client releases any grant in the background.

        Raises:
            RedfenceError: as `AsyncClient.acquire`.
            RuntimeError: this object is entered already, or no task enters it.
        """
        if self._body is not None:
            raise RuntimeError("this lock is already entered; create another one with client.lock()")
        body = asyncio.current_task()
        if body is None:
            raise RuntimeError("this lock was entered outside an asyncio task; enter it in a task")
        self._body = body
        try:
            core = await self._session.acquire(self._order)
        except BaseException:
            self._body = None
            raise
        lease = self._lease = AsyncLease(core, self._session, self._callbacks)
        self._interrupted = False
        self._cancelling = body.cancelling()
        # Only weakly, so that a lock that the program drops is released.
        weak_changed = weakref.WeakMethod(self._changed)

        def watch() -> None:
            if changed := weak_changed():
                changed()

        core.watchers.append(watch)
        if core.state is LeaseState.LOST:
            # The lease was lost between the grant and this line, so cancel the body at its first await.
            self._changed()
        lease_stack.push(lease)
        return lease

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release the lock within the rpc timeout; raise if the lease was lost. An error of the body wins.

        Cancellation: the release continues in the background.

        Raises:
            LeaseLostError: the lease was lost during the body.
        """
        lease, body = self._lease, self._body
        assert lease is not None, "the lock was left but never entered"
        assert body is not None, "the lock was left but never entered"
        core = lease._core  # noqa: SLF001  (the two classes share their private parts)
        self._lease = self._body = None
        lease_stack.remove(lease)
        is_inside = asyncio.current_task() is body
        if not is_inside:
            _log.warning(
                "lock_left_in_another_task resource=%r: a loss cancels only the task that entered the lock; "
                "await lease.lost where the lock is used",
                lease.resource,
            )
        released = core.state is LeaseState.RELEASED
        lost = None if released else lease._lost_error()  # noqa: SLF001  (they share their private parts)
        if lost is not None:
            # The release only tidies up, so do not wait for it. It comes first, because a cancellation may
            # end this method at the next await.
            self._session.release_soon(core)
        cancelled_here = False
        if self._interrupted:
            # As in asyncio.timeout: if no other caller requested a cancellation, it was ours, and
            # it ends here.
            others = body.uncancel() > self._cancelling
            if exc_type is None and not others:
                await _swallow_pending_cancel(body, self._cancelling)
            cancelled_here = isinstance(exc, asyncio.CancelledError) and not others
        if not released and lost is None:
            await self._release_and_log(core)
        if lost is not None and (exc is None or cancelled_here):
            raise lost from exc

    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """Return the async function with the lock around each call; `current_lease()` is the call's lease.

        A call raises what `async with` raises, LeaseLostError too; then its result is lost.

        Raises:
            TypeError: the function is not async, a generator, or not callable.
        """
        check_function(function, is_async=True)

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            async with AsyncLock(self._order, self._session, self._callbacks):
                return await function(*args, **kwargs)

        return locked

    def locked(self) -> bool:
        """Return whether this object is entered and its lease still held. Asks the clock, no server.

        False while another object or a decorated call holds the lock.
        """
        lease = self._lease
        return lease is not None and lease.owned()

    async def _release_and_log(self, core: LeaseCore) -> None:
        try:
            await self._session.release(core)
        except RedfenceError as error:
            # The lease ends by its ttl, and the outcome of the body matters more.
            _log.warning("release_failed resource=%r error=%r", core.resource, str(error))

    def _changed(self) -> None:
        lease, body = self._lease, self._body
        if lease is None or body is None:
            return
        if lease._core.state is not LeaseState.LOST:  # noqa: SLF001  (they share their private parts)
            return
        if body.done():
            _log.warning(
                "body_not_cancelled resource=%r: the task that entered this lock has ended; "
                "await lease.lost where the lock is used",
                lease.resource,
            )
            return
        self._interrupted = True
        body.cancel(f"the lease of {lease.resource!r} was lost")


async def _swallow_pending_cancel(task: asyncio.Task[object], cancelling: int) -> None:
    """Consume a pending cancellation that the body did not see because it had no further await."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        if task.cancelling() > cancelling:
            raise
