"""T2 and D of what is seen of leases: CheckToken and GetLock tell nobody live who is known to be over, nor over who is known to be live.

A sight changes nothing, and may be as old as its call. So it is held only against what was certain before it was called: a lease is over
once another one was granted a greater token, whatever clocks do and nodes forget.

It is over as well once it was released, but that is asked only where nothing overtakes: of one server, and of leases that no fault has met.
A mint that is held back by the network may come to a node after the release through another server has, and stay there until its ttl is
over; beside a node that the release has not come to yet that is a quorum, for a moment.

That a token is not live is untrue if its holder could count on the lease throughout the call. Where nodes fail, fewer of them than a quorum
may be left to show a lease, so that as well is asked only of leases which no fault has met.

A lease that was asked for again may have a second, greater token; which of the two is live is not known here, and not judged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from harness.chaos.checker_calls import ResourceCalls, answered_s, greater, reached
from harness.chaos.checker_leases import windows
from harness.chaos.checker_verdict import Invariant, Violation, Words, shown_at_s
from harness.chaos.records import Fault, Kind, Operation, Outcome


@dataclass(frozen=True, slots=True)
class _Grants:
    """The grants of one resource that were told.

    Attributes:
        told_s: when each was answered, in order.
        greatest: the one with the greatest token of those up to each.
        by_token: each by its token.
    """

    told_s: list[float]
    greatest: list[Operation]
    by_token: dict[int, Operation]

    def before(self, at_s: float) -> Operation | None:
        """Return the grant with the greatest token of those that were told before an instant."""
        place = bisect_left(self.told_s, at_s)
        return self.greatest[place - 1] if place else None


def judge_sights(resource: ResourceCalls, faults: Sequence[Fault], words: Words) -> Iterator[Violation]:
    """Yield what breaks T2 or D in what was seen of one resource."""
    if not resource.sights:
        return
    grants = _grants(resource)
    for sight in resource.sights:
        if sight.outcome is Outcome.OK:
            grant = grants.by_token.get(sight.token)
            # Of a token that nobody was told, nobody knows whose it is.
            if grant is not None:
                yield from _judge_followed(sight, grant, grants, words)
                yield from _judge_released(sight, grant, resource.leases[grant.lease], faults, words)
        elif sight.lost:
            yield from _judge_not_live(sight, resource.leases.get(sight.lease, []), faults, words)


def _grants(resource: ResourceCalls) -> _Grants:
    told = sorted(
        (
            call
            for calls in resource.leases.values()
            for call in calls
            if call.kind is Kind.ACQUIRE and call.outcome is Outcome.OK
        ),
        key=answered_s,
    )
    return _Grants(
        told_s=[answered_s(grant) for grant in told],
        greatest=list(accumulate(told, greater)),
        by_token={grant.token: grant for grant in told},
    )


def _judge_followed(sight: Operation, grant: Operation, grants: _Grants, words: Words) -> Iterator[Violation]:
    """Yield that a token was told live whose lease another one had followed."""
    later = grants.before(sight.invoked_s)
    if later is not None and later.token > grant.token and later.lease != grant.lease:
        said = f"a token was told live after a greater one was granted: {words.call(sight)}, called after {words.call(later)}"
        yield _seen(Invariant.ORDERED, sight, said, later)


def _judge_released(
    sight: Operation, grant: Operation, calls: Sequence[Operation], faults: Sequence[Fault], words: Words
) -> Iterator[Violation]:
    """Yield that a token was told live whose lease had been released, if nothing could have overtaken the release."""
    acquires = [call for call in calls if call.kind is Kind.ACQUIRE]
    if reached(faults, acquires[0].invoked_s, answered_s(sight)):
        return
    for call in calls:
        if (
            call.kind is Kind.RELEASE
            and call.outcome is Outcome.OK
            and call.server
            and all(acquire.server == call.server for acquire in acquires)
            # What was told after that may be another grant of the same lease.
            and answered_s(grant) < call.invoked_s
            and answered_s(call) < sight.invoked_s
        ):
            said = f"a token was told live after its lease was released: {words.call(sight)}, called after {words.call(call)}"
            yield _seen(Invariant.ORDERED, sight, said, call)
            return


def _judge_not_live(
    sight: Operation, calls: Sequence[Operation], faults: Sequence[Fault], words: Words
) -> Iterator[Violation]:
    """Yield that a token was told not to be live whose holder could count on it."""
    if sum(call.kind is Kind.ACQUIRE for call in calls) != 1:
        return
    for window in windows(calls):
        throughout = window.start_s <= sight.invoked_s and answered_s(sight) < window.end_s
        if throughout and not reached(faults, window.called_s, answered_s(sight)):
            said = f"a token was told not to be live while its holder counted on it: {words.call(sight)}, within {words.call(window.last)}"
            yield _seen(Invariant.DEADLINE, sight, said, window.last)


def _seen(invariant: Invariant, sight: Operation, said: str, other: Operation) -> Violation:
    return Violation(invariant, sight.resource, said, shown_at_s(sight), (other, sight))
