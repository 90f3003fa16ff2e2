"""The calls of a run, sorted out by resource and lease, and what can be said of one by its record alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from harness.chaos.records import Fault, Kind, Operation, Outcome

_STORAGE = (Kind.READ, Kind.APPEND)
_SIGHTS = (Kind.CHECK, Kind.LOOK)


@dataclass(slots=True)
class ResourceCalls:
    """The calls for one resource, each list in the order of invocation.

    Attributes:
        leases: acquires, renewals and releases, by lease.
        storage: reads and appends.
        sights: checks and looks, which change nothing.
    """

    name: str
    leases: dict[str, list[Operation]] = field(default_factory=dict)
    storage: list[Operation] = field(default_factory=list)
    sights: list[Operation] = field(default_factory=list)


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
            calls.sights.append(call)
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
