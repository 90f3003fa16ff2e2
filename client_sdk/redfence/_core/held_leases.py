"""Renews the leases that a client holds, and interprets the answers. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from redfence._core.alarms import Alarms
from redfence._core.calls import RenewCall, Timed, Waiter
from redfence._core.lease import LeaseCore, LeaseState
from redfence._core.link_state import LinkState
from redfence._core.outbox import Outbox
from redfence._core.releases import Releases
from redfence._errors import LossReason
from redfence._messages import requests
from redfence_proto.v1 import lock_pb2

_log = logging.getLogger("redfence")


class HeldLeases:
    """Keeps every granted lease until it ends; each lease has one alarm, for its next renewal or its end."""

    def __init__(self, *, outbox: Outbox, alarms: Alarms[Timed], link: LinkState, releases: Releases) -> None:
        self._outbox = outbox
        self._alarms = alarms
        self._link = link
        self._releases = releases
        # The state that each lease's watchers were last told.
        self._leases: dict[LeaseCore, LeaseState] = {}

    def __bool__(self) -> bool:
        """Return whether the client holds a lease."""
        return bool(self._leases)

    def __iter__(self) -> Iterator[LeaseCore]:
        """Iterate over a copy, so that leases may end during the loop."""
        return iter(list(self._leases))

    def add(self, lease: LeaseCore) -> None:
        """Add a granted lease and set its alarm."""
        self._leases[lease] = lease.state
        self._alarms.set(lease, lease.wake_at_ms)

    def end(
        self,
        lease: LeaseCore,
        reason: LossReason,
        waiter: Waiter | None,
        now_ms: float,
        *,
        traceparent: str = "",
    ) -> None:
        """End a lease and release it; `waiter` gets whether the lease was still held, or the error."""
        lease.end(reason, now_ms=now_ms)
        self._settle(lease, now_ms)
        self._releases.start(
            lease.resource, lease.lease_id, now_ms=now_ms, waiter=waiter, traceparent=traceparent
        )

    def close(self, now_ms: float) -> None:
        """End every lease because the client closes; release those whose validity is not over.

        A lease that the clock has ended is lost, even if no alarm told so yet. Its release would open a
        lock that a lock delay keeps closed.
        """
        for lease in self:
            if lease.ended(now_ms) is None:
                self.end(lease, LossReason.CLIENT_CLOSED, None, now_ms)
            else:
                self.due(lease, now_ms)

    def renew_all_soon(self, now_ms: float) -> None:
        """Renew at once every lease that is at risk, because a new link is open."""
        for lease in self._leases:
            lease.renew_soon(now_ms)
            self._alarms.set(lease, lease.wake_at_ms)

    def due(self, lease: LeaseCore, now_ms: float) -> None:
        """Renew or end a lease whose alarm is due."""
        unanswered_since_ms = lease.unanswered_since_ms
        if lease.wake(now_ms):
            self._renew(lease, unanswered_since_ms, now_ms)
        self._settle(lease, now_ms)

    def renewal_lost(self, call: RenewCall, *, now_ms: float) -> None:
        """Count a renewal as failed because its stream broke; the lease schedules the next one."""
        call.lease.renewal_failed(sent_at_ms=now_ms, now_ms=now_ms)
        self._settle(call.lease, now_ms)

    def renew_answered(self, call: RenewCall, result: lock_pb2.SessionResult, *, now_ms: float) -> None:
        """Apply the server's answer to the lease; if it failed there, switch to another server."""
        lease, answer = call.lease, result.renew
        if answer.state == lock_pb2.LEASE_STATE_ACTIVE:
            validity_ms = requests.duration_ms(answer.validity)
            lease.renewed(sent_at_ms=call.sent_at_ms, validity_ms=validity_ms, now_ms=now_ms)
        elif answer.state == lock_pb2.LEASE_STATE_LOST:
            was_forced = answer.reason == lock_pb2.LEASE_STATE_REASON_FORCED
            lease.end(LossReason.FORCED if was_forced else LossReason.NOT_HELD, now_ms=now_ms)
        else:
            lease.renewal_failed(sent_at_ms=call.sent_at_ms, now_ms=now_ms)
            self._link.switch_server(now_ms)
        self._settle(lease, now_ms)

    def _renew(self, lease: LeaseCore, unanswered_since_ms: float | None, now_ms: float) -> None:
        """Send a renewal; switch to another server if this one was silent since an earlier renewal."""
        if not self._link.takes_commands:
            lease.renewal_failed(sent_at_ms=now_ms, now_ms=now_ms)
            return
        self._outbox.put_first(RenewCall(lease))
        if unanswered_since_ms is not None and self._link.no_reply_since(unanswered_since_ms):
            # This server may be frozen and another one healthy.
            self._link.switch_server(now_ms)

    def _settle(self, lease: LeaseCore, now_ms: float) -> None:
        """Set the lease's next alarm, or remove it if it has ended; tell its watchers a change of state."""
        told = self._leases.get(lease)
        if lease.ended(now_ms) is None:
            self._leases[lease] = lease.state
            self._alarms.set(lease, lease.wake_at_ms)
        elif told is not None:
            del self._leases[lease]
            self._alarms.clear(lease)
            if lease.state is LeaseState.LOST and lease.loss is not None:
                _log.warning(
                    "lease_lost resource=%r token=%d why=%s", lease.resource, lease.token, lease.loss.value
                )
        if told is not None and told is not lease.state:
            for watcher in list(lease.watchers):
                watcher()
