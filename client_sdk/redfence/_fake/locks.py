"""Keeps the locks of the in-memory server: the holds, and the next token of each resource."""

from __future__ import annotations

from dataclasses import dataclass, field

from redfence._clock import Clock
from redfence._messages.requests import duration_ms
from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2

# As the contract defines it for Lease.validity.
_WAIT_DRIFT_RATIO = 0.0005


@dataclass(slots=True)
class FakeHold:
    """The hold of one lease.

    Attributes:
        lease_id: the secret of the lease.
        holder: the holder's label.
        token: the fencing token.
        ttl_ms: the requested ttl.
        expires_at_ms: when the lease ends unless it is renewed.
        lock_delay_ms: how long the lock stays closed after that.
        closed: whether the lease has ended, and the delay runs.
    """

    lease_id: str = field(repr=False)  # a secret
    holder: str
    token: int
    ttl_ms: float
    expires_at_ms: float
    lock_delay_ms: float = 0.0
    closed: bool = False

    def is_of(self, lease_id: str) -> bool:
        """Tell whether this lease holds the lock."""
        return self.lease_id == lease_id and not self.closed

    def renew(self, now_ms: float) -> None:
        """Restart the ttl."""
        self.expires_at_ms = now_ms + self.ttl_ms


class FakeLocks:
    """Keeps the hold and the last token of each resource. Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holds: dict[str, FakeHold] = {}
        self._tokens: dict[str, int] = {}

    def get(self, resource: str) -> FakeHold | None:
        """Return the hold of a resource, or None if it is free."""
        return self._holds.get(resource)

    def expired(self) -> list[str]:
        """Return the resources whose lease and lock delay are over; close those whose delay runs."""
        now_ms = self._clock.now_ms()
        for hold in self._holds.values():
            hold.closed = hold.closed or hold.expires_at_ms <= now_ms
        return [
            name for name, hold in self._holds.items() if hold.expires_at_ms + hold.lock_delay_ms <= now_ms
        ]

    def end(self, resource: str) -> bool:
        """End the hold of a resource; return whether there was one."""
        return self._holds.pop(resource, None) is not None

    def grant(self, resource: str, *, lease_id: str, holder: str, ttl_ms: float) -> FakeHold:
        """Grant a resource to a lease with the next token, even if another lease holds it."""
        token = self._tokens[resource] = self._tokens.get(resource, 0) + 1
        expires_at_ms = self._clock.now_ms() + ttl_ms
        hold = self._holds[resource] = FakeHold(lease_id, holder, token, ttl_ms, expires_at_ms)
        return hold

    def grant_to(self, request: lock_pb2.AcquireRequest) -> FakeHold:
        """Grant a resource to the lease of an acquire request."""
        ttl_ms, lease_id = duration_ms(request.ttl), request.lease_id
        hold = self.grant(request.resource, lease_id=lease_id, holder=request.holder, ttl_ms=ttl_ms)
        hold.lock_delay_ms = duration_ms(request.lock_delay)
        return hold

    def max_token(self) -> int:
        """Return the greatest token of all resources."""
        return max(self._tokens.values(), default=0)

    def current(self, hold: FakeHold) -> lock_pb2.CurrentHold:
        """Return a hold as the contract's message."""
        current = lock_pb2.CurrentHold(holder=hold.holder, fencing_token=hold.token)
        ends_at_ms = hold.expires_at_ms + hold.lock_delay_ms * hold.closed
        current.remaining.FromMilliseconds(int(max(0.0, ends_at_ms - self._clock.now_ms())))
        current.closed = hold.closed
        if hold.lock_delay_ms:
            current.lock_delay.FromMilliseconds(int(hold.lock_delay_ms))
        return current


def problem_of(request: lock_pb2.AcquireRequest) -> tuple[lock_pb2.ErrorReason.ValueType, str] | None:
    """Return why an acquire is invalid: the reason and the message; None for a valid one."""
    ttl_ms, most_ms = duration_ms(request.ttl), bounds.TTL_MS_MAX_DEFAULT
    if problem := bounds.resource_problem(request.resource):
        return lock_pb2.ERROR_REASON_INVALID_RESOURCE, f"resource {problem}"
    if not bounds.TTL_MS_MIN <= ttl_ms <= most_ms:
        allowed = f"at least {bounds.TTL_MS_MIN / 1000:g} s and at most {most_ms / 1000:g} s are allowed"
        return lock_pb2.ERROR_REASON_INVALID_TTL, f"ttl is {ttl_ms / 1000:.10g} s; {allowed}"
    if ttl_ms + (delay_ms := duration_ms(request.lock_delay)) > most_ms:
        allowed = f"with this ttl, at most {(most_ms - ttl_ms) / 1000:.10g} s are allowed"
        return lock_pb2.ERROR_REASON_INVALID_LOCK_DELAY, f"lock_delay is {delay_ms / 1000:.10g} s; {allowed}"
    return None


def answer_grant(
    result: lock_pb2.SessionResult, request: lock_pb2.AcquireRequest, hold: FakeHold, *, waited_ms: float
) -> None:
    """Write a grant as the answer to an acquire that has waited for `waited_ms`."""
    result.acquire.outcome = lock_pb2.ACQUIRE_OUTCOME_GRANTED
    lease = result.acquire.lease
    lease.resource = request.resource
    lease.lease_id = request.lease_id
    lease.fencing_token = hold.token
    lease.ttl.CopyFrom(request.ttl)
    wait_drift_ms = min(waited_ms * _WAIT_DRIFT_RATIO, hold.ttl_ms / 2)
    lease.validity.FromMilliseconds(int(waited_ms + validity_ms(hold.ttl_ms) - wait_drift_ms))


def validity_ms(ttl_ms: float) -> float:
    """Return the validity of a grant with this ttl: the ttl less the allowance for clock drift."""
    return ttl_ms - (ttl_ms / 100 + 2)
