"""Every decision of a client's session, without I/O: which commands to send, what an answer means, what to repeat.

A driver owns a link to one server at a time and tells this core what happens, with the present instant: callers' wishes
(`acquire`, `abandon`, `release`), the link (`link_up`, `received`, `link_down`, `link_failed`) and the passing of time
(`tick`). After each it asks what to write (`take_batch`), when to come back (`next_alarm_ms`), and whether to
leave this server (`should_leave`). The core is not thread-safe and never blocks.

The parts: `acquires`, `held_leases`, `releases` (and what must end before closing), `link_state` (the link's coming and going),
`probe` (whether a silent server is there) and `outbox` (the order of what is sent).

When a stream breaks, acquires and releases are repeated on the next one. A renewal is not, but counts as failed; its lease
asks again by itself.
"""

from __future__ import annotations

from redfence._config import ClientOptions
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
from redfence._errors import AccessDeniedError, ClosedError, LossReason, RedfenceError
from redfence._messages import requests
from redfence._messages.requests import AcquireOrder
from redfence._randomness import Randomness
from redfence_proto.v1 import lock_pb2


class SessionCore:
    """The state of one client: its leases, its calls under way, and its link."""

    def __init__(self, *, options: ClientOptions, randomness: Randomness, address_count: int) -> None:
        self._alarms: Alarms[Timed] = Alarms()
        self._outbox = Outbox()
        self._link = LinkState(address_count=address_count)
        self._probe = Probe(outbox=self._outbox, link=self._link, options=options)
        self._link_waiters = LinkWaiters(
            alarms=self._alarms, link=self._link, rpc_timeout_ms=options.rpc_timeout_ms
        )
        self._releases = Releases(outbox=self._outbox, alarms=self._alarms, link=self._link, options=options)
        self._leases = HeldLeases(
            outbox=self._outbox, alarms=self._alarms, link=self._link, releases=self._releases
        )
        self._acquires = Acquires(
            outbox=self._outbox,
            alarms=self._alarms,
            link=self._link,
            releases=self._releases,
            options=options,
            randomness=randomness,
            hold=self._leases.add,
        )
        self._closed = False

    # What callers want.

    def acquire(self, order: AcquireOrder, waiter: Waiter, *, now_ms: float) -> AcquireCall:
        """Start an acquisition; `waiter` gets the LeaseCore or the error."""
        self.check_open()
        return self._acquires.start(order, waiter, now_ms=now_ms)

    def abandon(self, call: AcquireCall, *, now_ms: float) -> None:
        """Give up an acquisition: whatever was or will be granted for it is released."""
        if self._closed:
            return  # closing has seen to it
        if call.lease is not None:
            # It was granted in the very moment in which its caller was cancelled.
            self.release(call.lease, None, now_ms=now_ms)
        else:
            self._acquires.give_up(call, now_ms=now_ms)

    def release(self, lease: LeaseCore, waiter: Waiter | None, *, now_ms: float) -> None:
        """End a lease; `waiter` gets whether it was still held, or the error."""
        self._leases.end(lease, LossReason.RELEASED, waiter, now_ms)

    def await_link(self, waiter: Waiter, *, now_ms: float) -> None:
        """Resolve `waiter` as soon as a server is reachable, or fail it after the rpc timeout."""
        self.check_open()
        self._link_waiters.add(waiter, now_ms=now_ms)

    def check_open(self) -> None:
        """Raise ClosedError if the client was closed."""
        if self._closed:
            raise ClosedError("the client is closed; make a new one")

    def close(self, waiter: Waiter, *, now_ms: float) -> None:
        """Give up every call and lease; `waiter` is resolved when all releases were answered or given up."""
        self._closed = True
        # What closing still waits for has bounds of its own.
        self._probe.close()
        error = ClosedError("the client was closed during the call")
        self._acquires.give_up_all(error, now_ms=now_ms)
        self._link_waiters.settle(error)
        for lease in self._leases:
            self._leases.end(lease, LossReason.CLIENT_CLOSED, None, now_ms)
        self._releases.when_idle(waiter)

    def stop(self) -> None:
        """Give up what closing could not end in time: after this nobody waits any more and no alarm rings."""
        self._releases.stop()

    def waiting_lease_id(self, resource: str) -> str:
        """Return the secret of this client's first acquire that waits for a resource at the server; "" if none does."""
        return self._outbox.waiting_lease_id(resource)

    # What the driver asks.

    @property
    def wants_link(self) -> bool:
        """Whether there is anything to do that needs a server."""
        return bool(
            self._releases.pending or self._leases or self._link_waiters or self._outbox.has_queued_acquires
        )

    @property
    def has_output(self) -> bool:
        """Whether `take_batch` may have something to write."""
        return self._link.takes_commands and self._outbox.has_queued

    @property
    def leaving(self) -> bool:
        """Whether this link takes no more commands."""
        return self._link.leaving

    def next_alarm_ms(self) -> float:
        """Return when `tick` has to be called; infinite if never."""
        return min(self._alarms.next_at_ms(), self._link.next_alarm_ms(), self._probe.next_alarm_ms())

    def should_leave(self, now_ms: float) -> bool:
        """Whether to end this link and go on at another address."""
        return self._link.leaving and (self._link.must_leave(now_ms) or not self._outbox.has_unanswered)

    def take_batch(self, now_ms: float) -> lock_pb2.SessionRequest | None:
        """Return the commands to write now, in one message; None if there are none. Write it at once.

        The instants from which validity counts are taken here, before the sending.
        """
        if not self.has_output:
            return None
        batch = self._outbox.take_batch(now_ms)
        self._probe.waits_changed(now_ms)
        return batch

    # What happens to the link.

    def link_up(self, *, now_ms: float) -> None:
        """A stream to a server is open."""
        self._link.opened(now_ms)
        self._link_waiters.settle(None)
        self._acquires.link_changed(now_ms)
        self._leases.renew_all_soon(now_ms)

    def link_failed(self, error: RedfenceError) -> None:
        """An address could not be reached, or refused us."""
        self._link.last_error = error
        if error.error_reason == "TOO_MANY_COMMANDS" and error.metadata.get("limit", "").isdecimal():
            self._outbox.limit(int(error.metadata["limit"]))
        if isinstance(error, AccessDeniedError):
            # No patience helps against wrong credentials.
            self._acquires.refuse_queued(error)
            self._link_waiters.settle(error)

    def link_down(self, error: RedfenceError | None, *, now_ms: float) -> None:
        """The stream is gone, with whatever was unanswered on it; no error means that we left."""
        self._link.closed()
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
        if error is not None:
            self.link_failed(error)

    def received(self, response: lock_pb2.SessionResponse, *, now_ms: float) -> None:
        """The server answered."""
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
        """Time has passed: renew what is due, end what has expired, give up what was not answered."""
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
