"""The product over simulated nodes, networks, clocks and callers: every seed is well, every mutant is not.

A failure prints the command that runs its seed again.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from harness.simulation.history import letters
from harness.simulation.mutants import MUTANTS
from harness.simulation.world import Report, replay_command, simulate

SEEDS = 300
_SEEDS_PER_TEST = 25
# A mutant that is not found in so many is not found.
_MUTANT_SEEDS = 350
# Where some are found that few seeds find. If a change has made that one harmless, a later one is looked for.
_FIRST_SEEDS = {
    "counter from zero": 45,
    "no wait": 56,
    "holds end at a restart with proof": 300,
}
_TRACED_SEEDS = range(3)


def told(report: Report, mutant: str = "") -> str:
    """Return what is wrong, and how to see it again."""
    return "\n".join((f"seed {report.seed}: {replay_command(report.seed, mutant)}", *report.problems[:10]))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, _SEEDS_PER_TEST))
def test_every_promise_holds_through_every_fault(first: int) -> None:
    """Tokens are unique and ordered, leases exclude, storage is fenced, no call hangs, all recovers."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + _SEEDS_PER_TEST):
        report = simulate(seed)
        assert not report.problems, told(report)
        counts += report.counts
    # A world in which nothing happens proves nothing.
    assert counts["grants"] > 20 * _SEEDS_PER_TEST
    assert counts["acknowledged"] > 5 * _SEEDS_PER_TEST
    assert counts["stale"] > 0
    assert counts["forced"] > 0
    assert counts["closed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant: str) -> None:
    """Each rule is needed: without it one of some seeds breaks the very promise that the rule is for."""
    first = _FIRST_SEEDS.get(mutant, 0)
    for seed in range(first, first + _MUTANT_SEEDS):
        report = simulate(seed, MUTANTS[mutant])
        if letters(report.problems) & set(MUTANTS[mutant].breaks.split()):
            return
    pytest.fail(f"{mutant}: not caught in {_MUTANT_SEEDS} seeds")


@pytest.mark.slow
def test_one_seed_is_one_trace_in_every_process() -> None:
    """A failure can be replayed: no address, order of a set or clock of the machine matters."""
    code = "from harness.simulation.world import simulate\nfor seed in {}: print(simulate(seed).trace_hash)"
    tests = Path(__file__).parents[1]
    runs = [
        subprocess.run(
            [sys.executable, "-c", code.format(list(_TRACED_SEEDS))],
            env={"PYTHONPATH": str(tests), "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0].split())) == len(_TRACED_SEEDS), "they are different worlds"
    assert runs[0].split()[0] == simulate(0).trace_hash
