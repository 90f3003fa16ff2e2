"""T2 and D: CheckToken and GetLock show no token of an ended lease and deny no token of a valid lease.

An observation changes nothing, and its answer may be as old as its call. So it is compared only with what
was certain before its call. A lease has certainly ended once another lease was granted a greater token,
whatever clocks do and nodes forget.

A released lease has ended as well, but a delayed message may make it appear again for a moment. A mint that
the network delays may reach a node after the release through another server, and another node may not have
received the release yet: together a quorum. So releases count only where all calls went through one server,
and no fault met the lease.

An answer that a token is not live is wrong if the holder could count on the lease during the whole call. The
same faults excuse it as excuse a loss: a silent node might show the lease, and the server counts it so.

A lease that was acquired twice may have a second, greater token. Nothing shows which of the two is live, so
such a lease is not judged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from harness.history.calls import Excuses, ResourceCalls, answered_s, greater, overlaps
from harness.history.leases import windows
from harness.history.records import Fault, Kind, Operation, Outcome
from harness.history.verdict import Invariant, Violation

# Faults of clients and of the storage delay no message between servers and nodes.
DELAY_NOTHING = ("holder paused", "holder killed", "storage paused", "storage killed")


@dataclass(frozen=True, slots=True)
class _Grants:
    """The grants of one resource.

    Attributes:
        answered_s: when each was answered, in order.
        greatest: for each grant, the one with the greatest token up to it, and the greatest of other leases.
        by_token: each grant by its token.
    """

    answered_s: list[float]
    greatest: list[tuple[Operation, Operation | None]]
    by_token: dict[int, Operation]

    @classmethod
    def of(cls, resource: ResourceCalls) -> Self:
        grants = resource.grants()
        return cls(
            list(map(answered_s, grants)), list(_greatest(grants)), {each.token: each for each in grants}
        )

    def greatest_of_others(self, lease: str, *, before_s: float) -> Operation | None:
        """Return the grant with the greatest token that another lease was granted before an instant."""
        position = bisect_left(self.answered_s, before_s)
        if not position:
            return None
        first, second = self.greatest[position - 1]
        return second if first.lease == lease else first


def judge_observations(
    resource: ResourceCalls, faults: Sequence[Fault], excuses: Excuses
) -> Iterator[Violation]:
    """Yield what breaks T2 or D in the observations of one resource."""
    if not resource.observations:
        return
    grants = _Grants.of(resource)
    delaying = [fault for fault in faults if fault.kind not in DELAY_NOTHING]
    for observation in resource.observations:
        grant = grants.by_token.get(observation.token)
        if observation.outcome is Outcome.OK and grant is not None:
            yield from _judge_superseded(observation, grant, grants)
            yield from _judge_released(observation, grant, resource.leases[grant.lease], delaying)
        elif observation.lost:
            yield from _judge_not_live(observation, resource.leases.get(observation.lease, []), excuses)


def _greatest(grants: Sequence[Operation]) -> Iterator[tuple[Operation, Operation | None]]:
    first: Operation | None = None
    second: Operation | None = None
    for grant in grants:
        if first is None or first.lease == grant.lease:
            first = grant if first is None else greater(first, grant)
        elif grant.token > first.token:
            first, second = grant, first
        else:
            second = grant if second is None else greater(second, grant)
        yield first, second


def _judge_superseded(observation: Operation, grant: Operation, grants: _Grants) -> Iterator[Violation]:
    later = grants.greatest_of_others(grant.lease, before_s=observation.invoked_s)
    if later is not None and later.token > grant.token:
        says = "a token was shown live after a greater one was granted"
        yield Violation(Invariant.ORDERED, observation.resource, says, (later, observation))


def _judge_released(
    observation: Operation, grant: Operation, calls: Sequence[Operation], delaying: Sequence[Fault]
) -> Iterator[Violation]:
    """Yield that a token was shown live after its release, if nothing could have overtaken the release."""
    acquires = [call for call in calls if call.kind is Kind.ACQUIRE]
    if overlaps(delaying, acquires[0].invoked_s, answered_s(observation)):
        return
    for call in calls:
        if (
            call.kind is Kind.RELEASE
            and call.outcome is Outcome.OK
            and call.server
            and all(acquire.server == call.server for acquire in acquires)
            # A grant with a later answer may be a new grant of the same lease.
            and answered_s(grant) < call.invoked_s
            and answered_s(call) < observation.invoked_s
        ):
            says = "a token was shown live after its lease was released"
            yield Violation(Invariant.ORDERED, observation.resource, says, (call, observation))
            return


def _judge_not_live(
    observation: Operation, calls: Sequence[Operation], excuses: Excuses
) -> Iterator[Violation]:
    """Yield that a token was denied while its holder could count on it during the whole call."""
    if sum(call.kind is Kind.ACQUIRE for call in calls) != 1:
        return
    ended_s = answered_s(observation)
    for window in windows(calls):
        inside = window.start_s <= observation.invoked_s and ended_s < window.end_s
        if inside and not excuses.early_end(window.called_s, ended_s):
            says = "a token was shown not live while its holder counted on it"
            yield Violation(Invariant.DEADLINE, observation.resource, says, (window.last, observation))
