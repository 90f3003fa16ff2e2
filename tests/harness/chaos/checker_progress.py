"""P: once all is well every resource is acquired by somebody, and nothing is granted while more than a minority of the nodes has forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness.chaos.checker_calls import ResourceCalls, answered_s
from harness.chaos.checker_verdict import Invariant, Violation, Words, shown_at_s
from harness.chaos.records import MAJORITY_WIPED, Fault, Kind, Operation, Outcome

# Within how many ttls somebody acquires once faults have stopped.
_TTLS_MAX = 3


def judge_progress(resource: ResourceCalls, healed_s: float, words: Words) -> Iterator[Violation]:
    """Yield that nobody acquired a resource in time after all was healed; where nobody tried, nothing is known."""
    tried = last_acquires(resource, healed_s)
    if tried and not any(_is_in_time(call) for call in tried):
        said = (
            f"nobody acquired it within {_TTLS_MAX} ttls after all was healed at {words.instant(healed_s)}; the last try: "
            f"{words.call(tried[-1])}"
        )
        yield Violation(Invariant.PROGRESS, resource.name, said, shown_at_s(tried[-1]), (tried[-1],))


def judge_forgotten(
    operations: Iterable[Operation], faults: Sequence[Fault], words: Words
) -> Iterator[Violation]:
    """Yield what was granted or renewed while a majority had forgotten."""
    wiped = [fault for fault in faults if fault.kind == MAJORITY_WIPED]
    if not wiped:
        return
    for call in operations:
        if call.outcome is not Outcome.OK or call.kind not in (Kind.ACQUIRE, Kind.RENEW):
            continue
        for fault in wiped:
            if fault.began_s < call.invoked_s and answered_s(call) < fault.ended_s:
                said = (
                    f"it was {'granted' if call.kind is Kind.ACQUIRE else 'renewed'} although a majority of the nodes had been "
                    f"wiped, from {words.instant(fault.began_s)} to {words.instant(fault.ended_s)}: {words.call(call)}"
                )
                yield Violation(Invariant.PROGRESS, call.resource, said, shown_at_s(call), (call,))


def last_acquires(resource: ResourceCalls, healed_s: float) -> list[Operation]:
    """Return the Acquires of a resource that were called after all was healed."""
    return [
        call
        for calls in resource.leases.values()
        for call in calls
        if call.kind is Kind.ACQUIRE and call.invoked_s >= healed_s
    ]


def _is_in_time(call: Operation) -> bool:
    return call.outcome is Outcome.OK and answered_s(call) - call.invoked_s <= _TTLS_MAX * call.ttl_s
