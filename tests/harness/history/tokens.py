"""T1 and T2: tokens are unique among leases, and a later grant carries the greater one, whatever clocks do.

What is promised of an Acquire that repeats the id of its lease: it is the same grant with the same token; if nodes that show the first
grant do not answer, the token may be greater; it is never another lease's. So its token is not below one that its lease was told before it
was called, and above it if the lease is known to have been released in between. Towards other leases it is an Acquire like any other: a
grant that was answered before it was called has the smaller token. Nothing else could be true: the nodes that answer it show holds which
began after that other lease's had ended, or which that other lease could not have got past.

But an earlier Acquire of the same lease may still be under way when a repeat is called, and the answer to the repeat may be its grant.
So a grant counts as called when the first of those was that were not over yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from harness.history.calls import ResourceCalls, answered_s, greater, over_s
from harness.history.records import Kind, Operation, Outcome
from harness.history.verdict import Invariant, Violation, Words, shown_at_s

# The contract: 0 < token < 2^53.
_TOKEN_BOUND = 2**53


@dataclass(slots=True)
class _Grant:
    """A token that an Acquire told its caller.

    Attributes:
        called_s: when the first Acquire was called that this may be the grant of.
        answered_s: when the caller knew.
    """

    acquire: Operation
    called_s: float
    answered_s: float


def judge_tokens(resource: ResourceCalls, words: Words) -> Iterator[Violation]:
    """Yield what breaks T1 or T2 in the calls for one resource."""
    grants: list[_Grant] = []
    for calls in resource.leases.values():
        of_lease = _grants(calls)
        grants += of_lease
        yield from _judge_renewed_tokens(calls, words)
        if len(of_lease) > 1:
            yield from _judge_repeats(of_lease, calls, words)
    yield from _judge_unique(resource, words)
    yield from _judge_order(grants, words)


def _grants(calls: list[Operation]) -> list[_Grant]:
    """Return the grants of a lease, in the order of their invocation."""
    acquires = [call for call in calls if call.kind is Kind.ACQUIRE]
    latest_over_s = list(accumulate(map(over_s, acquires), max))
    grants = []
    for acquire in acquires:
        if acquire.outcome is Outcome.OK:
            first = acquires[bisect_left(latest_over_s, acquire.invoked_s)]
            grants.append(_Grant(acquire, min(first.invoked_s, acquire.invoked_s), answered_s(acquire)))
    return grants


def _judge_unique(resource: ResourceCalls, words: Words) -> Iterator[Violation]:
    owners: dict[int, Operation] = {}
    for calls in resource.leases.values():
        for call in calls:
            if call.outcome is not Outcome.OK or call.kind is Kind.RELEASE:
                continue
            if call.kind is Kind.RENEW and call.token == 0:
                continue  # the nodes that answered did not agree on it
            if not 0 < call.token < _TOKEN_BOUND:
                said = f"a token that is out of bounds: {words.call(call)}"
                yield Violation(Invariant.UNIQUE, resource.name, said, shown_at_s(call), (call,))
                continue
            owner = owners.setdefault(call.token, call)
            if owner.lease != call.lease:
                said = f"two leases have token {call.token}: {words.call(owner)} and {words.call(call)}"
                yield Violation(Invariant.UNIQUE, resource.name, said, shown_at_s(owner, call), (owner, call))


def _judge_renewed_tokens(calls: list[Operation], words: Words) -> Iterator[Violation]:
    """Yield renewals that told a token which their lease was never granted; one of an unknown Acquire may be any."""
    renewals = [
        call for call in calls if call.kind is Kind.RENEW and call.outcome is Outcome.OK and call.token
    ]
    if not renewals:
        return
    acquires = [call for call in calls if call.kind is Kind.ACQUIRE]
    if any(over_s(acquire) > renewals[0].invoked_s for acquire in acquires):
        return
    granted = {acquire.token for acquire in acquires if acquire.outcome is Outcome.OK}
    for renewal in renewals:
        if renewal.token not in granted:
            said = f"a renewal told a token that its lease was not granted, but {sorted(granted)}: {words.call(renewal)}"
            yield Violation(
                Invariant.UNIQUE, renewal.resource, said, shown_at_s(renewal), (*acquires[-1:], renewal)
            )


def _judge_order(grants: list[_Grant], words: Words) -> Iterator[Violation]:
    """Yield grants that carry a smaller token than one of another lease that was answered before they were called."""
    answered = sorted(grants, key=lambda grant: grant.answered_s)
    greatest: Operation | None = None
    position = 0
    for grant in sorted(grants, key=lambda each: each.called_s):
        while position < len(answered) and answered[position].answered_s < grant.called_s:
            earlier = answered[position].acquire
            greatest = earlier if greatest is None else greater(greatest, earlier)
            position += 1
        acquire = grant.acquire
        # Equal tokens are told by T1, and whoever is below its own lease's, which is the greatest, as a repeat.
        if greatest is not None and greatest.token > acquire.token and greatest.lease != acquire.lease:
            rival = greatest
            said = (
                f"token {acquire.token} was granted after {rival.token}: {words.call(acquire)}, called after "
                f"{words.call(rival)}"
            )
            calls = (rival, acquire)
            yield Violation(Invariant.ORDERED, acquire.resource, said, shown_at_s(*calls), calls)


def _judge_repeats(grants: list[_Grant], calls: list[Operation], words: Words) -> Iterator[Violation]:
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
            first, why = greatest[before - 1], "an Acquire that was repeated was told a smaller token"
        else:
            ended = bisect_left(released_s, grant.called_s)
            before = bisect_left(instants, last_released[ended - 1]) if ended else 0
            if not before or greatest[before - 1].token < acquire.token:
                continue
            first, why = greatest[before - 1], "a lease that was released was granted anew with its old token"
        said = f"{why}: {words.call(first)}, then {words.call(acquire)}"
        yield Violation(Invariant.ORDERED, acquire.resource, said, shown_at_s(acquire), (first, acquire))
