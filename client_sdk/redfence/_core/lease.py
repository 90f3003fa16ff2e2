"""Decides when to renew one lease and when it is lost. Pure: each method gets the event and the time.

Safety: this module may report a held lease as lost. It must never report a lease as held that another
client may already hold. So:

- The client computes its own deadline. It counts from just *before* it sent the request, on a clock
  that does not stop in suspend. The answer may be slow, but no server can grant a request before the
  client sends it.
- No answer extends a lease after its deadline. An answer that arrives later finds the lease LOST. LOST
  is final: a holder that was told to stop is never told to continue.
- Answers may arrive late and out of order. Each answer proves one instant, `sent + validity`. The
  deadline is the latest proven instant. A late success cannot shorten it. A late failure says nothing
  about a later renewal.
- A timer proves nothing. Timers only wake the driver. Each use of the lease compares the clock with the
  deadline (`ended`).

Renewal: a renewal is due after each third of the ttl, so two renewals may fail in a row. Jitter makes
it a little earlier, so that leases acquired together are not renewed together for ever. A renewal that
fails, or that gets no answer, puts the lease AT_RISK. The client repeats it with growing pauses while
the lease is valid. The validity of a grant that waited long depends on the server's clock too. The
client renews it at once, so that the validity depends on the client's clock alone.

Warning: a holder needs time to stop before the loss. So a lease with a third of its ttl left is AT_RISK
for any reason: no answer came, each answer came late, or `max_hold` ended the renewals. A renewal that is
answered in time is sent with about two thirds left, so a healthy lease never comes so far.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from redfence._core.backoff import backoff_ms
from redfence._errors import LeaseLostError, LossReason

# A renewal is due after a third of the ttl; jitter makes it up to a tenth of that earlier.
_RENEWALS_PER_TTL = 3
_JITTER = 0.1
# How long to wait for one answer, and how long to pause between retries, as shares of the ttl. At least
# five retries fit into the validity that is left after the first failure.
_ANSWER_SHARE = 1 / 6
_RETRY_BASE_SHARE = 1 / 20
_RETRY_CAP_SHARE = 1 / 6
# A lease with no more validity than this share of the ttl is AT_RISK.
_WARNING_SHARE = 1 / 3


class LeaseState(enum.Enum):
    """The state of a lease, as its holder sees it."""

    ACTIVE = "active"
    """The lease is held, its last renewal succeeded, and more than a third of its ttl is left."""
    AT_RISK = "at_risk"
    """The lease is still held, but its last renewal failed, or at most a third of its ttl is left.

    Work may continue while the client retries; after `max_hold` it does not retry.
    """
    LOST = "lost"
    """The lease is no longer held, or the client cannot prove that it is. Final: stop the protected work."""
    RELEASED = "released"
    """The holder released the lease. Final."""


class LeaseEvent(enum.Enum):
    """The events that change the state of a lease."""

    RENEWED = enum.auto()
    """A server confirmed a renewal."""
    RENEWAL_FAILED = enum.auto()
    """A renewal reached no quorum or no server, or got no answer; or little validity is left."""
    REPORTED_LOST = enum.auto()
    """A server reported that no quorum holds the lease, or the client is closing."""
    DEADLINE_PASSED = enum.auto()
    """The validity is over."""
    RELEASED = enum.auto()
    """The holder released the lease."""


# All transitions. A missing pair raises KeyError; a test checks every pair.
TRANSITIONS: Mapping[tuple[LeaseState, LeaseEvent], LeaseState] = MappingProxyType(
    {
        (LeaseState.ACTIVE, LeaseEvent.RENEWED): LeaseState.ACTIVE,
        (LeaseState.ACTIVE, LeaseEvent.RENEWAL_FAILED): LeaseState.AT_RISK,
        (LeaseState.ACTIVE, LeaseEvent.REPORTED_LOST): LeaseState.LOST,
        (LeaseState.ACTIVE, LeaseEvent.DEADLINE_PASSED): LeaseState.LOST,
        (LeaseState.ACTIVE, LeaseEvent.RELEASED): LeaseState.RELEASED,
        (LeaseState.AT_RISK, LeaseEvent.RENEWED): LeaseState.ACTIVE,
        (LeaseState.AT_RISK, LeaseEvent.RENEWAL_FAILED): LeaseState.AT_RISK,
        (LeaseState.AT_RISK, LeaseEvent.REPORTED_LOST): LeaseState.LOST,
        (LeaseState.AT_RISK, LeaseEvent.DEADLINE_PASSED): LeaseState.LOST,
        (LeaseState.AT_RISK, LeaseEvent.RELEASED): LeaseState.RELEASED,
        (LeaseState.LOST, LeaseEvent.RENEWED): LeaseState.LOST,
        (LeaseState.LOST, LeaseEvent.RENEWAL_FAILED): LeaseState.LOST,
        (LeaseState.LOST, LeaseEvent.REPORTED_LOST): LeaseState.LOST,
        (LeaseState.LOST, LeaseEvent.DEADLINE_PASSED): LeaseState.LOST,
        (LeaseState.LOST, LeaseEvent.RELEASED): LeaseState.LOST,
        (LeaseState.RELEASED, LeaseEvent.RENEWED): LeaseState.RELEASED,
        (LeaseState.RELEASED, LeaseEvent.RENEWAL_FAILED): LeaseState.RELEASED,
        (LeaseState.RELEASED, LeaseEvent.REPORTED_LOST): LeaseState.RELEASED,
        (LeaseState.RELEASED, LeaseEvent.DEADLINE_PASSED): LeaseState.RELEASED,
        (LeaseState.RELEASED, LeaseEvent.RELEASED): LeaseState.RELEASED,
    }
)


class LeaseCore:
    """Tracks the state, the deadline and the next renewal of one lease.

    After each event, call `wake` at `wake_at_ms`, which is infinite once the lease has ended.

    Attributes:
        watchers: the session calls each of them, without arguments, after each change of the state. It
            must not block, and must not keep the holder's lease object alive.

    Args:
        resource: the locked name.
        lease_id: the secret of the lease.
        token: the fencing token.
        ttl_ms: the requested ttl.
        sent_at_ms: an instant before the granted Acquire was sent.
        validity_ms: the granted validity, counted from `sent_at_ms`.
        now_ms: the present instant.
        max_hold_ms: stop renewing after this time; None renews until the lease ends.
        fraction: returns a random number in [0, 1), for jitter.
    """

    __slots__ = (
        "_failures",
        "_fraction",
        "_renew_at_ms",
        "_renew_until_ms",
        "_state",
        "deadline_ms",
        "lease_id",
        "loss",
        "proven_at_ms",
        "resource",
        "token",
        "ttl_ms",
        "unanswered_since_ms",
        "watchers",
    )

    def __init__(
        self,
        *,
        resource: str,
        lease_id: str,
        token: int,
        ttl_ms: float,
        sent_at_ms: float,
        validity_ms: float,
        now_ms: float,
        max_hold_ms: float | None,
        fraction: Callable[[], float],
    ) -> None:
        self.resource = resource
        self.lease_id = lease_id
        self.token = token
        self.ttl_ms = ttl_ms
        self.loss: LossReason | None = None
        self.watchers: list[Callable[[], None]] = []
        self._fraction = fraction
        self._state = LeaseState.ACTIVE
        self._failures = 0
        # When `wake` asked for the renewal that is still unanswered.
        self.unanswered_since_ms: float | None = None
        # When the client sent the request that proved the present deadline.
        self.proven_at_ms = sent_at_ms
        # No grant lasts longer than one ttl from now, even if the server's clock measured the wait wrongly.
        self.deadline_ms = min(sent_at_ms + validity_ms, now_ms + ttl_ms)
        self._renew_until_ms = math.inf if max_hold_ms is None else now_ms + max_hold_ms
        # Counted from the same instant as the deadline, so it is due at once after a long wait
        # (test_a_grant_that_waited_longer_than_a_third_of_its_ttl_is_renewed_at_once).
        self._renew_at_ms = self._regular_renewal_ms(sent_at_ms)

    @property
    def state(self) -> LeaseState:
        """The state after the last event; `ended` and `state_at` also compare the clock."""
        return self._state

    @property
    def wake_at_ms(self) -> float:
        """The instant at which to call `wake` next; infinite once the lease has ended."""
        if self._has_ended():
            return math.inf
        end_ms = self._warn_at_ms if self._state is LeaseState.ACTIVE else self.deadline_ms
        return min(self._renew_at_ms, end_ms)

    def ended(self, now_ms: float) -> LossReason | None:
        """Return why the lease does not protect its work at `now_ms`, or None if it does. Changes nothing."""
        if self._state is LeaseState.RELEASED:
            return LossReason.RELEASED
        if self._state is LeaseState.LOST:
            return self.loss
        return self._expiry_reason() if now_ms >= self.deadline_ms else None

    def state_at(self, now_ms: float) -> LeaseState:
        """Return the state at `now_ms`, even if `wake` was not called in time."""
        if self._has_ended() or now_ms < self._warn_at_ms:
            return self._state
        return LeaseState.AT_RISK if now_ms < self.deadline_ms else LeaseState.LOST

    def remaining_ms(self, now_ms: float) -> float:
        """Return the validity left at `now_ms`, in milliseconds; 0 once the lease has ended."""
        return 0.0 if self._has_ended() else max(0.0, self.deadline_ms - now_ms)

    def lost_error(self, now_ms: float) -> LeaseLostError | None:
        """Return the error that stops the holder, or None while the lease is held."""
        reason = self.ended(now_ms)
        return reason and LeaseLostError(resource=self.resource, token=self.token, reason=reason)

    def wake(self, now_ms: float) -> bool:
        """Advance the schedule to `now_ms`, and return whether to send a renewal now."""
        if self._has_ended() or self._expired(now_ms):
            return False
        self._warn(now_ms)
        if now_ms < self._renew_at_ms:
            return False
        if now_ms >= self._renew_until_ms:
            # The lease was held for max_hold, so let its validity end.
            self._renew_at_ms = math.inf
            return False
        if self.unanswered_since_ms is not None:
            # The last renewal got no answer in time. A late answer still counts.
            self._fail(now_ms)
        else:
            self.unanswered_since_ms = now_ms
            self._renew_at_ms = now_ms + self.ttl_ms * _ANSWER_SHARE
        return True

    def renewed(self, *, sent_at_ms: float, validity_ms: float, now_ms: float) -> None:
        """Extend the deadline by a confirmed renewal that was sent at `sent_at_ms`."""
        if self._has_ended() or self._expired(now_ms):
            return
        proven_ms = min(sent_at_ms + validity_ms, now_ms + self.ttl_ms)
        if proven_ms <= self.deadline_ms:
            # The answer to an older renewal proves nothing new.
            return
        self._apply(LeaseEvent.RENEWED)
        self.deadline_ms = proven_ms
        self.proven_at_ms = sent_at_ms
        self._failures = 0
        self.unanswered_since_ms = None
        self._renew_at_ms = max(now_ms, self._regular_renewal_ms(sent_at_ms))
        self._warn(now_ms)

    def renewal_failed(self, *, sent_at_ms: float, now_ms: float) -> None:
        """Record that the renewal sent at `sent_at_ms` failed, unless a later one succeeded."""
        if self._has_ended() or self._expired(now_ms) or sent_at_ms < self.proven_at_ms:
            return
        self.unanswered_since_ms = None
        self._fail(now_ms)

    def renew_soon(self, now_ms: float) -> None:
        """Make the next renewal due now if the lease is at risk, because a server is reachable again."""
        if self._state is LeaseState.AT_RISK and self._renew_at_ms < math.inf:
            self.unanswered_since_ms = None
            self._renew_at_ms = now_ms

    def end(self, reason: LossReason, *, now_ms: float) -> None:
        """End the lease: as released if `reason` is RELEASED, else as lost for that reason."""
        if self._has_ended() or self._expired(now_ms):
            return
        if reason is LossReason.RELEASED:
            self._apply(LeaseEvent.RELEASED)
        else:
            self.loss = reason
            self._apply(LeaseEvent.REPORTED_LOST)

    def _fail(self, now_ms: float) -> None:
        self._apply(LeaseEvent.RENEWAL_FAILED)
        self._failures += 1
        self._renew_at_ms = now_ms + backoff_ms(
            self._failures,
            base_ms=self.ttl_ms * _RETRY_BASE_SHARE,
            cap_ms=self.ttl_ms * _RETRY_CAP_SHARE,
            fraction=self._fraction(),
        )

    @property
    def _warn_at_ms(self) -> float:
        return self.deadline_ms - self.ttl_ms * _WARNING_SHARE

    def _warn(self, now_ms: float) -> None:
        if now_ms >= self._warn_at_ms:
            self._apply(LeaseEvent.RENEWAL_FAILED)

    def _expired(self, now_ms: float) -> bool:
        if now_ms < self.deadline_ms:
            return False
        self.loss = self._expiry_reason()
        self._apply(LeaseEvent.DEADLINE_PASSED)
        return True

    def _expiry_reason(self) -> LossReason:
        return LossReason.MAX_HOLD if self.deadline_ms >= self._renew_until_ms else LossReason.EXPIRED

    def _has_ended(self) -> bool:
        return self._state is LeaseState.LOST or self._state is LeaseState.RELEASED

    def _apply(self, event: LeaseEvent) -> None:
        self._state = TRANSITIONS[self._state, event]

    def _regular_renewal_ms(self, sent_at_ms: float) -> float:
        interval_ms = self.ttl_ms / _RENEWALS_PER_TTL
        return sent_at_ms + interval_ms * (1.0 - _JITTER * self._fraction())
