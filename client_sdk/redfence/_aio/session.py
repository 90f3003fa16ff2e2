"""Runs a session core on an asyncio loop: a task for the link, a task for writing, and one timer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from redfence._clock import Clock
from redfence._config import Timeouts
from redfence._core.endpoints import Endpoints
from redfence._core.lease import LeaseCore
from redfence._core.owner import Owner
from redfence._core.session import SessionCore
from redfence._defaults import with_holder
from redfence._errors import ClosedError, RedfenceError, UnavailableError
from redfence._messages.requests import AcquireOrder
from redfence._tracing import client_span
from redfence._transport.links import AsyncConnector, AsyncLink, Method

# The loop's clock stops in suspend, and the SDK's clock does not. The timer fires at least once a
# second, so the client sees an expired lease within a second after the machine wakes up.
TIMER_MS_MAX = 1000


class AsyncSession:
    """Owns the tasks and the timer of one client; they start at the first call and end in `close`.

    Attributes:
        owner: the process that uses the client.
        address_count: how many servers the client knows.
        waiting_lease_id: returns the lease id of the first acquire that waits at the server for a resource,
            or "".
    """

    def __init__(
        self,
        core: SessionCore,
        *,
        endpoints: Endpoints,
        connector: AsyncConnector,
        timeouts: Timeouts,
        clock: Clock,
    ) -> None:
        self._core = core
        self._endpoints = endpoints
        self.address_count = len(endpoints)
        self.waiting_lease_id = core.waiting_lease_id
        self._connector = connector
        self._timeouts = timeouts
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._link: AsyncLink | None = None
        self._work = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = math.inf
        self._unwatch: Callable[[], None] | None = None
        self.owner = Owner()

    def __del__(self) -> None:
        """Warn if the client was used and not closed."""
        if self._task is not None and not self.owner.is_parent:
            warnings.warn(
                "a redfence client was not closed; use `async with AsyncClient(...)`",
                ResourceWarning,
                2,
                self,
            )

    def now_ms(self) -> float:
        """Return the present instant in milliseconds."""
        return self._clock.now_ms()

    async def acquire(self, order: AcquireOrder) -> LeaseCore:
        """Acquire a lease.

        Cancellation: the client gives up the acquire and releases any grant, within the rpc timeout.

        Raises:
            RedfenceError: as `AsyncClient.acquire`.
            RuntimeError: no event loop runs here, or the client belongs to another one.
        """
        with client_span("acquire", order.resource) as traceparent:
            order = replace(with_holder(order), traceparent=traceparent)
            waiter = self._start().create_future()
            call = self._core.acquire(order, waiter, now_ms=self._clock.now_ms())
            self._wake_driver()
            try:
                lease: LeaseCore = await waiter
            except BaseException:
                # After an error of the session this does nothing.
                self._core.abandon(call, now_ms=self._clock.now_ms())
                self._wake_driver()
                raise
            return lease

    async def release(self, lease: LeaseCore) -> bool:
        """Release a lease; return whether it was still held.

        Cancellation: the release continues in the background, within the rpc timeout.
        """
        with client_span("release", lease.resource) as traceparent:
            waiter: asyncio.Future[bool] = self._start().create_future()
            self._release(lease, waiter, traceparent=traceparent)
            return await waiter

    def release_soon(self, lease: LeaseCore) -> None:
        """Release a lease without waiting for the answer; does nothing if the client is closed."""
        with client_span("release", lease.resource) as traceparent:
            self._release(lease, traceparent=traceparent)

    def release_dropped(self, lease: LeaseCore) -> None:
        """Release a lease that was garbage-collected, in any thread; does nothing once the loop has ended.

        The release makes no span: the code that the collector interrupted did not ask for it.
        """
        if self._loop is not None and not self.owner.is_parent:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._release, lease)

    def _release(
        self, lease: LeaseCore, waiter: asyncio.Future[bool] | None = None, *, traceparent: str = ""
    ) -> None:
        with contextlib.suppress(ClosedError):  # closing has released the lease
            self._start()
            self._core.release(lease, waiter, now_ms=self._clock.now_ms(), traceparent=traceparent)
            self._wake_driver()

    async def call(self, method: Method, request: Any) -> Any:
        """Make a unary call on the present link; try again on a new link at most once per address.

        Cancellation: cancels the call.
        """
        for _ in range(self.address_count + 1):
            link = await self.usable_link()
            if link is None:
                continue  # the link came up and broke before this line ran
            try:
                return await link.call(method, request, timeout_ms=self._timeouts.rpc_timeout_ms)
            except UnavailableError as error:
                if error.error_reason:
                    raise
                # The transport failed, not the server.
                link.abort()
                await asyncio.sleep(0)
        raise self._core.unusable()

    async def usable_link(self) -> AsyncLink | None:
        """Wait until a link is up and return it; None if it broke at once.

        Cancellation: has no side effect.

        Raises:
            UnavailableError: no server was reachable within the rpc timeout.
        """
        waiter: asyncio.Future[None] = self._start().create_future()
        self._core.await_link(waiter, now_ms=self._clock.now_ms())
        self._wake_driver()
        await waiter
        return self._link

    async def close(self) -> None:
        """Release every lease and end the tasks, within the close timeout.

        Cancellation: ends the tasks at once; leases that were not released end by their ttl.
        """
        if self.owner.is_parent:
            return
        loop = asyncio.get_running_loop()
        idle: asyncio.Future[None] = loop.create_future()
        self._core.close(idle, now_ms=self._clock.now_ms())
        if self._loop not in {None, loop}:
            # The tasks have ended with their loop.
            self._task = None
            if self._unwatch is not None:
                self._unwatch()
            return
        try:
            if self._task is not None:
                self._wake_driver()
                await asyncio.wait([idle], timeout=self._timeouts.close_timeout_ms / 1000)
        finally:
            await self._stop()

    async def _stop(self) -> None:
        # This comes first and does not wait. Without the timer and the link, nothing else would
        # wake the callers.
        self._core.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()  # raises if the task had a bug

    def _start(self) -> asyncio.AbstractEventLoop:
        self._core.check_open()
        self.owner.claim()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "AsyncClient needs a running asyncio event loop: call it within asyncio.run, "
                "or use redfence.Client"
            ) from None
        if self._loop not in {None, loop}:
            raise RuntimeError(
                "this AsyncClient belongs to another event loop; create an AsyncClient in each asyncio.run"
            )
        if self._loop is None:
            self._loop = loop
            self._task = self._loop.create_task(self._run(), name="redfence-session")

            def time_moved() -> None:
                loop.call_soon_threadsafe(self._on_timer)

            self._unwatch = self._clock.watch(time_moved)
        return self._loop

    # Called after each call to the core: wakes the writer, and sets the timer to the next alarm.

    def _wake_driver(self) -> None:
        if self._core.has_output or self._link is None:
            self._work.set()
        next_ms = self._core.next_alarm_ms()
        if next_ms < self._timer_at_ms:
            self._set_timer(next_ms)

    def _set_timer(self, at_ms: float) -> None:
        assert self._loop is not None, "the session has an alarm but no loop"
        if self._timer is not None:
            self._timer.cancel()
        now_ms = self._clock.now_ms()
        delay_ms = min(max(at_ms - now_ms, 0.0), TIMER_MS_MAX)
        self._timer_at_ms = now_ms + delay_ms
        self._timer = self._loop.call_later(delay_ms / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at_ms = math.inf
        now_ms = self._clock.now_ms()
        self._core.tick(now_ms)
        if self._link is not None and self._core.should_leave(now_ms):
            self._link.abort()
        self._wake_driver()

    # The link task.

    async def _run(self) -> None:
        """Keep a link open while the core needs one; end only by cancellation."""
        while True:
            while not self._core.wants_link:
                self._work.clear()
                await self._work.wait()
            address = self._endpoints.current()
            try:
                link = await self._connector.connect(address, timeout_ms=self._timeouts.connect_timeout_ms)
            except RedfenceError as error:
                self._core.link_failed(error, now_ms=self._clock.now_ms())
            else:
                await self._use(link)
            self._wake_driver()
            await asyncio.sleep(self._endpoints.advance() / 1000)

    async def _use(self, link: AsyncLink) -> None:
        self._link = link
        self._core.link_up(now_ms=self._clock.now_ms())
        self._wake_driver()
        writer = asyncio.create_task(self._write(link), name="redfence-session-writer")
        error: RedfenceError | None = None
        try:
            await self._read(link)
        except RedfenceError as exc:
            error = exc
        finally:
            self._link = None
            self._core.link_down(error, now_ms=self._clock.now_ms())
            writer.cancel()
            await asyncio.wait([writer])
            await link.close()

    async def _read(self, link: AsyncLink) -> None:
        while (response := await link.receive()) is not None:
            now_ms = self._clock.now_ms()
            self._core.received(response, now_ms=now_ms)
            if self._core.should_leave(now_ms):
                return
            if not self._core.leaving:
                self._endpoints.mark_healthy()
            self._wake_driver()

    async def _write(self, link: AsyncLink) -> None:
        # Calls of one turn of the loop leave in one message. Calls made while it is written leave
        # in the next one.
        with contextlib.suppress(RedfenceError):  # the reader sees the same error and handles it
            while True:
                batch = self._core.take_batch(self._clock.now_ms())
                if batch is None:
                    self._work.clear()
                    await self._work.wait()
                else:
                    await link.send(batch)
