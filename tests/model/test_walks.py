"""The product's own attempt and tally under an adversary that picks events by chance; mutants are caught."""

from __future__ import annotations

import re

import pytest

from harness.model.adversary import Rules
from harness.model.invariants import Violation
from harness.model.mutants import MUTANTS
from harness.model.search import walk, world_of

WALKS = 10_000
# The rarest mutant is caught about once in ten thousand walks; test_search.py finds it for sure.
WALKS_MAX = 40_000


@pytest.mark.slow
async def test_no_walk_breaks_an_invariant() -> None:
    """T1, T2, K and C hold under disagreeing nodes, retries, expiry, late and lost replies, handovers."""
    granted = sum(walk(world_of(seed), seed=seed) for seed in range(WALKS))
    # An adversary that lets nobody through proves nothing.
    assert granted > WALKS, granted


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
async def test_a_mutant_is_caught(name: str) -> None:
    """Every rule of the algorithm is needed: without it some walk breaks the invariant that it protects."""
    seed, found = _first_violation(MUTANTS[name])
    assert re.search(rf"^seed {seed}: {MUTANTS[name].breaks}:", found), found


async def test_one_seed_is_one_walk() -> None:
    """A failure can be replayed: the same seed makes the same moves and finds the same violation."""
    rules = MUTANTS["undo by lease"]
    assert _first_violation(rules) == _first_violation(rules)


def _first_violation(rules: Rules) -> tuple[int, str]:
    for seed in range(WALKS_MAX):
        try:
            walk(world_of(seed, rules), seed=seed)
        except Violation as found:
            return seed, str(found)
    pytest.fail(f"not caught in {WALKS_MAX} walks")
