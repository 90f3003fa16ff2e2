"""The acquisitions of a client, from the caller's word to grant, refusal or abandonment. No I/O.

When a stream breaks, an acquire is sent again with the same lease id: if it was granted and only the answer was lost, the same
grant comes back.

Whoever gives up on an acquire, because the caller was cancelled or no answer came in time, sends a Release for its lease
id. It is sent *after* the acquire was answered, or can no longer be: commands are carried out concurrently, and a Release
that overtakes its Acquire releases nothing. This cleaning up does not belong to the caller, so it survives the caller's
cancellation; it is bounded by the rpc timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from redfence._config import ClientOptions
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

# How often an acquire is tried that waits in this client, because as many wait at the server as may: its lock may be free,
# and those before it may wait for ever for others. Each try costs the nodes a mint.
TRY_INTERVAL_MS = 5_000


class Acquires:
    """The acquires that are queued or under way.

    Args:
        outbox: where they queue.
        alarms: when to see to them.
        link: where they go.
        releases: what cleans up after them.
        options: how long to wait for whom.
        randomness: where lease ids come from.
        hold: takes each lease that was granted, before its caller does.
    """

    def __init__(
        self,
        *,
        outbox: Outbox,
        alarms: Alarms[Timed],
        link: LinkState,
        releases: Releases,
        options: ClientOptions,
        randomness: Randomness,
        hold: Callable[[LeaseCore], None],
    ) -> None:
        self._outbox = outbox
        self._alarms = alarms
        self._link = link
        self._releases = releases
        self._options = options
        self._randomness = randomness
        self._hold = hold
        self._numbers = count(1)

    def start(self, order: AcquireOrder, waiter: Waiter, *, now_ms: float) -> AcquireCall:
        """Start an acquisition; `waiter` gets the LeaseCore or the error."""
        call = AcquireCall(order, self._randomness.lease_id(), waiter, now_ms, next(self._numbers))
        self._queue(call, now_ms)
        return call

    def give_up(self, call: AcquireCall, *, now_ms: float) -> None:
        """End an acquisition for its caller; whatever was or will be granted for it is released."""
        if call.settled or call.abandoned:
            return
        call.abandoned = True
        if call.command_id:
            # Under way: the Release follows its answer.
            self._releases.expect(call)
            self._outbox.put_first(CancelCall(call.command_id))
            self._alarms.set(call, now_ms + self._options.rpc_timeout_ms / 2)
        elif call.times_sent:
            self._clean_up(call, now_ms)
        else:
            self._end(call)

    def give_up_all(self, error: RedfenceError, *, now_ms: float) -> None:
        """End every acquisition with this error."""
        for call in self._outbox.acquires():
            fail(call.waiter, error)
            self.give_up(call, now_ms=now_ms)

    def refuse_queued(self, error: RedfenceError) -> None:
        """End what is not under way: no server takes it."""
        for call in self._outbox.queued_acquires():
            self._end(call)
            fail(call.waiter, error)

    # What happens to the link.

    def link_lost(self, calls: list[AcquireCall], *, now_ms: float) -> None:
        """Queue again what was under way on it."""
        for call in calls:
            if call.abandoned:
                # The server gives it up with the stream; in case it was granted before, release it.
                self._clean_up(call, now_ms)
            else:
                self._outbox.put(call, now_ms=now_ms)
        self.link_changed(now_ms)

    def link_changed(self, now_ms: float) -> None:
        """Measure again how long what is queued may stay so."""
        for call in self._outbox.queued_acquires():
            self._alarms.set(call, self._deadline_ms(call, now_ms))

    # What comes of them.

    def answered(self, call: AcquireCall, result: lock_pb2.SessionResult, *, now_ms: float) -> None:
        """Hand over the lease or the error, clean up, or ask again."""
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
                self._releases.start(call.order.resource, call.lease_id, now_ms=now_ms)
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
        """See to an acquire whose alarm rang: go on, or give it up."""
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
            # It came too late to be worth anything, or nobody waits for it any more.
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
        self._releases.start(call.order.resource, call.lease_id, now_ms=now_ms)
        self._end(call)

    def _end(self, call: AcquireCall) -> None:
        self._outbox.drop(call)
        self._releases.end(call)

    # For how long.

    def _deadline_ms(self, call: AcquireCall, now_ms: float) -> float:
        """Return when to see to a call: a server has the rpc timeout beyond its wait, and so has the search for one."""
        rpc_timeout_ms = self._options.rpc_timeout_ms
        if call.command_id:
            bound_at_ms = call.sent_at_ms + call.requested_wait_ms + rpc_timeout_ms
        elif self._link.up and (wait_ms_left := call.wait_ms_left(now_ms)) > 0:
            return now_ms + min(wait_ms_left, TRY_INTERVAL_MS)
        else:
            bound_at_ms = now_ms + rpc_timeout_ms
        if call.order.wait_ms is None:
            return bound_at_ms
        return min(bound_at_ms, call.started_at_ms + call.order.wait_ms + rpc_timeout_ms)

    def _may_continue(self, call: AcquireCall, now_ms: float) -> bool:
        """Tell whether to go on with a call that was to be seen to now."""
        if not call.command_id and (not self._link.up or self._outbox.try_once(call)):
            return self._link.up
        # It had queued before it was sent, or it still queues to be tried.
        return now_ms < self._deadline_ms(call, now_ms)
