"""The life of one lease, without I/O: told (event, now), it answers what to do next.

What it must never get wrong: it may call a lease lost that is still held, but it must never call a lease held
that somebody else may already have. So:

- The deadline is this client's own. It is counted from *before* the request left, on a clock that does not stop in
  suspend. The answer may have been slow; the request cannot have been granted before it was sent.
- Nothing a server says outlives the deadline. An answer that arrives past it, however good, finds the lease LOST, and
  LOST is final: a holder that has once been told to stop must not be told to go on.
- Answers may be late and out of order. Each one proves its own instant, `sent + validity`; the deadline is the latest
  instant proven so far. A late good answer cannot shorten it, and a late bad one says nothing about a
  renewal that was sent after it.
- No timer proves anything. Timers only wake the caller; whoever *uses* the lease compares the clock with the deadline
  (`ended`).

When to renew: every third of the ttl, so two renewals may fail in a row; a little earlier by chance, so that leases
taken together are not renewed together for ever. A renewal that fails or is not answered puts the lease AT_RISK and is
repeated soon, with growing pauses, while the lease is valid. A grant that waited long was counted by the
server's clock as well as ours: it is renewed at once, to stand on ours alone.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from redfence._core.backoff import backoff_ms
from redfence._errors import LeaseLostError, LossReason

# Renew when a third of the ttl is over; up to a tenth of that earlier by chance.
_RENEWALS_PER_TTL = 3
_JITTER = 0.1
# How patient to be with one renewal, and how far to space repeats, as shares of the ttl: five or more tries fit into
# what is left after the first one failed.
_ANSWER_SHARE = 1 / 6
_RETRY_BASE_SHARE = 1 / 20
_RETRY_CAP_SHARE = 1 / 6


class LeaseState(enum.Enum):
    """Where a lease stands."""

    ACTIVE = "active"
    """Held, as far as the last renewal tells."""
    AT_RISK = "at_risk"
    """Still held, but the last renewal failed; it is being repeated. Work may go on until the deadline."""
    LOST = "lost"
    """Not held any more, or no longer provably so. Final: the protected work has to stop."""
    RELEASED = "released"
    """Given back by its holder. Final."""


class LeaseEvent(enum.Enum):
    """What can happen to a lease."""

    RENEWED = enum.auto()
    """A renewal was confirmed, with a validity."""
    RENEWAL_FAILED = enum.auto()
    """A renewal reached no quorum, no server, or got no answer."""
    REPORTED_LOST = enum.auto()
    """A server says that a quorum does not hold it, or the client is being closed."""
    DEADLINE_PASSED = enum.auto()
    """The validity is over."""
    RELEASED = enum.auto()
    """The holder gave it back."""


# Every transition there is. A missing pair would be a KeyError, and a test walks them all.
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
    """One lease's state, deadline and schedule.

    After each event, wake it (`wake`) at `wake_at_ms`, which is infinite once the lease has ended.

    Args:
        resource: the locked name.
        lease_id: its secret.
        token: its fencing token.
        ttl_ms: as asked for.
        sent_at_ms: an instant before the granted Acquire left.
        validity_ms: as granted, counted from `sent_at_ms`.
        now_ms: the present instant.
        max_hold_ms: how long from now it is renewed at most; None: as long as it is held.
        fraction: chance in [0, 1), for jitter.
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
        "on_lost",
        "proven_at_ms",
        "resource",
        "token",
        "ttl_ms",
        "unanswered_since_ms",
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
        self.on_lost: Callable[[], None] | None = None
        self._fraction = fraction
        self._state = LeaseState.ACTIVE
        self._failures = 0
        # When the first renewal was asked for that is still unanswered.
        self.unanswered_since_ms: float | None = None
        # When the request behind the present deadline was sent.
        self.proven_at_ms = sent_at_ms
        # No grant can end later than a whole ttl from now, whatever clock the server counted the wait on.
        self.deadline_ms = min(sent_at_ms + validity_ms, now_ms + ttl_ms)
        self._renew_until_ms = math.inf if max_hold_ms is None else now_ms + max_hold_ms
        # Counted from the sending, like the deadline: after a long wait it is due at once
        # (test_a_grant_that_waited_longer_than_a_third_of_its_ttl_is_renewed_at_once).
        self._renew_at_ms = self._regular_renewal_ms(sent_at_ms)

    @property
    def state(self) -> LeaseState:
        """The state as of the last event; `ended` also looks at the clock."""
        return self._state

    @property
    def wake_at_ms(self) -> float:
        """When `wake` wants to be called next; infinite once the lease has ended."""
        if self._has_ended():
            return math.inf
        return min(self._renew_at_ms, self.deadline_ms)

    def ended(self, now_ms: float) -> LossReason | None:
        """Return why the lease does not protect anything at `now_ms`, or None while it does. Changes nothing."""
        if self._state is LeaseState.RELEASED:
            return LossReason.RELEASED
        if self._state is LeaseState.LOST:
            return self.loss
        return self._expiry_reason() if now_ms >= self.deadline_ms else None

    def state_at(self, now_ms: float) -> LeaseState:
        """Return the state at `now_ms`, also if nobody has woken the lease since its deadline."""
        if not self._has_ended() and now_ms >= self.deadline_ms:
            return LeaseState.LOST
        return self._state

    def remaining_ms(self, now_ms: float) -> float:
        """Return how long the lease may be counted on from `now_ms`; 0 once it has ended."""
        return 0.0 if self._has_ended() else max(0.0, self.deadline_ms - now_ms)

    def lost_error(self, now_ms: float) -> LeaseLostError | None:
        """Return the error that tells a holder to stop, or None while the lease is held."""
        reason = self.ended(now_ms)
        return reason and LeaseLostError(resource=self.resource, token=self.token, reason=reason)

    def wake(self, now_ms: float) -> bool:
        """Return whether a renewal is to be sent now."""
        if self._has_ended() or self._expired(now_ms) or now_ms < self._renew_at_ms:
            return False
        if now_ms >= self._renew_until_ms:
            # Held for as long as was allowed: let the validity run out.
            self._renew_at_ms = math.inf
            return False
        if self.unanswered_since_ms is not None:
            # The last renewal was not answered in time. It may still be, and then counts.
            self._fail(now_ms)
        else:
            self.unanswered_since_ms = now_ms
            self._renew_at_ms = now_ms + self.ttl_ms * _ANSWER_SHARE
        return True

    def renewed(self, *, sent_at_ms: float, validity_ms: float, now_ms: float) -> None:
        """Take note of a confirmed renewal that was sent at `sent_at_ms`."""
        if self._has_ended() or self._expired(now_ms):
            return
        proven_ms = min(sent_at_ms + validity_ms, now_ms + self.ttl_ms)
        if proven_ms <= self.deadline_ms:
            # An older renewal's answer: it proves nothing that is not known.
            return
        self._apply(LeaseEvent.RENEWED)
        self.deadline_ms = proven_ms
        self.proven_at_ms = sent_at_ms
        self._failures = 0
        self.unanswered_since_ms = None
        self._renew_at_ms = max(now_ms, self._regular_renewal_ms(sent_at_ms))

    def renewal_failed(self, *, sent_at_ms: float, now_ms: float) -> None:
        """Take note that the renewal of `sent_at_ms` came to nothing."""
        if self._has_ended() or self._expired(now_ms) or sent_at_ms < self.proven_at_ms:
            return
        self.unanswered_since_ms = None
        self._fail(now_ms)

    def renew_soon(self, now_ms: float) -> None:
        """Renew at once if the lease is at risk: a server is there again."""
        if self._state is LeaseState.AT_RISK and self._renew_at_ms < math.inf:
            self.unanswered_since_ms = None
            self._renew_at_ms = now_ms

    def end(self, reason: LossReason, *, now_ms: float) -> None:
        """Take note that the lease was lost for `reason`, or given back if that is RELEASED."""
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
