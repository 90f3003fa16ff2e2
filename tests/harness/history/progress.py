"""P: once all is well every resource is acquired by somebody, what worked before works, and calls are answered; nothing is granted while a majority has forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness.history.calls import ResourceCalls, answered_s, over_s
from harness.history.leases import windows
from harness.history.records import MAJORITY_WIPED, Fault, Kind, Operation, Outcome
from harness.history.verdict import Invariant, Violation, Words, shown_at_s

_DONE = {
    Kind.ACQUIRE: "granted",
    Kind.RENEW: "renewed",
    Kind.CHECK: "told live",
    Kind.GET_LOCK: "seen held",
}
# Within how many ttls somebody acquires once faults have stopped.
_TTLS_MAX = 3
# By then connections are made again as well, and a call is answered; but for so many, as the machine may stand still for a moment.
_CALM_AFTER_S = 6.0
_UNANSWERED_SHARE_MAX = 0.01


def judge_progress(resource: ResourceCalls, healed_s: float, words: Words) -> Iterator[Violation]:
    """Yield that nobody acquired a resource in time after all was healed and it was free; where nobody tried, nothing is known."""
    tried = last_acquires(resource, healed_s)
    if not tried:
        return
    # Those who try may want leases of several lengths.
    ttl_s = max(call.ttl_s for call in tried)
    due_s = _free_s(resource, max(healed_s, tried[0].invoked_s)) + _TTLS_MAX * ttl_s
    granted_s = [answered_s(call) for call in _acquires(resource) if call.outcome is Outcome.OK]
    if any(healed_s <= at_s <= due_s for at_s in granted_s):
        return
    # Whoever came early and gave up, and whoever came too late, proves nothing against the time between.
    still_s = due_s - ttl_s
    if any(call.invoked_s <= due_s and over_s(call) >= still_s for call in tried) or not granted_s:
        said = (
            f"nobody acquired it within {_TTLS_MAX} ttls after all was healed at {words.instant(healed_s)} and it was free; the last try: "
            f"{words.call(tried[-1])}"
        )
        yield Violation(Invariant.PROGRESS, resource.name, said, shown_at_s(tried[-1]), (tried[-1],))


def judge_service(operations: Iterable[Operation], healed_s: float, words: Words) -> Iterator[Violation]:
    """Yield each kind of call, each server and each workload that was OK before all was healed, and after it was tried in vain."""
    for name, call in _not_ok_again(operations, healed_s, tried=True):
        said = f"no {name} was OK after all was healed at {words.instant(healed_s)}; the last one: {words.call(call)}"
        yield Violation(Invariant.PROGRESS, call.resource, said, shown_at_s(call), (call,))


def judge_calm(operations: Iterable[Operation], healed_s: float, words: Words) -> Iterator[Violation]:
    """Yield that calls were turned away, or had no certain answer, long after all was healed."""
    late = [call for call in operations if call.invoked_s >= healed_s + _CALM_AFTER_S and _is_told(call)]
    vain = [call for call in late if call.admission_refused or call.outcome is Outcome.UNKNOWN]
    if len(vain) > _UNANSWERED_SHARE_MAX * len(late):
        call = vain[0]
        said = (
            f"{len(vain)} of {len(late)} calls came to nothing although all had been healed at {words.instant(healed_s)}; "
            f"the first one: {words.call(call)}"
        )
        yield Violation(Invariant.PROGRESS, call.resource, said, shown_at_s(call), (call,))


def _is_told(call: Operation) -> bool:
    """Tell whether the caller is told what came of it: whoever releases by the SDK is not."""
    return call.kind is not Kind.RELEASE or bool(call.server)


def untried_services(operations: Sequence[Operation], healed_s: float) -> list[str]:
    """Return each kind of call, each server and each workload that was OK before all was healed and that nobody tried after, while others did."""
    if not operations or operations[-1].invoked_s < healed_s:
        return []
    return [name for name, _ in _not_ok_again(operations, healed_s, tried=False)]


def _not_ok_again(
    operations: Iterable[Operation], healed_s: float, *, tried: bool
) -> list[tuple[str, Operation]]:
    """Return what was OK before and not after, with its last call that was; either what was tried or what was not."""
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
        # A client is called by its workload and a number.
        yield f"{call.kind} of {call.client.rstrip('.0123456789')}"


def _free_s(resource: ResourceCalls, at_s: float) -> float:
    """Return from when on nobody counts on a lease that was granted before this instant."""
    ends_s = [
        window.end_s
        for calls in resource.leases.values()
        for window in windows(calls)
        if window.start_s <= at_s
    ]
    return max([at_s, *ends_s])


def judge_forgotten(
    operations: Iterable[Operation], faults: Sequence[Fault], words: Words
) -> Iterator[Violation]:
    """Yield what was granted, renewed or seen live while a majority had forgotten."""
    wiped = [fault for fault in faults if fault.kind == MAJORITY_WIPED]
    if not wiped:
        return
    for call in operations:
        if call.outcome is not Outcome.OK or call.kind not in _DONE or not (call.token or call.until_s):
            continue
        for fault in wiped:
            if fault.began_s < call.invoked_s and answered_s(call) < fault.ended_s:
                span = f"from {words.instant(fault.began_s)} to {words.instant(fault.ended_s)}"
                said = f"it was {_DONE[call.kind]} although a majority had been wiped, {span}: {words.call(call)}"
                yield Violation(Invariant.PROGRESS, call.resource, said, shown_at_s(call), (call,))


def last_acquires(resource: ResourceCalls, healed_s: float) -> list[Operation]:
    """Return the Acquires of a resource that were called after all was healed, in their order."""
    late = (call for call in _acquires(resource) if call.invoked_s >= healed_s)
    return sorted(late, key=lambda call: call.invoked_s)


def _acquires(resource: ResourceCalls) -> Iterator[Operation]:
    return (call for calls in resource.leases.values() for call in calls if call.kind is Kind.ACQUIRE)
