"""P: after the healing clients acquire again and all calls work; a majority that forgot grants nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness.history.calls import ResourceCalls, answered_s, over_s
from harness.history.leases import windows
from harness.history.records import MAJORITY_WIPED, Fault, Kind, Operation, Outcome
from harness.history.verdict import Invariant, Violation

_GRANTING = (Kind.ACQUIRE, Kind.RENEW, Kind.CHECK, Kind.GET_LOCK)
# A client acquires a free resource within this many ttls after the healing.
_TTLS_MAX = 3
# By then connections are established again. A share of calls may fail, as the machine may stall for a moment.
_CALM_AFTER_S = 6.0
_UNANSWERED_SHARE_MAX = 0.01


def judge_progress(resource: ResourceCalls, healed_s: float) -> Iterator[Violation]:
    """Yield that no client acquired a resource in time; without a try nothing is known."""
    tried = last_acquires(resource, healed_s)
    if not tried:
        return
    # The tries may ask for leases of several lengths.
    ttl_s = max(call.ttl_s for call in tried)
    due_s = _free_s(resource, max(healed_s, tried[0].invoked_s)) + _TTLS_MAX * ttl_s
    granted_s = list(map(answered_s, resource.grants()))
    if any(healed_s <= at_s <= due_s for at_s in granted_s):
        return
    # A try that ended early, or that began too late, proves nothing about the time between.
    still_s = due_s - ttl_s
    if any(call.invoked_s <= due_s and over_s(call) >= still_s for call in tried) or not granted_s:
        says = f"no client acquired it within {_TTLS_MAX} ttls after the healing; the last try"
        yield Violation(Invariant.PROGRESS, resource.name, says, (tried[-1],))


def judge_service(operations: Iterable[Operation], healed_s: float) -> Iterator[Violation]:
    """Yield each kind of call, server and workload that succeeded before the healing, and never after it."""
    for name, call in _not_ok_again(operations, healed_s, tried=True):
        says = f"no {name} succeeded after the healing; the last success"
        yield Violation(Invariant.PROGRESS, call.resource, says, (call,))


def judge_calm(operations: Iterable[Operation], healed_s: float) -> Iterator[Violation]:
    """Yield that calls were refused, or had unknown outcomes, long after the healing."""
    # The SDK does not report what came of a release.
    late = [
        call
        for call in operations
        if call.invoked_s >= healed_s + _CALM_AFTER_S and (call.kind is not Kind.RELEASE or call.server)
    ]
    failed = [call for call in late if call.admission_refused or call.outcome is Outcome.UNKNOWN]
    if len(failed) > _UNANSWERED_SHARE_MAX * len(late):
        says = f"{len(failed)} of {len(late)} calls failed long after the healing; the first one"
        yield Violation(Invariant.PROGRESS, failed[0].resource, says, (failed[0],))


def judge_forgotten(operations: Iterable[Operation], faults: Sequence[Fault]) -> Iterator[Violation]:
    """Yield what was granted, renewed or shown held while a majority had forgotten."""
    wiped = [fault for fault in faults if fault.kind == MAJORITY_WIPED]
    if not wiped:
        return
    for call in operations:
        if call.outcome is not Outcome.OK or call.kind not in _GRANTING or not (call.token or call.until_s):
            continue
        for fault in wiped:
            if fault.began_s < call.invoked_s and answered_s(call) < fault.ended_s:
                says = f"{call.kind} succeeded although a majority had forgotten"
                yield Violation(Invariant.PROGRESS, call.resource, says, (call,))


def untried_services(operations: Sequence[Operation], healed_s: float) -> list[str]:
    """Return what succeeded before the healing and was not tried after it: calls, servers and workloads."""
    if not operations or operations[-1].invoked_s < healed_s:
        return []
    return [name for name, _ in _not_ok_again(operations, healed_s, tried=False)]


def last_acquires(resource: ResourceCalls, healed_s: float) -> list[Operation]:
    """Return the Acquires of a resource that were called after the healing, in their order."""
    late = (call for call in resource.acquires() if call.invoked_s >= healed_s)
    return sorted(late, key=lambda call: call.invoked_s)


def _not_ok_again(
    operations: Iterable[Operation], healed_s: float, *, tried: bool
) -> list[tuple[str, Operation]]:
    """Return what succeeded only before the healing, each with its last success."""
    last: dict[str, Operation] = {}
    tried_after = set()
    for call in operations:
        for name in _services(call):
            if call.outcome is Outcome.OK:
                last[name] = call
            if call.invoked_s >= healed_s:
                tried_after.add(name)
    return [
        (name, call)
        for name, call in last.items()
        if call.invoked_s < healed_s and (name in tried_after) == tried
    ]


def _services(call: Operation) -> Iterator[str]:
    yield str(call.kind)
    if call.server:
        yield f"{call.kind} at {call.server}"
    if call.kind is Kind.ACQUIRE:
        # The name of a client is its workload and a number.
        yield f"{call.kind} of {call.client.rstrip('.0123456789')}"


def _free_s(resource: ResourceCalls, at_s: float) -> float:
    """Return when the last lease ends that was granted before this instant."""
    ends_s = [
        window.end_s
        for calls in resource.leases.values()
        for window in windows(calls)
        if window.start_s <= at_s
    ]
    return max([at_s, *ends_s])
