"""Passes the calls of any thread to the client's session, and waits for their answers.

No method takes a lock of Python code. So each may be interrupted at any instruction (Ctrl-C, or another
exception that a signal handler raises), and a signal handler may call it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from redfence._clock import Clock
from redfence._config import Timeouts
from redfence._core.callbacks import LeaseWatch
from redfence._core.calls import AcquireCall
from redfence._core.endpoints import Endpoints
from redfence._core.lease import LeaseCore
from redfence._core.owner import Owner
from redfence._core.session import SessionCore
from redfence._defaults import with_holder
from redfence._errors import ClosedError, RedfenceError, UnavailableError
from redfence._messages.requests import AcquireOrder
from redfence._threads.answer import Answer
from redfence._threads.callbacks import CallbackRunner
from redfence._threads.driver import Command, SessionDriver
from redfence._tracing import client_span
from redfence._transport.links import Method, SyncConnector, SyncLink

T = TypeVar("T")


class SyncSession:
    """Holds the caller's side of one client.

    Attributes:
        owner: the process that uses the client.
        address_count: how many servers the client knows.
        callbacks: runs the callbacks of its leases.
    """

    def __init__(
        self,
        core: SessionCore,
        *,
        endpoints: Endpoints,
        connector: SyncConnector,
        timeouts: Timeouts,
        clock: Clock,
    ) -> None:
        self._driver = SessionDriver(
            core, endpoints=endpoints, connector=connector, timeouts=timeouts, clock=clock
        )
        self.address_count = len(endpoints)
        self._timeouts = timeouts
        self._clock = clock
        self.owner = Owner()
        self.callbacks = CallbackRunner()
        self._closed = False

    def __del__(self) -> None:
        """Warn if the client was used and not closed; release its leases and end its threads."""
        if self.owner.is_this_process and not self._closed:
            self._driver.abandon()
            warnings.warn(
                "a redfence client was not closed; use `with Client(...)`", ResourceWarning, 2, self
            )

    def now_ms(self) -> float:
        """Return the present instant in milliseconds."""
        return self._clock.now_ms()

    def acquire(self, order: AcquireOrder, hold: Callable[[LeaseCore], T]) -> T:
        """Acquire a lease and return `hold(lease)`; if the caller is interrupted, the client releases it."""
        with client_span("acquire", order.resource) as traceparent:
            return self._acquire(replace(with_holder(order), traceparent=traceparent), hold)

    def _acquire(self, order: AcquireOrder, hold: Callable[[LeaseCore], T]) -> T:
        answer: Answer[LeaseCore] = Answer()
        call: AcquireCall | None = None

        def start(core: SessionCore, now_ms: float) -> None:
            nonlocal call
            call = core.acquire(order, answer, now_ms=now_ms)

        def give_up(core: SessionCore, now_ms: float) -> None:
            if call is not None:
                core.abandon(call, now_ms=now_ms)

        self.owner.claim()
        try:
            self._run(start, answer)
            return hold(answer.result())
        except BaseException:
            # After an error of the session this does nothing.
            self._driver.run(give_up)
            raise

    def watch(self, watch: LeaseWatch) -> None:
        """Start a watch in the session's thread, which changes the leases."""
        self._driver.run(lambda _core, _now_ms: watch.start())

    def release(self, lease: LeaseCore) -> bool:
        """Release a lease; return whether it was still held."""
        with client_span("release", lease.resource) as traceparent:
            answer: Answer[bool] = Answer()
            self._release(lease, answer, traceparent=traceparent)
            return self._driver.is_own_thread or answer.result()

    def release_soon(self, lease: LeaseCore, holder: object = None) -> None:
        """Release a lease without waiting for the answer; does nothing if the client is closed.

        The command keeps `holder`, the lease object, so that the session can still tell it of a loss.
        """
        with client_span("release", lease.resource) as traceparent, suppress(ClosedError):
            self._release(lease, Answer(), holder, traceparent=traceparent)

    def release_dropped(self, lease: LeaseCore) -> None:
        """Release a lease that was garbage-collected, without waiting for the answer.

        The release makes no span: the code that the collector interrupted did not ask for it.
        """
        with suppress(ClosedError):
            self._release(lease, Answer())

    def _release(
        self, lease: LeaseCore, answer: Answer[bool], holder: object = None, *, traceparent: str = ""
    ) -> None:
        def start(core: SessionCore, now_ms: float, _keep: object = holder) -> None:
            core.check_open()
            core.release(lease, answer, now_ms=now_ms, traceparent=traceparent)

        self._run(start, answer, waits=False)

    def waiting_lease_id(self, resource: str) -> str:
        """Return the lease id of the first acquire that waits at the server for a resource, or ""."""
        answer: Answer[str] = Answer()

        def look(core: SessionCore, _now_ms: float) -> None:
            core.check_open()
            answer.set_result(core.waiting_lease_id(resource))

        self._run(look, answer)
        return answer.result()

    def call(self, method: Method, request: Any) -> Any:
        """Make a unary call on the present link; try again on a new link at most once per address."""
        for _ in range(self.address_count + 1):
            link = self.usable_link()
            if link is None:
                continue  # the link came up and broke before this line ran
            try:
                return link.call(method, request, timeout_ms=self._timeouts.rpc_timeout_ms)
            except UnavailableError as error:
                if error.error_reason:
                    raise
                # The transport failed, not the server.
                link.abort()
        reason: Answer[RedfenceError] = Answer()
        self._run(lambda core, _now_ms: reason.set_result(core.unusable()), reason)
        raise reason.result()

    def usable_link(self) -> SyncLink | None:
        """Wait until a link is up and return it; None if it broke at once.

        Raises:
            UnavailableError: no server was reachable within the rpc timeout.
        """
        answer: Answer[None] = Answer()
        self._run(lambda core, now_ms: core.await_link(answer, now_ms=now_ms), answer)
        answer.result()
        return self._driver.link

    def close(self) -> None:
        """Release every lease and end the threads, within the close timeout."""
        if self._driver.is_own_thread:
            self._driver.abandon()
        elif not self.owner.is_parent:  # in a child process the leases are the parent's
            self._driver.close()
        # Last, so that `__del__` ends the threads if Ctrl-C came before.
        self._closed = True

    def _run(self, command: Command, answer: Answer[Any], *, waits: bool = True) -> None:
        """Have the session run a command; if the client is closed, `answer` gets the error.

        Raises:
            RuntimeError: the caller would wait for itself.
        """
        self.owner.claim()
        if waits and self._driver.is_own_thread:
            raise RuntimeError("a finalizer called the client on the client's own thread, which cannot wait")

        def run(core: SessionCore, now_ms: float) -> None:
            try:
                command(core, now_ms)
            except Exception as error:
                answer.set_exception(error)
                if not isinstance(error, ClosedError):
                    raise

        self._driver.run(run)
