"""Short chaos runs: a mixed one keeps every promise, and two that cannot are found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.chaos.checker import check
from harness.chaos.checker_verdict import Invariant, Verdict
from harness.chaos.cluster import Plan, harness_program
from harness.chaos.run import Course, Run, run

# Faults that end within seconds; `make chaos` has all of them. Two are asked for, by which the run is a valid one.
_MIX = (
    "holder paused",
    "holder killed",
    "server paused",
    "server killed",
    "node paused",
    "node killed",
    "node wiped",
    "log cut",
    "partition: halves",
    "partition: one way",
    "node never answers",
    "replies lost",
    "connections reset",
    "maxclients",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def _judged(plan: Plan, course: Course, folder: Path) -> tuple[Run, Verdict]:
    ran = await run(plan, course, folder=folder, say=print)
    return ran, check(ran.history)


async def test_a_mixed_run_over_three_nodes_keeps_every_promise(tmp_path: Path) -> None:
    """With holders, servers and nodes that stop, die, forget and are cut off."""
    course = Course(seed=1, lasts_s=25.0, faults=_MIX, asked=("holder paused",))
    ran, verdict = await _judged(Plan(), course, tmp_path)
    assert not verdict.violations
    assert not verdict.invalid
    assert not ran.wrong
    assert not ran.defects
    assert len(ran.history.faults) >= 25 / 60 * 17


async def test_without_fencing_an_update_is_lost(tmp_path: Path) -> None:
    """So the faults do what the storage is there for, and the judge sees it."""
    plan = Plan(storage_program=harness_program("harness.chaos.unfenced_storage"))
    faults = ("holder paused",)
    course = Course(
        seed=1,
        lasts_s=15.0,
        faults=faults,
        client_count=4,
        mix=("append", "append", "append", "sdk"),
        tail_s=0.0,
    )
    _, verdict = await _judged(plan, course, tmp_path)
    assert any(
        violation.invariant is Invariant.FENCED and "lost" in violation.words
        for violation in verdict.violations
    )


async def test_a_quorum_of_less_than_a_majority_is_found_out(tmp_path: Path) -> None:
    """A server for which one node of three is enough gives two leases at a time, or a token twice."""
    plan = Plan(server_program=harness_program("harness.chaos.minority_server"))
    course = Course(
        seed=1,
        lasts_s=8.0,
        faults=("partition: ring",),
        client_count=3,
        mix=("race", "keep", "race"),
        tail_s=0.0,
    )
    _, verdict = await _judged(plan, course, tmp_path)
    found = {violation.invariant for violation in verdict.violations}
    assert found & {Invariant.UNIQUE, Invariant.ORDERED, Invariant.EXCLUSION}
