"""Judges a history by what clients were told; it asks no server and believes only the records.

A call with unknown outcome may have had its effect or not, and no rule assumes either. At equal instants the
rules assume the harmless order. Every rule sorts and sweeps, so a million calls take a fraction of a minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from harness.history.calls import Excuses, ResourceCalls, by_resource, is_possible
from harness.history.leases import judge_leases
from harness.history.observations import judge_observations
from harness.history.progress import judge_calm, judge_forgotten, judge_progress, judge_service
from harness.history.records import History, in_order
from harness.history.run_validity import count, why_invalid
from harness.history.storage import judge_storage
from harness.history.tokens import judge_tokens
from harness.history.verdict import Invariant, Verdict, Violation

# The verdict lists this many violations of each invariant. A run that broke early may have one for each call.
VIOLATIONS_MAX = 1_000


def check(history: History) -> Verdict:
    """Return whether a run kept every promise, and whether it proves that."""
    possible = replace(history, operations=in_order(filter(is_possible, history.operations)))
    resources = by_resource(possible.operations)
    found: Counter[Invariant] = Counter()
    violations = []
    for violation in _violations(possible, resources):
        found[violation.invariant] += 1
        if found[violation.invariant] <= VIOLATIONS_MAX:
            violations.append(replace(violation, began_s=history.began_s))
    counts = count(possible, found)
    return Verdict(
        violations=tuple(sorted(violations, key=lambda each: each.at_s)),
        invalid=tuple(why_invalid(history, resources.values(), counts)),
        counts=counts,
    )


def require(history: History, *invariants: Invariant) -> None:
    """Fail with the first violation of these invariants; for suites that record only some kinds of calls."""
    for violation in check(history).violations:
        assert violation.invariant not in invariants, f"{violation.resource!r}: {violation.words}"


def _violations(history: History, resources: dict[str, ResourceCalls]) -> Iterator[Violation]:
    excuses = Excuses.of(history.faults, node_count=history.node_count)
    for resource in resources.values():
        yield from judge_tokens(resource)
        yield from judge_leases(resource, excuses)
        yield from judge_observations(resource, history.faults, excuses)
        yield from judge_progress(resource, history.healed_s)
    yield from judge_service(history.operations, history.healed_s)
    yield from judge_calm(history.operations, history.healed_s)
    yield from judge_forgotten(history.operations, history.faults)
    for name in dict.fromkeys((*resources, *history.kept)):
        calls = resources[name].storage if name in resources else []
        yield from judge_storage(name, calls, history.kept.get(name, ()), history.ended_s)
