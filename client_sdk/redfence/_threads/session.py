"""Runs a session core on two daemon threads, one for the link and one for the timer.

One lock guards the core. A thread holds it only briefly and never while it waits. Callers wait on
futures, so Ctrl-C interrupts them. Lock order: this lock, then a link's own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

from redfence._clock import Clock
from redfence._config import ClientOptions
from redfence._core.calls import AcquireCall
from redfence._core.endpoints import Endpoints
from redfence._core.lease import LeaseCore
from redfence._core.session import SessionCore
from redfence._errors import ClosedError, RedfenceError, UnavailableError
from redfence._messages.requests import AcquireOrder
from redfence._transport.links import Method, SyncConnector, SyncLink

# See redfence._aio.session.TIMER_MS_MAX.
TIMER_MS_MAX = 1000


class SyncSession:
    """Owns the threads of one client; they start at the first call and end in `close`."""

    def __init__(
        self,
        core: SessionCore,
        *,
        endpoints: Endpoints,
        connector: SyncConnector,
        options: ClientOptions,
        clock: Clock,
    ) -> None:
        self._core = core
        self._endpoints = endpoints
        self._connector = connector
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        # Both threads wait for this: the core needs a link, an alarm is earlier, or the session stops.
        self._changed = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._link: SyncLink | None = None
        self._timer_at_ms = math.inf
        self._stopping = False
        self._unwatch: Callable[[], None] | None = None

    def now_ms(self) -> float:
        """Return the present instant in milliseconds."""
        return self._clock.now_ms()

    def acquire(self, order: AcquireOrder) -> LeaseCore:
        """Acquire a lease; if Ctrl-C interrupts this, the client releases any grant."""
        waiter: Future[LeaseCore] = Future()
        call: AcquireCall | None = None
        try:
            with self._lock:
                self._start()
                call = self._core.acquire(order, waiter, now_ms=self._clock.now_ms())
                self._wake_driver()
            return waiter.result()
        except BaseException:
            # After Ctrl-C this gives up the acquire. After an error of the core it does nothing.
            with self._lock:
                if call is not None:
                    self._core.abandon(call, now_ms=self._clock.now_ms())
                    self._wake_driver()
                else:
                    # Ctrl-C came before `call` was assigned. The core releases a grant whose waiter
                    # is cancelled.
                    waiter.cancel()
            raise

    def release(self, lease: LeaseCore) -> bool:
        """Release a lease; return whether it was still held."""
        waiter: Future[bool] = Future()
        try:
            self._release(lease, waiter)
            return waiter.result()
        except BaseException:
            # After Ctrl-C the release may still be queued.
            with self._lock:
                self._wake_driver()
            raise

    def waiting_lease_id(self, resource: str) -> str:
        """Return the lease id of the first acquire that waits at the server for a resource, or ""."""
        with self._lock:
            return self._core.waiting_lease_id(resource)

    def release_soon(self, lease: LeaseCore) -> None:
        """Release a lease without waiting for the answer; does nothing if the client is closed."""
        with suppress(ClosedError):
            self._release(lease, None)

    def _release(self, lease: LeaseCore, waiter: Future[bool] | None) -> None:
        with self._lock:
            self._start()
            self._core.release(lease, waiter, now_ms=self._clock.now_ms())
            self._wake_driver()

    def call(self, method: Method, request: Any) -> Any:
        """Make a unary call on the present link; try again on a new link at most once per address."""
        for tries_left in reversed(range(len(self._endpoints) + 1)):
            waiter: Future[None] = Future()
            with self._lock:
                self._start()
                self._core.await_link(waiter, now_ms=self._clock.now_ms())
                self._wake_driver()
            waiter.result()
            link = self._link
            if link is None:
                continue  # the link came up and broke before this line ran
            try:
                return link.call(method, request, timeout_ms=self._options.rpc_timeout_ms)
            except UnavailableError as error:
                if error.error_reason or not tries_left:
                    raise
                # The transport failed, not the server.
                link.abort()
        raise UnavailableError("every connection broke before it could be used; check the servers and retry")

    def close(self) -> None:
        """Release every lease and end the threads, within the close timeout."""
        idle: Future[None] = Future()
        with self._lock:
            self._core.close(idle, now_ms=self._clock.now_ms())
            self._wake_driver()
        try:
            if self._threads:
                with suppress(FutureTimeoutError):
                    idle.result(self._options.close_timeout_ms / 1000)
        finally:
            self._stop()

    def _stop(self) -> None:
        with self._lock:
            # After the threads have ended, nothing else would wake the callers.
            self._core.stop()
            self._stopping = True
            self._changed.notify_all()
            link = self._link
            threads, self._threads = self._threads, []
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if link is not None:
            link.abort()
        # A thread can be in the middle of connecting, for at most the connect timeout.
        for thread in threads:
            thread.join(self._options.connect_timeout_ms / 1000 + 1)

    def _start(self) -> None:
        self._core.check_open()
        if not self._threads:
            for name, target in (("redfence-session", self._run_link), ("redfence-timer", self._run_timer)):
                thread = threading.Thread(target=target, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._unwatch = self._clock.watch(self._time_moved)

    # These methods run with the lock held.

    def _wake_driver(self) -> None:
        """Write the core's commands, and wake the threads if needed. Called after each call to the core."""
        now_ms = self._clock.now_ms()
        link = self._link
        if link is not None:
            while (batch := self._core.take_batch(now_ms)) is not None:
                link.send(batch)
            if self._core.should_leave(now_ms):
                link.abort()
        if link is None or self._core.next_alarm_ms() < self._timer_at_ms:
            self._changed.notify_all()

    def _tick(self) -> None:
        self._core.tick(self._clock.now_ms())
        self._wake_driver()

    def _time_moved(self) -> None:
        with self._lock:
            self._tick()

    # The threads.

    def _run_timer(self) -> None:
        with self._lock:
            while not self._stopping:
                now_ms = self._clock.now_ms()
                next_ms = self._core.next_alarm_ms()
                if next_ms <= now_ms:
                    self._tick()
                elif next_ms == math.inf:
                    self._changed.wait()
                else:
                    delay_ms = min(next_ms - now_ms, TIMER_MS_MAX)
                    self._timer_at_ms = now_ms + delay_ms
                    self._changed.wait(delay_ms / 1000)
                    self._timer_at_ms = math.inf

    def _run_link(self) -> None:
        """Keep a link open while the core needs one; end in `close`."""
        while self._wait_for_work():
            address = self._endpoints.current()
            try:
                link = self._connector.connect(address, timeout_ms=self._options.connect_timeout_ms)
            except RedfenceError as error:
                with self._lock:
                    self._core.link_failed(error)
            else:
                self._use(link)
            self._pause(self._endpoints.advance())

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not self._stopping and not self._core.wants_link:
                self._changed.wait()
            return not self._stopping

    def _pause(self, pause_ms: float) -> None:
        with self._lock:
            self._changed.wait_for(lambda: self._stopping, timeout=pause_ms / 1000)

    def _use(self, link: SyncLink) -> None:
        with self._lock:
            if not self._stopping:
                self._link = link
                self._core.link_up(now_ms=self._clock.now_ms())
                self._wake_driver()
        error: RedfenceError | None = None
        try:
            if self._link is not None:
                self._read(link)
        except RedfenceError as exc:
            error = exc
        finally:
            with self._lock:
                self._link = None
                self._core.link_down(error, now_ms=self._clock.now_ms())
                self._wake_driver()
            link.close()

    def _read(self, link: SyncLink) -> None:
        while (response := link.receive()) is not None:
            with self._lock:
                self._core.received(response, now_ms=self._clock.now_ms())
                if not self._core.leaving:
                    self._endpoints.mark_healthy()
                self._wake_driver()
