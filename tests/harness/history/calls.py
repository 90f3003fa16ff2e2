"""Sorts the calls of a history by resource and lease, and tells what one call proves by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Self

from harness.history.records import MAJORITY_WIPED, Fault, Kind, Operation, Outcome


@dataclass(slots=True)
class ResourceCalls:
    """The calls for one resource, each list in the order of invocation."""

    name: str
    leases: dict[str, list[Operation]] = field(default_factory=dict)
    storage: list[Operation] = field(default_factory=list)
    observations: list[Operation] = field(default_factory=list)

    def acquires(self) -> Iterator[Operation]:
        return (call for calls in self.leases.values() for call in calls if call.kind is Kind.ACQUIRE)

    def grants(self) -> list[Operation]:
        return sorted((call for call in self.acquires() if call.outcome is Outcome.OK), key=answered_s)


def by_resource(operations: Iterable[Operation]) -> dict[str, ResourceCalls]:
    """Return the calls by resource; `operations` must be in the order of invocation."""
    resources: dict[str, ResourceCalls] = {}
    for call in operations:
        calls = resources.get(call.resource)
        if calls is None:
            calls = resources[call.resource] = ResourceCalls(call.resource)
        if call.kind in (Kind.READ, Kind.APPEND):
            calls.storage.append(call)
        elif call.kind in (Kind.CHECK, Kind.GET_LOCK):
            calls.observations.append(call)
        else:
            calls.leases.setdefault(call.lease, []).append(call)
    return resources


def over_s(call: Operation) -> float:
    """Return when a call can have no effect any more; a call with unknown outcome always can."""
    if call.outcome is Outcome.UNKNOWN or call.completed_s is None:
        return inf
    return call.completed_s


def answered_s(call: Operation) -> float:
    assert call.completed_s is not None, "the call has no answer"
    return call.completed_s


def greater(one: Operation, other: Operation) -> Operation:
    """Return the call with the greater token, or the first call if the tokens are equal."""
    return other if other.token > one.token else one


def is_possible(call: Operation) -> bool:
    """Tell whether a record can be true: its end follows its begin, and a known outcome has an answer."""
    if call.completed_s is None:
        return call.outcome is Outcome.UNKNOWN
    return call.completed_s >= call.invoked_s


def overlaps(faults: Sequence[Fault], began_s: float, ended_s: float) -> bool:
    """Tell whether a fault lasted at some instant of this span, its ends included."""
    return any(fault.began_s <= ended_s and began_s <= fault.ended_s for fault in faults)


@dataclass(frozen=True, slots=True)
class Excuses:
    """The faults that allow leases to overlap or to end before their validity.

    Attributes:
        copies: faults that allow overlapping leases, lengthened by the time after them.
        forgetting: faults by which nodes lost holds, up to the nodes' return.
        forgetful_max: how many nodes may forget during a lease without ending it.
    """

    clocks: Sequence[Fault]
    wiped: Sequence[Fault]
    copies: Sequence[Fault]
    forgetting: Sequence[Fault]
    forgetful_max: int

    @classmethod
    def of(cls, faults: Sequence[Fault], *, node_count: int) -> Self:
        return cls(
            clocks=[fault for fault in faults if fault.moves_clocks],
            wiped=[fault for fault in faults if fault.kind == MAJORITY_WIPED],
            copies=[
                replace(fault, ended_s=fault.ended_s + fault.overlaps_s)
                for fault in faults
                if fault.overlaps_s is not None
            ],
            forgetting=[
                replace(fault, ended_s=inf if fault.rejoined_s is None else fault.rejoined_s)
                for fault in faults
                if fault.forgets
            ],
            forgetful_max=(node_count - 1) // 2,
        )

    def overlap(self, called_s: float, at_s: float) -> bool:
        """Tell whether leases may begin to overlap at `at_s`; the earlier one was requested at `called_s`."""
        return overlaps(self.clocks, called_s, at_s) or overlaps(self.copies, at_s, at_s)

    def early_end(self, called_s: float, at_s: float) -> bool:
        """Tell whether a lease that was requested at `called_s` may have ended at `at_s`."""
        forgetful = {
            node for fault in self.forgetting if overlaps([fault], called_s, at_s) for node in fault.forgets
        }
        return (
            self.overlap(called_s, at_s)
            or overlaps(self.wiped, called_s, at_s)
            or len(forgetful) > self.forgetful_max
        )
