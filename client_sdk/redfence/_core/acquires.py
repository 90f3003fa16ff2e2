"""Runs each acquire of a client from the caller's request to the grant, the refusal or the give-up. No I/O.

When a stream breaks, the client sends the acquire again with the same lease id. If the server had
granted it and only the answer was lost, the same grant comes back.

A client gives up an acquire when its caller is cancelled or when no answer comes in time. It then sends
a Release for the lease id. It sends that Release only after the Acquire was answered, or can no longer
be answered. The server runs commands concurrently, and a Release that overtakes its Acquire releases
nothing.

This cleanup does not belong to the caller, so it survives the caller's cancellation. The rpc timeout
bounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count

from redfence._config import Timeouts
from redfence._core.alarms import Alarms
from redfence._core.answers import Granted, Refused, Retry, read_acquire
from redfence._core.calls import AcquireCall, CancelCall, Timed, Waiter, fail
from redfence._core.lease import LeaseCore
from redfence._core.link_state import LinkState
from redfence._core.outbox import Outbox
from redfence._core.releases import Releases
from redfence._errors import LeaseLostError, LossReason, RedfenceError
from redfence._messages.requests import AcquireOrder
from redfence._randomness import Randomness
from redfence_proto.v1 import lock_pb2

# How often the client tries an acquire that waits in the client because the server's limit on waiters
# is reached. Its lock may be free although the acquires before it wait for ever for other locks. Each
# try costs the nodes a mint.
TRY_INTERVAL_MS = 5_000


class Acquires:
    """Sends, repeats and ends the acquires of one client.

    Args:
        outbox: queues the acquires.
        alarms: wakes each acquire at its deadline.
        link: the connection to the server.
        releases: releases what an abandoned acquire was granted.
        timeouts: the timeouts.
        randomness: makes the lease ids.
        hold: receives each granted lease before its caller does.
    """

    def __init__(
        self,
        *,
        outbox: Outbox,
        alarms: Alarms[Timed],
        link: LinkState,
        releases: Releases,
        timeouts: Timeouts,
        randomness: Randomness,
        hold: Callable[[LeaseCore], None],
    ) -> None:
        self._outbox = outbox
        self._alarms = alarms
        self._link = link
        self._releases = releases
        self._timeouts = timeouts
        self._randomness = randomness
        self._hold = hold
        self._numbers = count(1)

    def start(self, order: AcquireOrder, waiter: Waiter, *, now_ms: float) -> AcquireCall:
        """Queue a new acquire; `waiter` gets the LeaseCore or the error."""
        call = AcquireCall(order, self._randomness.lease_id(), waiter, now_ms, next(self._numbers))
        self._queue(call, now_ms)
        return call

    def give_up(self, call: AcquireCall, *, now_ms: float) -> None:
        """End an acquire for its caller, and release anything that was or will be granted for it."""
        if call.settled or call.abandoned:
            return
        call.abandoned = True
        if call.command_id:
            # The acquire is on the stream, so the Release follows its answer.
            self._releases.expect(call)
            self._outbox.put_first(CancelCall(call.command_id))
            self._alarms.set(call, now_ms + self._timeouts.rpc_timeout_ms / 2)
        elif call.times_sent:
            self._clean_up(call, now_ms)
        else:
            self._end(call)

    def give_up_all(self, error: RedfenceError, *, now_ms: float) -> None:
        """Fail every acquire with this error, cancel it at the server, and release any grant."""
        for call in self._outbox.acquires():
            fail(call.waiter, error)
            self.give_up(call, now_ms=now_ms)

    def refuse_queued(self, error: RedfenceError, *, refused: Collection[AcquireCall], now_ms: float) -> None:
        """Fail every acquire that is still queued, because no server accepts it.

        The server that refused the stream ran none of the `refused` calls. An earlier server may have
        granted a call that was sent before.
        """
        for call in list(self._outbox.queued_acquires()):
            if call.times_sent > (1 if call in refused else 0):
                self._clean_up(call, now_ms)
            else:
                self._end(call)
            fail(call.waiter, error)

    # Events of the link.

    def link_lost(self, calls: list[AcquireCall], *, now_ms: float) -> None:
        """Queue again the acquires that were on the lost link."""
        for call in calls:
            if call.abandoned:
                # The server drops the acquire with the stream. Release it in case it was granted before.
                self._clean_up(call, now_ms)
            else:
                self._outbox.put(call, now_ms=now_ms)
        self.link_changed(now_ms)

    def link_changed(self, now_ms: float) -> None:
        """Set new deadlines for all queued acquires."""
        for call in self._outbox.queued_acquires():
            self._alarms.set(call, self._deadline_ms(call, now_ms))

    # Results.

    def answered(self, call: AcquireCall, result: lock_pb2.SessionResult, *, now_ms: float) -> None:
        """Process the server's answer: resolve the caller, clean up, or queue the acquire again."""
        answer = read_acquire(
            call,
            result,
            now_ms=now_ms,
            address_count=self._link.address_count,
            others_wait=self._outbox.has_waits_in_flight,
        )
        if call.abandoned or call.settled:
            if not call.settled or isinstance(answer, Granted):
                self._clean_up(call, now_ms)
        elif isinstance(answer, Granted):
            self._granted(call, answer, now_ms)
        elif isinstance(answer, Refused):
            self._end(call)
            if answer.release:
                self._release(call, now_ms)
            fail(call.waiter, answer.error)
        else:
            self._queue(call, now_ms)
            if answer is Retry.NEXT_LINK:
                self._link.leave_after_answers(now_ms)
            elif answer is Retry.OTHER_SERVER:
                call.refusals += 1
                self._link.switch_server(now_ms)
            elif answer is Retry.AFTER_ANOTHER_WAIT:
                self._outbox.limit_waits()

    def overdue(self, call: AcquireCall, *, now_ms: float) -> None:
        """Continue an acquire whose alarm is due, or fail it when its time is over."""
        if not call.abandoned and self._may_continue(call, now_ms):
            self._alarms.set(call, self._deadline_ms(call, now_ms))
            return
        if call.command_id:
            self._link.reconnect(now_ms)
            if not call.abandoned:
                self._outbox.put_first(CancelCall(call.command_id))
        sent = call.times_sent > 0
        if sent:
            self._clean_up(call, now_ms)
        else:
            self._end(call)
        if not call.abandoned:
            fail(call.waiter, self._link.no_answer(f"the acquire of {call.order.resource!r}", sent=sent))

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
        if lease.ended(now_ms) or call.waiter.done():
            # The grant came too late to leave any validity, or its caller is gone.
            self._clean_up(call, now_ms)
            fail(
                call.waiter,
                LeaseLostError(resource=lease.resource, token=lease.token, reason=LossReason.EXPIRED),
            )
            return
        self._end(call)
        call.lease = lease
        self._hold(lease)
        call.waiter.set_result(lease)

    def _queue(self, call: AcquireCall, now_ms: float) -> None:
        self._outbox.put(call, now_ms=now_ms)
        self._alarms.set(call, self._deadline_ms(call, now_ms))

    def _clean_up(self, call: AcquireCall, now_ms: float) -> None:
        self._release(call, now_ms)
        self._end(call)

    def _release(self, call: AcquireCall, now_ms: float) -> None:
        order = call.order
        self._releases.start(order.resource, call.lease_id, now_ms=now_ms, traceparent=order.traceparent)

    def _end(self, call: AcquireCall) -> None:
        self._outbox.drop(call)
        self._releases.end(call)

    # Deadlines.

    def _deadline_ms(self, call: AcquireCall, now_ms: float) -> float:
        """Return when to check a call next: at the latest one rpc timeout after the end of its wait."""
        rpc_timeout_ms = self._timeouts.rpc_timeout_ms
        if call.command_id:
            bound_at_ms = call.sent_at_ms + call.requested_wait_ms + rpc_timeout_ms
        elif self._link.up and (wait_ms_left := call.wait_ms_left(now_ms)) > 0:
            return now_ms + min(wait_ms_left, TRY_INTERVAL_MS)
        else:
            bound_at_ms = max(call.started_at_ms, self._link.lost_at_ms) + rpc_timeout_ms
        if call.order.wait_ms is None:
            return bound_at_ms
        return min(bound_at_ms, call.started_at_ms + call.order.wait_ms + rpc_timeout_ms)

    def _may_continue(self, call: AcquireCall, now_ms: float) -> bool:
        """Return whether a call whose alarm is due may still continue."""
        if not call.command_id and (not self._link.up or self._outbox.try_once(call)):
            return self._link.up
        # The call was queued before it was sent, or it is still queued for a single try.
        return now_ms < self._deadline_ms(call, now_ms)
