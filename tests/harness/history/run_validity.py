"""Counts a run, and tells why it proves nothing: a run in which nothing happened breaks no promise either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from harness.history.calls import ResourceCalls, answered_s, is_possible
from harness.history.progress import last_acquires, untried_services
from harness.history.records import History, Kind, Outcome
from harness.history.verdict import Counts, Invariant

# With less load, the faults met a system that was hardly in use.
_THROUGHPUT_MIN_PER_S = 100.0
# One reason names at most this many resources.
_NAMED_MAX = 5


def count(history: History, violations: Mapping[Invariant, int]) -> Counts:
    ended = Counter((call.kind, call.outcome) for call in history.operations)
    refused = Counter(call.kind for call in history.operations if call.stale)
    first_fault_s = min((fault.began_s for fault in history.faults), default=history.healed_s)
    before = sum(
        call.outcome is Outcome.OK and history.began_s <= answered_s(call) < first_fault_s
        for call in history.operations
    )
    lasted_s = first_fault_s - history.began_s
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
    impossible = sum(not is_possible(call) for call in history.operations)
    if impossible:
        yield f"{impossible} records are impossible: they end before they begin, or have no answer"
    for kind, outcomes in counts.operations.items():
        if not outcomes[Outcome.OK]:
            yield f"no {kind} succeeded"
    if counts.throughput_per_s < _THROUGHPUT_MIN_PER_S:
        yield (
            f"{counts.throughput_per_s:.1f} calls per second succeeded before the first fault; "
            f"{_THROUGHPUT_MIN_PER_S:g} are required"
        )
    missing = [kind for kind in dict.fromkeys(history.asked) if kind not in counts.faults]
    if missing:
        yield f"requested faults never began: {', '.join(missing)}"
    if services := untried_services(history.operations, history.healed_s):
        yield f"no client tried after the healing: {', '.join(services)}"
    untried, failed = [], []
    for resource in resources:
        if any(resource.acquires()):
            tried = last_acquires(resource, history.healed_s)
            if not tried:
                untried.append(resource.name)
            elif tried[-1].outcome is not Outcome.OK:
                failed.append(resource.name)
    if untried:
        yield f"no client tried to acquire {_some(untried)} after the healing"
    if failed:
        yield f"the last acquire of {_some(failed)} failed after the healing"


def _some(names: list[str]) -> str:
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
