"""`redfence lock` in steps of a millisecond: the group is always dead before the validity ends."""

from __future__ import annotations

import itertools

import pytest

from redfence._cli.lock_plan import Plan, Stage, Step, make_plan, next_step

_TTLS_MS = (100.0, 300.0, 1000.0, 10_000.0, 300_000.0)


@pytest.mark.parametrize("ttl_ms", _TTLS_MS)
@pytest.mark.parametrize("kill_after_share", [None, 0.0, 0.1, 0.5])
def test_a_lease_that_is_never_renewed_again_ends_the_group_before_its_validity(
    ttl_ms: float, kill_after_share: float | None
) -> None:
    kill_after_ms = None if kill_after_share is None else kill_after_share * ttl_ms
    plan = make_plan(ttl_ms=ttl_ms, kill_after_ms=kill_after_ms)
    validity_ms, now_ms, stage, terminated_at_ms = ttl_ms * 0.99 - 2, 0.0, Stage.RUNNING, 0.0
    seen = {}
    while stage is not Stage.KILLED:
        terminated_for_ms = now_ms - terminated_at_ms if stage is Stage.TERMINATED else 0.0
        step = next_step(
            plan,
            stage=stage,
            lost=False,
            remaining_ms=validity_ms - now_ms,
            terminated_for_ms=terminated_for_ms,
        )
        if step.stage is not stage:
            seen[step.stage] = now_ms
            terminated_at_ms = now_ms
        stage = step.stage
        now_ms += step.wait_ms
    assert seen[Stage.KILLED] == pytest.approx(validity_ms - plan.margin_ms)
    if plan.kill_after_ms:
        assert seen[Stage.TERMINATED] == pytest.approx(seen[Stage.KILLED] - plan.kill_after_ms)
        assert seen[Stage.TERMINATED] > ttl_ms / 3, "a renewal that is due after a third is waited for"


@pytest.mark.parametrize(("stage", "remaining_ms"), list(itertools.product(Stage, [0.0, 1.0, 5000.0])))
def test_a_lost_lease_kills_at_once_in_every_stage(stage: Stage, remaining_ms: float) -> None:
    plan = Plan(kill_after_ms=2000.0, margin_ms=500.0)
    step = next_step(plan, stage=stage, lost=True, remaining_ms=remaining_ms, terminated_for_ms=0.0)
    assert step.stage is Stage.KILLED


def test_a_lease_that_is_renewed_in_time_disturbs_nobody() -> None:
    plan = make_plan(ttl_ms=10_000.0, kill_after_ms=None)
    step = next_step(plan, stage=Stage.RUNNING, lost=False, remaining_ms=9000.0, terminated_for_ms=0.0)
    assert step == Step(Stage.RUNNING, 9000.0 - 500.0 - 2500.0)


def test_sigkill_follows_sigterm_after_kill_after_despite_a_renewal() -> None:
    plan = Plan(kill_after_ms=2000.0, margin_ms=500.0)
    step = next_step(plan, stage=Stage.TERMINATED, lost=False, remaining_ms=9000.0, terminated_for_ms=500.0)
    assert step == Step(Stage.TERMINATED, 1500.0)
    step = next_step(plan, stage=Stage.TERMINATED, lost=False, remaining_ms=9000.0, terminated_for_ms=2000.0)
    assert step.stage is Stage.KILLED


def test_a_grace_longer_than_half_the_ttl_is_refused() -> None:
    with pytest.raises(ValueError, match="half of --ttl"):
        make_plan(ttl_ms=1000.0, kill_after_ms=501.0)
