"""A short mixed run keeps every promise, and the checker finds two servers that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.chaos.cluster import Plan
from harness.chaos.recorder import Recorder, settled
from harness.chaos.run import Run, Schedule, run
from harness.chaos.services import harness_program
from harness.history.checker import check
from harness.history.records import Kind, Outcome, read_operations
from harness.history.verdict import Invariant, Verdict

# Faults that end within seconds; `make chaos` injects all faults.
_MIX = (
    "holder paused",
    "holder killed",
    "server paused",
    "server killed",
    "server drained",
    "storage paused",
    "storage killed",
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


async def _judged(plan: Plan, schedule: Schedule, folder: Path) -> tuple[Run, Verdict]:
    ran = await run(plan, schedule, folder=folder, say=print)
    return ran, check(ran.history)


def test_a_call_that_was_never_answered_is_recorded_as_unknown_and_every_other_once(tmp_path: Path) -> None:
    """The client died in the middle of a line."""
    path = tmp_path / "records.jsonl"
    with Recorder(path, client="a") as recorder:
        with recorder.call(Kind.ACQUIRE, "r", "answered", ttl_s=2.0) as call:
            call.ok(token=7, until_s=call.operation.invoked_s + 1.9)
        with recorder.call(Kind.RELEASE, "r", "answered", token=7) as call:
            call.failed("NOT_HELD")
        with pytest.raises(OSError, match="gone"), recorder.call(Kind.ACQUIRE, "r", "broken"):
            raise OSError("gone")
        recorder.call(Kind.ACQUIRE, "r", "open").__enter__()
    with path.open("a") as file:
        file.write('{"client":"a","kind":"acq')
    answered, released, broken, unanswered = settled(read_operations(path))
    assert (answered.outcome, answered.token, answered.ttl_s) == (Outcome.OK, 7, 2.0)
    assert answered.completed_s is not None
    assert answered.invoked_s <= answered.completed_s < answered.until_s
    assert (released.outcome, released.detail, released.token) == (Outcome.FAILED, "NOT_HELD", 7)
    assert (broken.outcome, broken.detail) == (Outcome.UNKNOWN, "OSError")
    assert broken.completed_s is not None
    assert (unanswered.outcome, unanswered.completed_s) == (Outcome.UNKNOWN, None)


async def test_a_mixed_run_over_three_nodes_keeps_every_promise(tmp_path: Path) -> None:
    """Clients, servers and nodes stop, die, forget and are cut off. An invalid run is repeated once."""
    for seed in (1, 2):
        schedule = Schedule(seed=seed, lasts_s=25.0, faults=_MIX, asked=("holder paused",))
        folder = tmp_path / str(seed)
        folder.mkdir()
        ran, verdict = await _judged(Plan(), schedule, folder)
        assert not verdict.violations
        assert not ran.defects
        invalid = [*ran.wrong, *verdict.invalid]
        if not invalid:
            assert len(ran.history.faults) >= 25 / 60 * 17
            return
    pytest.fail(f"no run proved anything: {invalid}")


async def test_without_fencing_an_update_is_lost(tmp_path: Path) -> None:
    """The faults cause late writes, and the checker sees the lost update."""
    plan = Plan(storage_program=harness_program("harness.chaos.broken_program", "unfenced"))
    faults = ("holder paused",)
    schedule = Schedule(
        seed=1,
        lasts_s=15.0,
        faults=faults,
        client_count=4,
        mix=("append", "append", "append", "sdk"),
        tail_s=0.0,
    )
    _, verdict = await _judged(plan, schedule, tmp_path)
    assert any(
        violation.invariant is Invariant.FENCED and "lost" in violation.words
        for violation in verdict.violations
    )


async def test_a_quorum_of_less_than_a_majority_is_found_out(tmp_path: Path) -> None:
    """A server that asks one node of three grants two leases at a time, or one token twice."""
    plan = Plan(server_program=harness_program("harness.chaos.broken_program", "minority"))
    schedule = Schedule(
        seed=1,
        lasts_s=8.0,
        faults=("partition: ring",),
        client_count=3,
        mix=("race", "keep", "race"),
        tail_s=0.0,
    )
    _, verdict = await _judged(plan, schedule, tmp_path)
    found = {violation.invariant for violation in verdict.violations}
    assert found & {Invariant.UNIQUE, Invariant.ORDERED, Invariant.EXCLUSION}
