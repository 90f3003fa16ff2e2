"""Makes every decision of a client's session, without I/O: what to send, repeat and give up.

A driver owns one link to one server at a time. It reports each event to this core, with the present instant:

- calls: `acquire`, `abandon`, `release`
- the link: `link_up`, `received`, `link_down`, `link_failed`
- time: `tick`

After each event the driver asks what to write (`take_batch`), when to call `tick` (`next_alarm_ms`),
and whether to leave this server (`should_leave`). The core is not thread-safe and never blocks.

The parts are `acquires`, `held_leases`, `releases`, `link_state`, `probe` (is a silent server alive?)
and `outbox` (the order of sending).

When a stream breaks, the client repeats acquires and releases on the next stream. It does not repeat a
renewal. That renewal counts as failed, and the lease schedules the next one.
"""

from __future__ import annotations

from collections.abc import Collection

from redfence._config import Timeouts
from redfence._core.acquires import Acquires
from redfence._core.alarms import Alarms
from redfence._core.calls import (
    AcquireCall,
    ProbeCall,
    ReleaseCall,
    RenewCall,
    Timed,
    Waiter,
)
from redfence._core.held_leases import HeldLeases
from redfence._core.lease import LeaseCore
from redfence._core.link_state import LinkState
from redfence._core.link_waiters import LinkWaiters
from redfence._core.outbox import Outbox
from redfence._core.probe import Probe
from redfence._core.releases import Releases
from redfence._errors import AccessDeniedError, ClosedError, LossReason, RedfenceError, WrongServiceError
from redfence._messages import requests
from redfence._messages.requests import AcquireOrder
from redfence._randomness import Randomness
from redfence_proto.v1 import lock_pb2


class SessionCore:
    """Holds the state of one client: its leases, its pending calls and its link.

    Attributes:
        unusable: as `LinkState.unusable`.
    """

    def __init__(self, *, timeouts: Timeouts, randomness: Randomness, address_count: int) -> None:
        self._alarms: Alarms[Timed] = Alarms()
        self._outbox = Outbox()
        self._link = LinkState(address_count=address_count)
        self.unusable = self._link.unusable
        self._probe = Probe(outbox=self._outbox, link=self._link, timeouts=timeouts)
        self._link_waiters = LinkWaiters(
            alarms=self._alarms, link=self._link, rpc_timeout_ms=timeouts.rpc_timeout_ms
        )
        self._releases = Releases(
            outbox=self._outbox, alarms=self._alarms, link=self._link, timeouts=timeouts
        )
        self._leases = HeldLeases(
            outbox=self._outbox, alarms=self._alarms, link=self._link, releases=self._releases
        )
        self._acquires = Acquires(
            outbox=self._outbox,
            alarms=self._alarms,
            link=self._link,
            releases=self._releases,
            timeouts=timeouts,
            randomness=randomness,
            hold=self._leases.add,
        )
        self._closed = False

    # Calls.

    def acquire(self, order: AcquireOrder, waiter: Waiter, *, now_ms: float) -> AcquireCall:
        """Start an acquire; `waiter` gets the LeaseCore or the error."""
        self.check_open()
        return self._acquires.start(order, waiter, now_ms=now_ms)

    def abandon(self, call: AcquireCall, *, now_ms: float) -> None:
        """Give up an acquire, and release anything that was or will be granted for it."""
        if self._closed:
            return  # `close` has given up every acquire
        if call.lease is not None:
            # The grant and the caller's cancellation came at the same moment.
            self.release(call.lease, None, now_ms=now_ms, traceparent=call.order.traceparent)
        else:
            self._acquires.give_up(call, now_ms=now_ms)

    def release(
        self, lease: LeaseCore, waiter: Waiter | None, *, now_ms: float, traceparent: str = ""
    ) -> None:
        """Release a lease in the caller's span; `waiter` gets whether it was still held, or the error."""
        self._leases.end(lease, LossReason.RELEASED, waiter, now_ms, traceparent=traceparent)

    def await_link(self, waiter: Waiter, *, now_ms: float) -> None:
        """Resolve `waiter` when a link is up, or fail it after the rpc timeout."""
        self.check_open()
        self._link_waiters.add(waiter, now_ms=now_ms)

    def check_open(self) -> None:
        """Raise ClosedError if the client is closed."""
        if self._closed:
            raise ClosedError("the client is closed; create a new one")

    def close(self, waiter: Waiter, *, now_ms: float) -> None:
        """End every call and lease; `waiter` is resolved when every release was answered or failed."""
        if self._closed:
            self._releases.when_idle(waiter)
            return
        self._closed = True
        # Closing waits only for releases, and they have their own timeout.
        self._probe.close()
        error = ClosedError("the client was closed during the call")
        self._acquires.give_up_all(error, now_ms=now_ms)
        self._link_waiters.settle(error)
        self._leases.close(now_ms)
        self._releases.when_idle(waiter)

    def stop(self) -> None:
        """Fail the releases that closing could not finish in time; after this no caller waits."""
        self._releases.stop()

    def waiting_lease_id(self, resource: str) -> str:
        """Return the lease id of the first acquire that waits at the server for a resource, or ""."""
        return self._outbox.waiting_lease_id(resource)

    # Questions of the driver.

    @property
    def wants_link(self) -> bool:
        """Whether a lease or a call needs a server."""
        return bool(
            self._releases.pending or self._leases or self._link_waiters or self._outbox.has_queued_acquires
        )

    @property
    def has_output(self) -> bool:
        """Whether `take_batch` may return a message."""
        return self._link.takes_commands and self._outbox.has_queued

    @property
    def leaving(self) -> bool:
        """Whether the client is leaving this link, so that it takes no more commands."""
        return self._link.leaving

    def next_alarm_ms(self) -> float:
        """Return when to call `tick`; infinite if there is no alarm."""
        return min(self._alarms.next_at_ms(), self._link.next_alarm_ms(), self._probe.next_alarm_ms())

    def should_leave(self, now_ms: float) -> bool:
        """Return whether to end this link now and connect to the next address."""
        return self._link.leaving and (self._link.must_leave(now_ms) or not self._outbox.has_unanswered)

    def take_batch(self, now_ms: float) -> lock_pb2.SessionRequest | None:
        """Return one message with the commands to write now, or None. The driver writes it at once.

        Validity counts from `now_ms`, which the driver reads before it writes the message.
        """
        if not self.has_output:
            return None
        batch = self._outbox.take_batch(now_ms)
        self._probe.waits_changed(now_ms)
        return batch

    # Events of the link.

    def link_up(self, *, now_ms: float) -> None:
        """Start using a new stream: resolve the callers that wait for a link, and send queued calls."""
        self._link.opened(now_ms)
        self._link_waiters.settle(None)
        self._acquires.link_changed(now_ms)
        self._leases.renew_all_soon(now_ms)

    def link_failed(
        self,
        error: RedfenceError,
        *,
        now_ms: float,
        refused: Collection[AcquireCall] = (),
        is_full: bool = False,
    ) -> None:
        """Record that a connection failed; fail the waiting calls if every later one will fail, too.

        `is_full`: the server has no room for a stream of this client.
        """
        self._link.last_error = error
        if error.error_reason == "TOO_MANY_COMMANDS" and error.metadata.get("limit", "").isdecimal():
            self._outbox.limit(int(error.metadata["limit"]))
        wrong = (is_full or isinstance(error, WrongServiceError)) and self._link.address_count == 1
        if wrong or isinstance(error, AccessDeniedError | ClosedError):
            # Waiting does not help against wrong credentials, nor if a fork has broken gRPC.
            self._acquires.refuse_queued(error, refused=refused, now_ms=now_ms)
            self._link_waiters.settle(error)

    def link_down(self, error: RedfenceError | None, *, now_ms: float) -> None:
        """Queue again the calls of a stream that has ended; `error` is None if this client ended it."""
        # The next stream has a new token, if there is one; if not, the server refuses it at once.
        expired = error is not None and error.error_reason == "UNAUTHENTICATED" and self._link.replied
        is_full = (
            error is not None and error.error_reason == "TOO_MANY_BUFFERED_BYTES" and not self._link.replied
        )
        self._link.closed(now_ms)
        self._probe.end()
        acquires: list[AcquireCall] = []
        for call in self._outbox.take_lost():
            if isinstance(call, AcquireCall):
                acquires.append(call)
            elif isinstance(call, ReleaseCall):
                self._outbox.put_first(call)
            elif isinstance(call, RenewCall):
                self._leases.renewal_lost(call, now_ms=now_ms)
        self._acquires.link_lost(acquires, now_ms=now_ms)
        if error is not None and not expired:
            self.link_failed(error, now_ms=now_ms, refused=acquires, is_full=is_full)

    def received(self, response: lock_pb2.SessionResponse, *, now_ms: float) -> None:
        """Process a message of the server: give each result to its call."""
        self._link.observe_reply(now_ms)
        for result in response.results:
            call = self._outbox.take_answered(result.id)
            if type(call) is AcquireCall:
                self._acquires.answered(call, result, now_ms=now_ms)
            elif type(call) is ReleaseCall:
                self._releases.answered(call, result, now_ms=now_ms)
            elif type(call) is RenewCall:
                self._leases.renew_answered(call, result, now_ms=now_ms)
            elif type(call) is ProbeCall:
                self._probe.answered()
        self._probe.waits_changed(now_ms)
        if response.HasField("draining"):
            self._link.leave_after_answers(now_ms, grace_ms=requests.duration_ms(response.draining.grace))

    def tick(self, now_ms: float) -> None:
        """Handle every alarm that is due: renew leases, end expired ones, fail unanswered calls."""
        self._link.on_timer(now_ms)
        self._probe.on_timer(now_ms)
        for item in self._alarms.take_due(now_ms):
            if isinstance(item, LeaseCore):
                self._leases.due(item, now_ms)
            elif isinstance(item, AcquireCall):
                self._acquires.overdue(item, now_ms=now_ms)
            elif isinstance(item, ReleaseCall):
                self._releases.overdue(item, now_ms=now_ms)
            else:
                self._link_waiters.overdue(item)
