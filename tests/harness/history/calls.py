"""The calls of a run, sorted out by resource and lease, and what can be said of one by its record alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Self

from harness.history.records import MAJORITY_WIPED, Fault, Kind, Operation, Outcome

_STORAGE = (Kind.READ, Kind.APPEND)
_SIGHTS = (Kind.CHECK, Kind.GET_LOCK)


@dataclass(slots=True)
class ResourceCalls:
    """The calls for one resource, each list in the order of invocation.

    Attributes:
        leases: acquires, renewals and releases, by lease.
        storage: reads and appends.
        observations: checks and looks, which change nothing.
    """

    name: str
    leases: dict[str, list[Operation]] = field(default_factory=dict)
    storage: list[Operation] = field(default_factory=list)
    observations: list[Operation] = field(default_factory=list)


def by_resource(operations: Iterable[Operation]) -> dict[str, ResourceCalls]:
    """Return the calls by resource.

    Args:
        operations: in the order of their invocation.
    """
    resources: dict[str, ResourceCalls] = {}
    for call in operations:
        calls = resources.get(call.resource)
        if calls is None:
            calls = resources[call.resource] = ResourceCalls(call.resource)
        if call.kind in _STORAGE:
            calls.storage.append(call)
        elif call.kind in _SIGHTS:
            calls.observations.append(call)
        else:
            lease = calls.leases.get(call.lease)
            if lease is None:
                calls.leases[call.lease] = [call]
            else:
                lease.append(call)
    return resources


def over_s(call: Operation) -> float:
    """Return the instant from which on a call has no effect any more: an unknown one may have it at any time."""
    if call.outcome is Outcome.UNKNOWN or call.completed_s is None:
        return inf
    return call.completed_s


def answered_s(call: Operation) -> float:
    """Return when a call that was OK was answered."""
    assert call.completed_s is not None, "a call that was OK was answered"
    return call.completed_s


def greater(one: Operation, other: Operation) -> Operation:
    """Return the call with the greater token; the first of two with the same."""
    return other if other.token > one.token else one


def is_possible(call: Operation) -> bool:
    """Tell whether a record could be true: nothing ends before it begins, and what is known was answered."""
    if call.completed_s is None:
        return call.outcome is Outcome.UNKNOWN
    return call.completed_s >= call.invoked_s


def reached(faults: Sequence[Fault], began_s: float, ended_s: float) -> bool:
    """Tell whether one of a few faults lasted at an instant of that span, its ends included."""
    return any(fault.began_s <= ended_s and began_s <= fault.ended_s for fault in faults)


@dataclass(frozen=True, slots=True)
class Excuses:
    """What faults excuse: that leases overlap, or are over before their validity is.

    Attributes:
        clocks: the faults that move clocks.
        wiped: those by which a majority forgot.
        copies: those for which leases may overlap, each with the time after it.
    """

    clocks: Sequence[Fault]
    wiped: Sequence[Fault]
    copies: Sequence[Fault]

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> Self:
        """Return what these faults excuse."""
        return cls(
            clocks=[fault for fault in faults if fault.moves_clocks],
            wiped=[fault for fault in faults if fault.kind == MAJORITY_WIPED],
            copies=[
                replace(fault, ended_s=fault.ended_s + fault.overlaps_s)
                for fault in faults
                if fault.overlaps_s is not None
            ],
        )

    def overlap(self, called_s: float, at_s: float) -> bool:
        """Tell whether leases may begin to overlap at an instant, the earlier of which was called for at `called_s`."""
        return reached(self.clocks, called_s, at_s) or reached(self.copies, at_s, at_s)

    def early_end(self, called_s: float, at_s: float) -> bool:
        """Tell whether a lease that was called for at `called_s` may be over at an instant of its validity."""
        return self.overlap(called_s, at_s) or reached(self.wiped, called_s, at_s)
