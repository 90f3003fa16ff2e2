"""T1 and T2: tokens are unique among leases, and a later grant carries the greater token, whatever clocks do.

A repeated Acquire returns the same grant with the same token. The token may be greater if the nodes that
hold the first grant do not answer. So its token is not below a token that its lease was granted before the
call. It is above that token if the lease was released in between. Against other leases a repeated Acquire
counts like any other Acquire: a grant that was answered before the call has the smaller token.

An earlier Acquire of the same lease may still be under way when a repeat is called, and the repeat may
return its grant. So a grant counts as called when the first Acquire was called that was not over yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from harness.history.calls import ResourceCalls, answered_s, greater, over_s
from harness.history.records import Kind, Operation, Outcome
from harness.history.verdict import Invariant, Violation

# The contract: 0 < token < 2^53.
_TOKEN_BOUND = 2**53


@dataclass(slots=True)
class _Grant:
    """A successful Acquire.

    Attributes:
        called_s: when the first Acquire was called that this may be the grant of.
    """

    acquire: Operation
    called_s: float

    @property
    def answered_s(self) -> float:
        return answered_s(self.acquire)


def judge_tokens(resource: ResourceCalls) -> Iterator[Violation]:
    """Yield what breaks T1 or T2 in the calls for one resource."""
    grants: list[_Grant] = []
    for calls in resource.leases.values():
        of_lease = _grants(calls)
        grants += of_lease
        yield from _judge_renewed_tokens(calls)
        if len(of_lease) > 1:
            yield from _judge_repeats(of_lease, calls)
    yield from _judge_unique(resource)
    yield from _judge_order(grants)


def _grants(calls: list[Operation]) -> list[_Grant]:
    acquires = [call for call in calls if call.kind is Kind.ACQUIRE]
    latest_over_s = list(accumulate(map(over_s, acquires), max))
    grants = []
    for acquire in acquires:
        if acquire.outcome is Outcome.OK:
            first = acquires[bisect_left(latest_over_s, acquire.invoked_s)]
            grants.append(_Grant(acquire, min(first.invoked_s, acquire.invoked_s)))
    return grants


def _judge_unique(resource: ResourceCalls) -> Iterator[Violation]:
    owners: dict[int, Operation] = {}
    for calls in resource.leases.values():
        for call in calls:
            if call.outcome is not Outcome.OK or call.kind is Kind.RELEASE:
                continue
            if call.kind is Kind.RENEW and call.token == 0:
                continue  # the nodes that answered did not agree on the token
            if not 0 < call.token < _TOKEN_BOUND:
                yield Violation(Invariant.UNIQUE, resource.name, "a token is out of bounds", (call,))
                continue
            owner = owners.setdefault(call.token, call)
            if owner.lease != call.lease:
                says = f"two leases have token {call.token}"
                yield Violation(Invariant.UNIQUE, resource.name, says, (owner, call))


def _judge_renewed_tokens(calls: list[Operation]) -> Iterator[Violation]:
    """Yield renewals that returned a token that their lease was never granted."""
    renewals = [
        call for call in calls if call.kind is Kind.RENEW and call.outcome is Outcome.OK and call.token
    ]
    if not renewals:
        return
    acquires = [call for call in calls if call.kind is Kind.ACQUIRE]
    if any(over_s(acquire) > renewals[0].invoked_s for acquire in acquires):
        return  # the token may be that of an Acquire with unknown outcome
    granted = {acquire.token for acquire in acquires if acquire.outcome is Outcome.OK}
    for renewal in renewals:
        if renewal.token not in granted:
            says = f"a renewal returned a token that its lease was not granted, but {sorted(granted)}"
            yield Violation(Invariant.UNIQUE, renewal.resource, says, (*acquires[-1:], renewal))


def _judge_order(grants: list[_Grant]) -> Iterator[Violation]:
    """Yield grants with a smaller token than an earlier answered grant of another lease."""
    answered = sorted(grants, key=lambda grant: grant.answered_s)
    greatest: Operation | None = None
    position = 0
    for grant in sorted(grants, key=lambda each: each.called_s):
        while position < len(answered) and answered[position].answered_s < grant.called_s:
            earlier = answered[position].acquire
            greatest = earlier if greatest is None else greater(greatest, earlier)
            position += 1
        acquire = grant.acquire
        # T1 reports equal tokens. The rule for repeats reports a token below that of its own lease.
        if greatest is not None and greatest.token > acquire.token and greatest.lease != acquire.lease:
            says = f"token {acquire.token} was granted after token {greatest.token}"
            yield Violation(Invariant.ORDERED, acquire.resource, says, (greatest, acquire))


def _judge_repeats(grants: list[_Grant], calls: list[Operation]) -> Iterator[Violation]:
    """Yield grants of one lease whose token is below an earlier one's, or not above it after a release."""
    answered = sorted(grants, key=lambda grant: grant.answered_s)
    instants = [grant.answered_s for grant in answered]
    greatest = list(accumulate((grant.acquire for grant in answered), greater))
    releases = sorted(
        (call for call in calls if call.kind is Kind.RELEASE and call.outcome is Outcome.OK), key=answered_s
    )
    released_s = [answered_s(release) for release in releases]
    last_released = list(accumulate((release.invoked_s for release in releases), max))
    for grant in grants:
        acquire = grant.acquire
        before = bisect_left(instants, acquire.invoked_s)
        if before and greatest[before - 1].token > acquire.token:
            says = "a repeated Acquire was granted a smaller token"
        else:
            ended = bisect_left(released_s, grant.called_s)
            before = bisect_left(instants, last_released[ended - 1]) if ended else 0
            if not before or greatest[before - 1].token < acquire.token:
                continue
            says = "a lease that was released was granted again with its old token"
        yield Violation(Invariant.ORDERED, acquire.resource, says, (greatest[before - 1], acquire))
