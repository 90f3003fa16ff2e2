"""Waiting on several servers under seeded chance: invariants, and mutants that they must catch.

A failure names its seed, which is the test's id. To run it again:
`pytest "tests/simulation/test_waiting.py::<test>[<seed>]"`.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest

from harness.simulation.waiting_world import run_waiting_world
from redfence_server.locking.attempt import Attempt
from redfence_server.locking.node import Notice
from redfence_server.locking.tally import Tally
from redfence_server.waiting.hold_watch import HoldWatch
from redfence_server.waiting.line import Waiter
from redfence_server.waiting.queue import WaitQueue
from redfence_server.waiting.schedule import TrySchedule

SEEDS = range(40)
every_seed = pytest.mark.parametrize("seed", SEEDS)


@pytest.mark.slow
@every_seed
def test_while_nothing_is_lost_a_free_lock_goes_at_once_to_one_who_waits(seed: int) -> None:
    """Callers come and go. The lock is never free while they wait, nor held by one that is gone.

    No server tries again and again while the lock is held, also if a node lacks the hold.
    """
    _run(seed, quiet=True)


@pytest.mark.slow
@every_seed
def test_through_faults_tokens_grow_nobody_hangs_and_nothing_is_left(seed: int) -> None:
    """Connections break, nodes fall silent, notices are lost: every waiter is granted, one at a time."""
    _run(seed, quiet=False)


def _run(seed: int, *, quiet: bool) -> None:
    world = run_waiting_world(seed, quiet=quiet)
    assert not world.history.problems, f"seed {seed}: " + "\n".join(world.history.problems[:10])
    # A world in which nobody gets anything proves nothing.
    assert world.counts["granted"] > 20, f"seed {seed}: {world.counts}"


# --- it can fail ----------------------------------------------------------------------------------


_LEAVE, _INIT_TALLY = WaitQueue.leave, Tally.__init__


def _ignore_notice(queue: WaitQueue, notice: Notice) -> None:
    """A waiter is not told of the end of the hold."""


def _heed_every_notice(watch: HoldWatch, notice: Notice) -> bool:
    """The notice of a try's own undo calls for the next try."""
    return True


def _take_for_granted(watch: HoldWatch, node: int, *, granted: bool) -> None:
    """A node that answers after the decision is taken to have granted the try, whatever it answered."""
    watch._granted.add(node)


def _leave_without_waking(queue: WaitQueue, waiter: Waiter) -> None:
    """The next in line is not woken by one who leaves."""
    with patch.object(queue, "_arm", lambda: None):
        _LEAVE(queue, waiter)


def _undo_nothing(attempt: Attempt) -> None:
    """What was minted for a caller who is gone stays."""
    attempt._given_up = True


def _count_on_one_node_less(tally: Tally, node_count: int, *, nonce: str | None = None) -> None:
    """Two quorums need not share a node."""
    _INIT_TALLY(tally, node_count, nonce=nonce)
    tally._quorum = max(1, tally._quorum - 1)


def _wait_for_notices_alone(schedule: TrySchedule) -> float:
    """The end of a hold's ttl wakes no waiter."""
    return max(schedule._not_before_ms, schedule._try_at_ms)


MUTANTS: dict[str, tuple[type, str, Callable[..., object] | property, bool, str]] = {
    "notices are ignored": (WaitQueue, "noticed", _ignore_notice, True, "free for"),
    "a notice of the own undo is heeded": (HoldWatch, "is_news", _heed_every_notice, True, "tries for"),
    "a late refusal is not noted": (HoldWatch, "answered_late", _take_for_granted, True, "free for"),
    "one who leaves wakes nobody": (WaitQueue, "leave", _leave_without_waking, True, "free for"),
    "what is given up is not undone": (Attempt, "give_up", _undo_nothing, True, "is gone"),
    "a minority grants": (Tally, "__init__", _count_on_one_node_less, False, "is valid"),
    "the end of a hold rings no timer": (
        TrySchedule,
        "due_at_ms",
        property(_wait_for_notices_alone),
        False,
        "hang",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule is needed: without it a world of one of the first seeds reports a problem."""
    owner, method, mutant, quiet, found = MUTANTS[name]
    monkeypatch.setattr(owner, method, mutant)
    worlds = (run_waiting_world(seed, quiet=quiet) for seed in SEEDS[:30])
    assert any(found in problem for world in worlds for problem in world.history.problems)


@pytest.mark.slow
def test_one_seed_is_one_trace() -> None:
    """A failure can be replayed: the same seed makes the same grants at the same instants."""
    first, again, other = (run_waiting_world(seed, quiet=False).history.trace_hash for seed in (1, 1, 2))
    assert first == again != other
