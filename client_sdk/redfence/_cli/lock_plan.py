"""When `redfence lock` has to stop its command, so that all of it is dead before the lease's validity ends. Pure.

    validity left   ────────────────────────────┬──────────── kill after ────────────┬──── margin ────┬ 0
    what is done    renewals go on, and fail    SIGTERM to the group                 SIGKILL           over

A lease that is lost outright has no time left: the group is killed at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# SIGKILL, and the kernel's tearing down of the processes, must fit into the margin even on a loaded machine.
_MARGIN_MS_MAX = 500.0
_MARGIN_SHARE = 1 / 10
# By default the command gets a quarter of the ttl to end by itself.
_KILL_AFTER_SHARE = 1 / 4
_KILL_AFTER_MS_MAX = 10_000.0
# More than half, and a single late renewal (due after a third) would end a command whose lease is in no danger.
_KILL_AFTER_SHARE_MAX = 1 / 2


class Stage(enum.Enum):
    """How far the command has been stopped."""

    RUNNING = "running"
    """It was not asked to stop."""
    TERMINATED = "terminated"
    """It got SIGTERM."""
    KILLED = "killed"
    """It got SIGKILL."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The two distances from the end.

    Attributes:
        kill_after_ms: from SIGTERM to SIGKILL.
        margin_ms: from SIGKILL to the end of the validity.
    """

    kill_after_ms: float
    margin_ms: float


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now.

    Attributes:
        stage: the stage to be in; if it is a new one, send its signal.
        wait_ms: how long nothing else is due unless something happens.
    """

    stage: Stage
    wait_ms: float


def make_plan(*, ttl_ms: float, kill_after_ms: float | None) -> Plan:
    """Return the plan for a ttl.

    Raises:
        ValueError: `kill_after_ms` leaves too little of the ttl.
    """
    margin_ms = min(_MARGIN_MS_MAX, ttl_ms * _MARGIN_SHARE)
    if kill_after_ms is None:
        return Plan(min(_KILL_AFTER_MS_MAX, ttl_ms * _KILL_AFTER_SHARE), margin_ms)
    if kill_after_ms > ttl_ms * _KILL_AFTER_SHARE_MAX:
        raise ValueError(
            f"--kill-after may be half of --ttl at most, {ttl_ms * _KILL_AFTER_SHARE_MAX / 1000:g} s"
        )
    return Plan(kill_after_ms, margin_ms)


def next_step(plan: Plan, *, stage: Stage, lost: bool, remaining_ms: float, terminated_for_ms: float) -> Step:
    """Return what to do while the command runs.

    Args:
        plan: the distances.
        stage: what was done before.
        lost: whether the lease is lost.
        remaining_ms: the validity left.
        terminated_for_ms: how long ago SIGTERM was sent; 0 if it was not.
    """
    to_kill_ms = 0.0 if lost else remaining_ms - plan.margin_ms
    if stage is Stage.TERMINATED:
        to_kill_ms = min(to_kill_ms, plan.kill_after_ms - terminated_for_ms)
    if stage is Stage.KILLED or to_kill_ms <= 0:
        return Step(Stage.KILLED, plan.margin_ms)
    to_terminate_ms = to_kill_ms - plan.kill_after_ms
    if stage is Stage.RUNNING and to_terminate_ms > 0:
        return Step(Stage.RUNNING, to_terminate_ms)
    return Step(Stage.TERMINATED, min(to_kill_ms, plan.kill_after_ms))
