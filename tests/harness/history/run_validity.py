"""The figures of a run, and whether it proves anything: a run in which nothing happened breaks no promise either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from harness.history.calls import ResourceCalls, answered_s, is_possible
from harness.history.progress import last_acquires, untried_services
from harness.history.records import History, Kind, Outcome
from harness.history.verdict import Counts, Invariant

# Below that, faults struck a system that was hardly in use.
_THROUGHPUT_MIN_PER_S = 100.0
# So many resources are named in one reason.
_NAMED_MAX = 5


def count(history: History, violations: Mapping[Invariant, int]) -> Counts:
    """Return the figures of a run."""
    ended = Counter((call.kind, call.outcome) for call in history.operations)
    refused = Counter(call.kind for call in history.operations if call.stale)
    struck_s = min((fault.began_s for fault in history.faults), default=history.healed_s)
    before = sum(
        call.outcome is Outcome.OK and history.began_s <= answered_s(call) < struck_s
        for call in history.operations
    )
    lasted_s = struck_s - history.began_s
    return Counts(
        operations={kind: {outcome: ended[kind, outcome] for outcome in Outcome} for kind in Kind},
        faults=dict(Counter(fault.kind for fault in history.faults)),
        violations={invariant: violations.get(invariant, 0) for invariant in Invariant},
        stale_writes_refused=refused[Kind.APPEND],
        stale_reads_refused=refused[Kind.READ],
        throughput_per_s=before / lasted_s if lasted_s > 0 else 0.0,
        longest_gap_s=_longest_gap_s(history),
    )


def why_invalid(history: History, resources: Iterable[ResourceCalls], counts: Counts) -> Iterator[str]:
    """Yield each reason why a run proves nothing."""
    impossible = sum(not is_possible(call) for call in history.operations)
    if impossible:
        yield f"{impossible} records cannot be true: they end before they begin, or are known without an answer"
    for kind, outcomes in counts.operations.items():
        if not outcomes[Outcome.OK]:
            yield f"no {kind} was ever OK"
    if counts.throughput_per_s < _THROUGHPUT_MIN_PER_S:
        yield (
            f"{counts.throughput_per_s:.1f} operations per second were OK before the first fault; it takes "
            f"{_THROUGHPUT_MIN_PER_S:g}"
        )
    missing = [kind for kind in dict.fromkeys(history.asked) if kind not in counts.faults]
    if missing:
        yield f"faults that were asked for and never struck: {', '.join(missing)}"
    if services := untried_services(history.operations, history.healed_s):
        yield f"nobody tried again after all was healed: {', '.join(services)}"
    untried, failed = [], []
    for resource in resources:
        if any(call.kind is Kind.ACQUIRE for calls in resource.leases.values() for call in calls):
            tried = last_acquires(resource, history.healed_s)
            if not tried:
                untried.append(resource.name)
            elif tried[-1].outcome is not Outcome.OK:
                failed.append(resource.name)
    if untried:
        yield f"nobody tried to acquire {_some(untried)} after all was healed"
    if failed:
        yield f"the last acquire of {_some(failed)} failed after all was healed"


def _some(names: list[str]) -> str:
    """Return a few names, and how many more there are."""
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(map(repr, names[:_NAMED_MAX])) + more


def _longest_gap_s(history: History) -> float:
    granted_s = sorted(
        answered_s(call)
        for call in history.operations
        if call.kind is Kind.ACQUIRE
        and call.outcome is Outcome.OK
        and history.began_s <= answered_s(call) <= history.healed_s
    )
    instants = [history.began_s, *granted_s, history.healed_s]
    return max(after - before for before, after in pairwise(instants))
