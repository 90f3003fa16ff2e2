"""Every decision of a client's session, without I/O: which commands to send, what an answer means, what to repeat.

A driver owns a link to one server at a time and tells this core what happens, with the present instant: callers' wishes
(`acquire`, `abandon`, `release`), the link (`link_up`, `received`, `link_down`, `link_failed`) and the passing of time
(`tick`). After each it asks what to write (`take_batch`), when to come back (`next_alarm_ms`), and whether to
leave this server (`should_leave`). The core is not thread-safe and never blocks.

What is repeated when a stream breaks. An acquire, with the same lease id: if it was granted and only the answer was lost,
the same grant comes back. A release: repeating it is harmless. A renewal is not repeated but counts as
failed; its lease asks again by itself.

Whoever gives up on an acquire, because the caller was cancelled or no answer came in time, sends a Release for its lease
id. It is sent *after* the acquire was answered, or can no longer be: commands are carried out concurrently, and a Release
that overtakes its Acquire releases nothing. This cleaning up belongs to the core and not to the caller, so it survives
the caller's cancellation; it is bounded by the rpc timeout.
"""

from __future__ import annotations

import logging
import math
from typing import TypeAlias

from redfence import _requests
from redfence._alarms import Alarms
from redfence._answers import Again, Granted, Refused, read_acquire
from redfence._calls import (
    AcquireCall,
    CancelCall,
    LinkCall,
    ReleaseCall,
    RenewCall,
    Waiter,
)
from redfence._config import ClientOptions
from redfence._errors import (
    AccessDeniedError,
    ClosedError,
    LeaseLostError,
    LossReason,
    OutcomeUnknownError,
    RedfenceError,
    UnavailableError,
    from_wire,
)
from redfence._lease_core import LeaseCore, LeaseState
from redfence._outbox import Outbox
from redfence._randomness import Randomness
from redfence._requests import AcquireOrder
from redfence_proto.v1 import lock_pb2

_log = logging.getLogger("redfence")

# A draining server answers what is under way; it gets no longer than this, for no lease is renewed meanwhile.
DRAIN_MS_MAX = 1000
# A server that seems cut off is left for another one no more often than this, or all of them would be tried in a circle.
LEAVE_INTERVAL_MS = 1000

_Alarmed: TypeAlias = LeaseCore | AcquireCall | ReleaseCall | LinkCall


class SessionCore:
    """The state of one client: its leases, its calls under way, and its link."""

    def __init__(self, *, options: ClientOptions, randomness: Randomness, address_count: int) -> None:
        self._options = options
        self._randomness = randomness
        self._address_count = address_count
        self._alarms: Alarms[_Alarmed] = Alarms()
        self._leases: dict[LeaseCore, None] = {}
        self._outbox = Outbox()
        # What has to end before the client may close: releases, and acquires that were given up under way.
        self._cleanups: dict[ReleaseCall | AcquireCall, None] = {}
        self._link_calls: dict[LinkCall, None] = {}
        self._up = False
        self._heard_at_ms = -math.inf
        self._leave_at_ms = math.inf
        self._leave_rang = False
        self._left_at_ms = -math.inf
        self._last_error: RedfenceError | None = None
        self._closed = False
        self._idle_waiters: list[Waiter] = []

    # What callers want.

    def acquire(self, order: AcquireOrder, waiter: Waiter, *, now_ms: float) -> AcquireCall:
        """Start an acquisition; `waiter` gets the LeaseCore or the error."""
        self.check_open()
        call = AcquireCall(order, self._randomness.lease_id(), waiter, now_ms)
        self._outbox.put(call, now_ms=now_ms)
        self._alarms.set(call, self._look_at_ms(call, now_ms))
        return call

    def abandon(self, call: AcquireCall, *, now_ms: float) -> None:
        """Give up an acquisition: whatever was or will be granted for it is released."""
        if self._closed:
            return  # closing has seen to it
        if call.lease is not None:
            # It was granted in the very moment in which its caller was cancelled.
            self.release(call.lease, None, now_ms=now_ms)
        elif not call.settled and not call.abandoned:
            self._abandon(call, now_ms)

    def release(self, lease: LeaseCore, waiter: Waiter | None, *, now_ms: float) -> None:
        """End a lease; `waiter` gets whether it was still held, or the error."""
        lease.end(LossReason.RELEASED, now_ms=now_ms)
        self._after(lease, now_ms)
        self._queue_release(lease.resource, lease.lease_id, now_ms, waiter)

    def await_link(self, waiter: Waiter, *, now_ms: float) -> None:
        """Resolve `waiter` as soon as a server is reachable, or fail it after the rpc timeout."""
        self.check_open()
        if self._up:
            waiter.set_result(None)
            return
        call = LinkCall(waiter)
        self._link_calls[call] = None
        self._alarms.set(call, now_ms + self._options.rpc_timeout_ms)

    def check_open(self) -> None:
        """Raise ClosedError if the client was closed."""
        if self._closed:
            raise ClosedError("the client is closed; make a new one")

    def close(self, waiter: Waiter, *, now_ms: float) -> None:
        """Give up every call and lease; `waiter` is resolved when all releases were answered or given up."""
        self._closed = True
        self._idle_waiters.append(waiter)
        error = ClosedError("the client was closed during the call")
        for call in self._outbox.acquires():
            if not call.abandoned:
                _fail(call.waiter, error)
                self._abandon(call, now_ms)
        for link_call in list(self._link_calls):
            self._settle_link_call(link_call, error)
        for lease in list(self._leases):
            lease.end(LossReason.CLIENT_CLOSED, now_ms=now_ms)
            self._after(lease, now_ms)
            self._queue_release(lease.resource, lease.lease_id, now_ms)
        self._check_idle()

    def stop(self) -> None:
        """Give up what closing could not end in time: after this nobody waits any more and no alarm rings."""
        for call in list(self._cleanups):
            if isinstance(call, ReleaseCall):
                self._settle_release(call, _stopped(call.resource))
            else:
                self._end(call)

    # What the driver asks.

    @property
    def wants_link(self) -> bool:
        """Whether there is anything to do that needs a server."""
        return bool(self._cleanups or self._leases or self._link_calls or self._outbox.has_queued_acquires)

    @property
    def has_output(self) -> bool:
        """Whether `take_batch` may have something to write."""
        return self._up and not self.leaving and self._outbox.has_queued

    @property
    def leaving(self) -> bool:
        """Whether this link takes no more commands."""
        return self._leave_at_ms < math.inf

    def next_alarm_ms(self) -> float:
        """Return when `tick` has to be called; infinite if never."""
        # The departure rings once. Ringing until the driver has left would keep a driver with threads from leaving:
        # its timer would never let go of the lock (test_the_instant_to_leave_rings_once).
        return min(self._alarms.next_at_ms(), math.inf if self._leave_rang else self._leave_at_ms)

    def should_leave(self, now_ms: float) -> bool:
        """Whether to end this link and go on at another address."""
        return self.leaving and (now_ms >= self._leave_at_ms or not self._outbox.has_unanswered)

    def take_batch(self, now_ms: float) -> lock_pb2.SessionRequest | None:
        """Return the commands to write now, in one message; None if there are none. Write it at once.

        The instants from which validity counts are taken here, before the sending.
        """
        if not self.has_output:
            return None
        return self._outbox.take_batch(now_ms, wait_ms_max=self._options.server_wait_ms_max)

    # What happens to the link.

    def link_up(self, *, now_ms: float) -> None:
        """A stream to a server is open."""
        self._up = True
        self._heard_at_ms = now_ms
        for link_call in list(self._link_calls):
            self._settle_link_call(link_call, None)
        for call in self._outbox.queued_acquires():
            self._alarms.set(call, self._look_at_ms(call, now_ms))
        for lease in self._leases:
            lease.renew_soon(now_ms)
            self._alarms.set(lease, lease.wake_at_ms)

    def link_failed(self, error: RedfenceError) -> None:
        """An address could not be reached, or refused us."""
        self._last_error = error
        if error.error_reason == "TOO_MANY_COMMANDS" and error.metadata.get("limit", "").isdecimal():
            self._outbox.limit(int(error.metadata["limit"]))
        if isinstance(error, AccessDeniedError):
            # No patience helps against wrong credentials.
            for call in self._outbox.queued_acquires():
                self._end(call)
                _fail(call.waiter, error)
            for link_call in list(self._link_calls):
                self._settle_link_call(link_call, error)

    def link_down(self, error: RedfenceError | None, *, now_ms: float) -> None:
        """The stream is gone, with whatever was unanswered on it; no error means that we left."""
        self._up = False
        self._leave_at_ms = math.inf
        self._leave_rang = False
        again: list[AcquireCall] = []
        for call in self._outbox.take_lost():
            if isinstance(call, AcquireCall):
                again.append(call)
            elif isinstance(call, ReleaseCall):
                self._outbox.put_first(call)
            elif isinstance(call, RenewCall):
                call.lease.renewal_failed(sent_at_ms=now_ms, now_ms=now_ms)
                self._after(call.lease, now_ms)
        for acquire in again:
            if acquire.abandoned:
                # The server gives it up with the stream; in case it was granted before, release it.
                self._clean_up(acquire, now_ms)
        self._outbox.put_back([acquire for acquire in again if not acquire.settled], now_ms=now_ms)
        for queued in self._outbox.queued_acquires():
            self._alarms.set(queued, self._look_at_ms(queued, now_ms))
        if error is not None:
            self.link_failed(error)
        self._check_idle()

    def received(self, response: lock_pb2.SessionResponse, *, now_ms: float) -> None:
        """The server answered."""
        self._heard_at_ms = now_ms
        for result in response.results:
            call = self._outbox.take_answered(result.id)
            if type(call) is AcquireCall:
                self._acquire_answered(call, result, now_ms)
            elif type(call) is ReleaseCall:
                self._release_answered(call, result, now_ms)
            elif type(call) is RenewCall:
                self._renew_answered(call, result, now_ms)
        if response.HasField("draining"):
            grace_ms = _requests.duration_ms(response.draining.grace)
            self._leave_by(now_ms + min(grace_ms, DRAIN_MS_MAX))

    def tick(self, now_ms: float) -> None:
        """Time has passed: renew what is due, end what has expired, give up what was not answered."""
        self._leave_rang = now_ms >= self._leave_at_ms
        for item in self._alarms.take_due(now_ms):
            if isinstance(item, LeaseCore):
                if item.wake(now_ms):
                    self._renew(item, now_ms)
                self._after(item, now_ms)
            elif isinstance(item, AcquireCall):
                self._acquire_overdue(item, now_ms)
            elif isinstance(item, ReleaseCall):
                self._leave_silent(now_ms)
                self._settle_release(item, self._no_answer(f"the release of {item.resource!r}", sent=True))
            else:
                self._settle_link_call(item, self._no_answer("the call", sent=False))

    # Acquires.

    def _acquire_answered(self, call: AcquireCall, result: lock_pb2.SessionResult, now_ms: float) -> None:
        answer = read_acquire(call, result, now_ms=now_ms, address_count=self._address_count)
        if call.abandoned or call.settled:
            if not call.settled or isinstance(answer, Granted):
                self._clean_up(call, now_ms)
        elif isinstance(answer, Granted):
            self._granted(call, answer, now_ms)
        elif isinstance(answer, Refused):
            self._end(call)
            if answer.release:
                self._queue_release(call.order.resource, call.lease_id, now_ms)
            _fail(call.waiter, answer.error)
        else:
            self._outbox.put(call, now_ms=now_ms)
            self._alarms.set(call, self._look_at_ms(call, now_ms))
            if answer is Again.AFTER_LINK:
                self._leave_by(now_ms + DRAIN_MS_MAX)
            elif answer is Again.ELSEWHERE:
                call.refusals += 1
                self._leave_unfit(now_ms)

    def _granted(self, call: AcquireCall, grant: Granted, now_ms: float) -> None:
        lease = LeaseCore(
            resource=call.order.resource,
            lease_id=call.lease_id,
            token=grant.token,
            ttl_ms=call.order.ttl_ms,
            sent_at_ms=call.sent_at_ms,
            validity_ms=grant.validity_ms,
            now_ms=now_ms,
            max_hold_ms=call.order.max_hold_ms,
            fraction=self._randomness.fraction,
        )
        reason = lease.ended(now_ms)
        if reason or call.waiter.done():
            # It came too late to be worth anything, or nobody waits for it any more.
            self._clean_up(call, now_ms)
            _fail(
                call.waiter,
                LeaseLostError(resource=lease.resource, token=lease.token, reason=LossReason.EXPIRED),
            )
            return
        self._end(call)
        call.lease = lease
        self._leases[lease] = None
        self._alarms.set(lease, lease.wake_at_ms)
        call.waiter.set_result(lease)

    def _acquire_overdue(self, call: AcquireCall, now_ms: float) -> None:
        if not call.abandoned and self._is_in_time(call, now_ms):
            self._alarms.set(call, self._look_at_ms(call, now_ms))
            return
        if call.command_id:
            self._leave_silent(now_ms)
            if not call.abandoned:
                self._outbox.put_first(CancelCall(call.command_id))
        sent = call.times_sent > 0
        if sent:
            self._clean_up(call, now_ms)
        else:
            self._end(call)
        if not call.abandoned:
            _fail(call.waiter, self._no_answer(f"the acquire of {call.order.resource!r}", sent=sent))

    def _abandon(self, call: AcquireCall, now_ms: float) -> None:
        call.abandoned = True
        if call.command_id:
            # Under way: the Release follows its answer.
            self._cleanups[call] = None
            self._outbox.put_first(CancelCall(call.command_id))
            self._alarms.set(call, now_ms + self._options.rpc_timeout_ms / 2)
        elif call.times_sent:
            self._clean_up(call, now_ms)
        else:
            self._end(call)

    def _clean_up(self, call: AcquireCall, now_ms: float) -> None:
        self._queue_release(call.order.resource, call.lease_id, now_ms)
        self._end(call)

    def _end(self, call: AcquireCall | ReleaseCall) -> None:
        call.settled = True
        if isinstance(call, AcquireCall):
            self._outbox.drop(call)
        self._alarms.clear(call)
        if self._cleanups.pop(call, call) is None:
            self._check_idle()

    def _look_at_ms(self, call: AcquireCall, now_ms: float) -> float:
        """Return when to see to a call: a server has the rpc timeout beyond its wait, and so has the search for one."""
        rpc_timeout_ms = self._options.rpc_timeout_ms
        if call.command_id:
            bound_at_ms = call.sent_at_ms + call.asked_ms + rpc_timeout_ms
        elif self._up and (wait_ms_left := call.wait_ms_left(now_ms)) > 0:
            return now_ms + min(wait_ms_left, self._options.server_wait_ms_max)
        else:
            bound_at_ms = now_ms + rpc_timeout_ms
        if call.order.wait_ms is None:
            return bound_at_ms
        return min(bound_at_ms, call.started_at_ms + call.order.wait_ms + rpc_timeout_ms)

    def _is_in_time(self, call: AcquireCall, now_ms: float) -> bool:
        """Tell whether to go on with a call that was to be seen to now."""
        if call.command_id:
            # It had queued before it was sent.
            return now_ms < self._look_at_ms(call, now_ms)
        # It queues behind as many others as wait on the stream. Once its own wait is over, it is tried once.
        return self._up and (call.wait_ms_left(now_ms) > 0 or self._outbox.hurry(call))

    # Releases.

    def _queue_release(
        self, resource: str, lease_id: str, now_ms: float, waiter: Waiter | None = None
    ) -> None:
        call = ReleaseCall(resource, lease_id, waiter)
        self._cleanups[call] = None
        self._outbox.put_first(call)
        self._alarms.set(call, now_ms + self._options.rpc_timeout_ms)

    def _release_answered(self, call: ReleaseCall, result: lock_pb2.SessionResult, now_ms: float) -> None:
        if call.settled:
            return
        if result.WhichOneof("result") == "release":
            self._end(call)
            if call.waiter is not None and not call.waiter.done():
                call.waiter.set_result(result.release.outcome == lock_pb2.RELEASE_OUTCOME_RELEASED)
        elif result.error.reason == lock_pb2.ERROR_REASON_DRAINING:
            self._outbox.put_first(call)
            self._leave_by(now_ms + DRAIN_MS_MAX)
        else:
            self._settle_release(call, from_wire(result.error))

    def _settle_release(self, call: ReleaseCall, error: RedfenceError) -> None:
        self._end(call)
        if call.waiter is None:
            _log.warning("release_failed resource=%r error=%r", call.resource, str(error))
        else:
            _fail(call.waiter, error)

    # Leases.

    def _renew(self, lease: LeaseCore, now_ms: float) -> None:
        if not self._up or self.leaving:
            lease.renewal_failed(sent_at_ms=now_ms, now_ms=now_ms)
            return
        self._outbox.put_first(RenewCall(lease))
        if lease.state is LeaseState.AT_RISK and (lease.asked_at_ms or 0.0) > self._heard_at_ms:
            # Not a word since a renewal was asked for: the server may be frozen, and the next one well.
            self._leave_unfit(now_ms)

    def _renew_answered(self, call: RenewCall, result: lock_pb2.SessionResult, now_ms: float) -> None:
        lease, answer = call.lease, result.renew
        if answer.state == lock_pb2.LEASE_STATE_ACTIVE:
            validity_ms = _requests.duration_ms(answer.validity)
            lease.renewed(sent_at_ms=call.sent_at_ms, validity_ms=validity_ms, now_ms=now_ms)
        elif answer.state == lock_pb2.LEASE_STATE_LOST:
            lease.end(LossReason.NOT_HELD, now_ms=now_ms)
        else:
            lease.renewal_failed(sent_at_ms=call.sent_at_ms, now_ms=now_ms)
            self._leave_unfit(now_ms)
        self._after(lease, now_ms)

    def _after(self, lease: LeaseCore, now_ms: float) -> None:
        if lease.ended(now_ms) is None:
            self._alarms.set(lease, lease.wake_at_ms)
        elif lease in self._leases:
            del self._leases[lease]
            self._alarms.clear(lease)
            if lease.state is LeaseState.LOST and lease.loss is not None:
                _log.warning(
                    "lease_lost resource=%r token=%d why=%s", lease.resource, lease.token, lease.loss.value
                )
                if lease.on_lost is not None:
                    lease.on_lost()

    # The link.

    def _leave_by(self, at_ms: float) -> None:
        self._leave_at_ms = min(self._leave_at_ms, at_ms)

    def _leave_unfit(self, now_ms: float) -> None:
        """Go to another server, if there is one and we did not just come from there."""
        if self._address_count > 1:
            self._leave_silent(now_ms)

    def _leave_silent(self, now_ms: float) -> None:
        """Make a new link, elsewhere if possible: this one carries no answers."""
        if self._up and now_ms - self._left_at_ms >= LEAVE_INTERVAL_MS:
            self._left_at_ms = now_ms
            self._leave_by(now_ms)

    def _settle_link_call(self, call: LinkCall, error: RedfenceError | None) -> None:
        self._alarms.clear(call)
        del self._link_calls[call]
        if error is not None:
            _fail(call.waiter, error)
        elif not call.waiter.done():
            call.waiter.set_result(None)

    def _no_answer(self, what: str, *, sent: bool) -> RedfenceError:
        because = f": {self._last_error}" if self._last_error else ""
        error: RedfenceError
        if sent:
            error = OutcomeUnknownError(f"no answer in time to {what}; it may have taken effect{because}")
        else:
            error = UnavailableError(f"no server could be reached in time for {what}{because}")
        error.__cause__ = self._last_error
        return error

    def _check_idle(self) -> None:
        if not self._cleanups:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)


def _stopped(resource: str) -> RedfenceError:
    return OutcomeUnknownError(
        f"the client was closed before the release of {resource!r} was answered; the lease ends by its ttl at the latest"
    )


def _fail(waiter: Waiter, error: RedfenceError) -> None:
    if not waiter.done():
        waiter.set_exception(error)
