"""Decides when `redfence lock` stops its command, so that the command ends before the lease does. Pure.

    validity left   ────────────────────────────┬──────────── kill after ────────────┬──── margin ────┬ 0
    action          renewals continue to fail   SIGTERM to the group                 SIGKILL           end

A lost lease has no validity left, so redfence kills the group at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Within the margin the kernel must end all processes after SIGKILL, even on a loaded machine.
_MARGIN_MS_MAX = 500.0
_MARGIN_SHARE = 1 / 10
# By default the command has a quarter of the ttl to end after SIGTERM.
_KILL_AFTER_SHARE = 1 / 4
_KILL_AFTER_MS_MAX = 10_000.0
# The first renewal is due after a third of the ttl. With more than half of the ttl here, one late
# renewal would stop a command whose lease is not at risk.
_KILL_AFTER_SHARE_MAX = 1 / 2


class Stage(enum.Enum):
    """How far `redfence lock` has gone in stopping its command."""

    RUNNING = "running"
    """No signal yet."""
    TERMINATED = "terminated"
    """SIGTERM was sent."""
    KILLED = "killed"
    """SIGKILL was sent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The times before the end of the validity.

    Attributes:
        kill_after_ms: the time from SIGTERM to SIGKILL.
        margin_ms: the time from SIGKILL to the end of the validity.
    """

    kill_after_ms: float
    margin_ms: float


@dataclass(frozen=True, slots=True)
class Step:
    """The next action.

    Attributes:
        stage: the stage to enter; if it is a new one, send its signal.
        wait_ms: how long to wait before the next step, unless an event comes first.
    """

    stage: Stage
    wait_ms: float


def make_plan(*, ttl_ms: float, kill_after_ms: float | None) -> Plan:
    """Return the plan for a ttl.

    Raises:
        ValueError: `kill_after_ms` is more than half of the ttl.
    """
    margin_ms = min(_MARGIN_MS_MAX, ttl_ms * _MARGIN_SHARE)
    if kill_after_ms is None:
        return Plan(min(_KILL_AFTER_MS_MAX, ttl_ms * _KILL_AFTER_SHARE), margin_ms)
    if kill_after_ms > ttl_ms * _KILL_AFTER_SHARE_MAX:
        raise ValueError(
            f"--kill-after is {kill_after_ms / 1000:g} s; "
            f"it may be at most half of --ttl, {ttl_ms * _KILL_AFTER_SHARE_MAX / 1000:g} s"
        )
    return Plan(kill_after_ms, margin_ms)


def next_step(plan: Plan, *, stage: Stage, lost: bool, remaining_ms: float, terminated_for_ms: float) -> Step:
    """Return the next action for a running command.

    Args:
        plan: the times before the end of the validity.
        stage: the present stage.
        lost: whether the lease is lost.
        remaining_ms: the validity that is left.
        terminated_for_ms: how long ago SIGTERM was sent; 0 if it was not sent.
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
