"""A held lease, and the context manager that holds one around a body, for asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from types import TracebackType

from redfence._aio.session import AsyncSession
from redfence._core.lease import LeaseCore, LeaseState
from redfence._errors import RedfenceError
from redfence._messages.requests import AcquireOrder

_log = logging.getLogger("redfence")


class AsyncLossEvent:
    """Set once the lease is lost. Awaiting it, or its `wait()`, returns when that happens; a release never sets it."""

    __slots__ = ("_core", "_event", "_session")

    def __init__(self, core: LeaseCore, session: AsyncSession) -> None:
        self._core = core
        self._session = session
        self._event: asyncio.Event | None = None

    def is_set(self) -> bool:
        """Tell whether the lease is lost at this moment, by the clock and not by a timer."""
        return self._core.state_at(self._session.now_ms()) is LeaseState.LOST

    async def wait(self) -> bool:
        """Return True once the lease is lost; wait for ever if it never is.

        Cancellation: nothing is left behind.
        """
        if self._event is None:
            self._event = asyncio.Event()
        if self.is_set():
            self._event.set()
        return await self._event.wait()

    def __await__(self) -> Generator[None, None, bool]:
        return self.wait().__await__()

    def _set(self) -> None:
        if self._event is not None:
            self._event.set()


class AsyncLease:
    """One timed grant, kept alive in the background until it is released or lost.

    Attributes:
        resource: the locked name.
        token: the fencing token: send it with every write that this lock protects.
        lost: an event that is set once the lease is lost.
    """

    __slots__ = ("_core", "_session", "lost", "resource", "token")

    def __init__(self, core: LeaseCore, session: AsyncSession) -> None:
        self._core = core
        self._session = session
        self.resource = core.resource
        self.token = core.token
        self.lost = AsyncLossEvent(core, session)
        core.on_lost = self.lost._set  # noqa: SLF001  (one class in two)

    def __repr__(self) -> str:
        return f"<AsyncLease {self.resource!r} token={self.token} {self.state.value}>"

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

    async def release(self) -> bool:
        """Give the lease back; return whether it was still held. Repeating it is harmless, and so is a lost one.

        Cancellation: the release goes on in the background, bounded by the rpc timeout.

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
        return await self._session.release(self._core)


class AsyncLock:
    """Holds a lease around the body of an `async with`; made by `AsyncClient.lock`.

    It can be entered again after it was left, and every time is a new acquisition; it cannot be entered twice at once.
    """

    __slots__ = ("_body", "_cancelling", "_interrupted", "_lease", "_order", "_session")

    def __init__(self, order: AcquireOrder, session: AsyncSession) -> None:
        self._order = order
        self._session = session
        self._lease: AsyncLease | None = None
        self._body: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._interrupted = False

    async def __aenter__(self) -> AsyncLease:
        """Acquire; the body is entered with a lease or not at all.

        Cancellation: whatever was or will be granted is released in the background.

        Raises:
            RedfenceError: as `AsyncClient.acquire`.
        """
        if self._body is not None:
            raise RuntimeError("this lock is already entered; make another one with client.lock()")
        body = asyncio.current_task()
        if body is None:
            raise RuntimeError("a lock can only be entered by a task")
        self._body = body
        try:
            core = await self._session.acquire(self._order)
        except BaseException:
            self._body = None
            raise
        lease = self._lease = AsyncLease(core, self._session)
        self._interrupted = False
        self._cancelling = body.cancelling()
        core.on_lost = self._lost
        if core.state is LeaseState.LOST:
            # It was lost between the grant and this line: the body is cancelled at its first await.
            self._lost()
        return lease

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release, within the rpc timeout. What the body raised goes on; else a lost lease raises.

        Cancellation: the release goes on in the background.

        Raises:
            LeaseLostError: the lease was lost during the body.
        """
        lease, body = self._lease, self._body
        assert lease is not None, "left what was never entered"
        assert body is not None, "left what was never entered"
        core = lease._core  # noqa: SLF001  (one class in two)
        self._lease = self._body = None
        core.on_lost = lease.lost._set  # noqa: SLF001  (one class in two)
        released = core.state is LeaseState.RELEASED
        lost = None if released else core.lost_error(self._session.now_ms())
        if lost is not None:
            # Only tidying up; nothing to wait for. First, for a cancellation may end this at the next await.
            self._session.release_soon(core)
        cancelled_here = False
        if self._interrupted:
            # As asyncio.timeout does: if nobody else asked for the cancellation, it was ours and ends here.
            others = body.uncancel() > self._cancelling
            if exc_type is None and not others:
                await _swallow_pending_cancel(body, self._cancelling)
            cancelled_here = isinstance(exc, asyncio.CancelledError) and not others
        if not released and lost is None:
            await self._release_and_log(core)
        if lost is not None and (exc is None or cancelled_here):
            raise lost from exc

    async def _release_and_log(self, core: LeaseCore) -> None:
        try:
            await self._session.release(core)
        except RedfenceError as error:
            # It ends by its ttl; the body's outcome matters more.
            _log.warning("release_failed resource=%r error=%r", core.resource, str(error))

    def _lost(self) -> None:
        lease, body = self._lease, self._body
        if lease is None or body is None:
            return
        lease.lost._set()  # noqa: SLF001  (one class in two)
        self._interrupted = True
        body.cancel(f"the lease of {lease.resource!r} was lost")


async def _swallow_pending_cancel(task: asyncio.Task[object], cancelling: int) -> None:
    """Take the cancellation that the body never met, for it ended without another await."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        if task.cancelling() > cancelling:
            raise
