"""The judge of a run: what clients were told, held against what redfence promises. It asks no server, and believes nothing but the records.

What is unknown is unknown: a call without an answer may have had its effect or not, and no rule takes a side. Where two instants are equal,
whichever order is harmless is assumed. Every rule sorts and sweeps, so that a million calls are judged in a fraction of a minute.
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
from harness.history.verdict import Invariant, Verdict, Violation, Words

# Of each invariant so many are told: a run that broke at its beginning may hold as many as it has calls.
VIOLATIONS_TOLD_MAX = 1_000


def check(history: History) -> Verdict:
    """Return whether a run kept every promise, and whether it proves that."""
    possible = tuple(call for call in history.operations if is_possible(call))
    told = replace(history, operations=in_order(possible))
    resources = by_resource(told.operations)
    found: Counter[Invariant] = Counter()
    violations = []
    for violation in _violations(told, resources):
        found[violation.invariant] += 1
        if found[violation.invariant] <= VIOLATIONS_TOLD_MAX:
            violations.append(violation)
    counts = count(told, found)
    return Verdict(
        violations=tuple(sorted(violations, key=lambda each: each.at_s)),
        invalid=tuple(why_invalid(history, resources.values(), counts)),
        counts=counts,
    )


def _violations(history: History, resources: dict[str, ResourceCalls]) -> Iterator[Violation]:
    words, excuses = Words(history.began_s), Excuses.of(history.faults)
    for resource in resources.values():
        yield from judge_tokens(resource, words)
        yield from judge_leases(resource, excuses, words)
        yield from judge_observations(resource, history.faults, excuses, words)
        yield from judge_progress(resource, history.healed_s, words)
    yield from judge_service(history.operations, history.healed_s, words)
    yield from judge_calm(history.operations, history.healed_s, words)
    yield from judge_forgotten(history.operations, history.faults, words)
    for name in dict.fromkeys((*resources, *history.kept)):
        calls = resources[name].storage if name in resources else []
        yield from judge_storage(name, calls, history.kept.get(name, ()), history.ended_s, words)
