"""A cluster that gets another number of nodes under faults: every seed is well, every mutant is not."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.simulation import resizing as world_of_resizes
from harness.simulation.history import letters
from harness.simulation.resizing import ResizedWorld
from harness.simulation.world import Rules, simulate
from redfence_server.operations import recovery_plan, resizing

_SEEDS_PER_TEST = 50
_MUTANT_SEEDS = 200


async def _retires_no_node(*_: object) -> None:
    """Leave the old cluster as it is."""


def _shows_no_token(_: object) -> int:
    return 0


MUTANTS = {
    "the old cluster goes on": Rules(
        patches=((resizing.ClusterResize, "_retire", _retires_no_node),), breaks="T1 T2 L"
    ),
    "no wait": Rules(patches=((world_of_resizes, "wait_ms", lambda _: 0.0),), breaks="L"),
    "the successor begins at 0": Rules(
        patches=((recovery_plan, "greatest_number", _shows_no_token),), breaks="T1 T2"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, _SEEDS_PER_TEST))
def test_a_resize_keeps_every_promise_through_faults_and_interruptions(first: int) -> None:
    """Tokens are unique and ordered, leases exclude, storage is fenced, and the successor grants."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + _SEEDS_PER_TEST):
        report = simulate(seed, make=ResizedWorld)
        assert not report.problems, (seed, *report.problems[:10])
        counts += report.counts
    assert counts["resized"] == _SEEDS_PER_TEST
    assert counts["grants"] > 10 * _SEEDS_PER_TEST


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_resize_that_leaves_a_rule_out_is_caught(mutant: str) -> None:
    rules = MUTANTS[mutant]
    for seed in range(_MUTANT_SEEDS):
        report = simulate(seed, rules, make=ResizedWorld)
        if letters(report.problems) & set(rules.breaks.split()):
            return
    pytest.fail(f"{mutant}: not caught in {_MUTANT_SEEDS} seeds")
