"""T2 and D of what is seen of leases: CheckToken and GetLock tell no token live that is known to be over, and CheckToken none over that is live.

A observation changes nothing, and may be as old as its call. So it is held only against what was certain before it was called: a lease is over
once another one was granted a greater token, whatever clocks do and nodes forget.

It is over as well once it was released, but that is asked only where nothing overtakes: of one server, and of leases that no fault has met.
A mint that is held back by the network may come to a node after the release through another server has, and stay there until its ttl is
over; beside a node that the release has not come to yet that is a quorum, for a moment.

That a token is not live is untrue if its holder could count on the lease throughout the call, for the same leases of which it is untrue that
they are lost: a node that does not answer might show the lease, and counts so.

A lease that was asked for again may have a second, greater token; which of the two is live is not known here, and not judged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.history.calls import Excuses, ResourceCalls, answered_s, greater, reached
from harness.history.leases import windows
from harness.history.records import Fault, Kind, Operation, Outcome
from harness.history.verdict import Invariant, Violation, Words, shown_at_s

# What happens to clients and storages makes no message between servers and nodes late.
_ELSEWHERE = ("holder paused", "holder killed", "storage paused", "storage killed")


@dataclass(frozen=True, slots=True)
class _Grants:
    """The grants of one resource that were told.

    Attributes:
        told_s: when each was answered, in order.
        greatest: the one with the greatest token of those up to each; and the same without that one's lease.
        by_token: each by its token.
    """

    told_s: list[float]
    greatest: list[tuple[Operation, Operation | None]]
    by_token: dict[int, Operation]

    def before(self, at_s: float, *, without: str) -> Operation | None:
        """Return the grant with the greatest token of those that other leases were told before an instant."""
        place = bisect_left(self.told_s, at_s)
        if not place:
            return None
        first, second = self.greatest[place - 1]
        return second if first.lease == without else first


def judge_observations(
    resource: ResourceCalls, faults: Sequence[Fault], excuses: Excuses, words: Words
) -> Iterator[Violation]:
    """Yield what breaks T2 or D in what was seen of one resource."""
    if not resource.observations:
        return
    grants = _grants(resource)
    late = [fault for fault in faults if fault.kind not in _ELSEWHERE]
    for observation in resource.observations:
        if observation.outcome is Outcome.OK:
            grant = grants.by_token.get(observation.token)
            # Of a token that nobody was told, nobody knows whose it is.
            if grant is not None:
                yield from _judge_followed(observation, grant, grants, words)
                yield from _judge_released(observation, grant, resource.leases[grant.lease], late, words)
        elif observation.lost:
            yield from _judge_not_live(
                observation, resource.leases.get(observation.lease, []), excuses, words
            )


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
        greatest=list(_greatest(told)),
        by_token={grant.token: grant for grant in told},
    )


def _greatest(told: Sequence[Operation]) -> Iterator[tuple[Operation, Operation | None]]:
    first: Operation | None = None
    second: Operation | None = None
    for grant in told:
        if first is None or first.lease == grant.lease:
            first = grant if first is None else greater(first, grant)
        elif grant.token > first.token:
            first, second = grant, first
        else:
            second = grant if second is None else greater(second, grant)
        yield first, second


def _judge_followed(
    observation: Operation, grant: Operation, grants: _Grants, words: Words
) -> Iterator[Violation]:
    """Yield that a token was told live whose lease another one had followed."""
    later = grants.before(observation.invoked_s, without=grant.lease)
    if later is not None and later.token > grant.token:
        said = f"a token was told live after a greater one was granted: {words.call(observation)}, called after {words.call(later)}"
        yield _seen(Invariant.ORDERED, observation, said, later)


def _judge_released(
    observation: Operation,
    grant: Operation,
    calls: Sequence[Operation],
    faults: Sequence[Fault],
    words: Words,
) -> Iterator[Violation]:
    """Yield that a token was told live whose lease had been released, if nothing could have overtaken the release."""
    acquires = [call for call in calls if call.kind is Kind.ACQUIRE]
    if reached(faults, acquires[0].invoked_s, answered_s(observation)):
        return
    for call in calls:
        if (
            call.kind is Kind.RELEASE
            and call.outcome is Outcome.OK
            and call.server
            and all(acquire.server == call.server for acquire in acquires)
            # What was told after that may be another grant of the same lease.
            and answered_s(grant) < call.invoked_s
            and answered_s(call) < observation.invoked_s
        ):
            said = f"a token was told live after its lease was released: {words.call(observation)}, called after {words.call(call)}"
            yield _seen(Invariant.ORDERED, observation, said, call)
            return


def _judge_not_live(
    observation: Operation, calls: Sequence[Operation], excuses: Excuses, words: Words
) -> Iterator[Violation]:
    """Yield that a token was told not to be live whose holder could count on it."""
    if sum(call.kind is Kind.ACQUIRE for call in calls) != 1:
        return
    for window in windows(calls):
        throughout = window.start_s <= observation.invoked_s and answered_s(observation) < window.end_s
        if throughout and not excuses.early_end(window.called_s, answered_s(observation)):
            said = f"a token was told not to be live while its holder counted on it: {words.call(observation)}, within {words.call(window.last)}"
            yield _seen(Invariant.DEADLINE, observation, said, window.last)


def _seen(invariant: Invariant, observation: Operation, said: str, other: Operation) -> Violation:
    return Violation(invariant, observation.resource, said, shown_at_s(observation), (other, observation))
