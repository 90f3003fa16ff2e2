"""When the head of a queue tries: every end of a try, decided without any I/O."""

from __future__ import annotations

import math

import pytest

from redfence_server.locking.attempt import AttemptGranted
from redfence_server.locking.node import Held, NoReply, Notice
from redfence_server.locking.tally import Failure, Refusal
from redfence_server.model import AcquireCall, LeaseId
from redfence_server.randomness import SystemRandomness
from redfence_server.waiting.line import Waiter
from redfence_server.waiting.schedule import HAND_OVERS_MAX, TryEnd, TrySchedule

NOW_MS = 1_000.0
TTL_MS = 900
NOTICES = tuple(Notice(node, "r", 5) for node in range(3))


def waiter(number: int = 1, *, asked: bool = True) -> Waiter:
    """Return a waiter whose last mint asked for a notice, or did not."""
    call = AcquireCall("r", LeaseId(f"{number:032x}"), TTL_MS, "", 60_000, 0)
    new = Waiter(call, lambda _: None)
    new.asked_for_notice = asked
    return new


def end(schedule: TrySchedule, trying: Waiter, how: TryEnd) -> None:
    held = tuple((node, Held("d" * 64, 5, "", TTL_MS)) for node in range(3))
    match how:
        case TryEnd.GRANTED:
            schedule.granted(trying, AttemptGranted(5, NOW_MS), NOW_MS)
        case TryEnd.HELD:
            schedule.refused(trying, Refusal(Failure.HELD, held, ()), NOW_MS)
        case TryEnd.SPLIT:
            schedule.refused(trying, Refusal(Failure.SPLIT, (), ()), NOW_MS)
        case TryEnd.FAILED:
            schedule.failed(trying, NOW_MS)
        case TryEnd.LEFT:
            schedule.left(trying, NOW_MS)


# How long after its end the next try is due, in ms: least and most.
DUE_AFTER_MS = {
    TryEnd.GRANTED: (TTL_MS, TTL_MS + 50),
    TryEnd.HELD: (TTL_MS, TTL_MS + 50),
    TryEnd.SPLIT: (1, 100),
    TryEnd.FAILED: (1, 100),
    TryEnd.LEFT: (-math.inf, 0),
}


@pytest.mark.parametrize("how", TryEnd)
def test_the_next_try_after_each_end_of_a_try(how: TryEnd) -> None:
    """A hold of another lease is known before, and no try is under way afterwards."""
    schedule, trying = TrySchedule(3, SystemRandomness()), waiter()
    assert schedule.due_at_ms <= 0, "nothing is known"
    schedule.begin(trying)
    end(schedule, trying, TryEnd.HELD)
    schedule.begin(trying)
    end(schedule, trying, how)
    assert schedule.trying is None
    least_ms, most_ms = DUE_AFTER_MS[how]
    assert least_ms <= schedule.due_at_ms - NOW_MS <= most_ms


def test_notices_make_a_try_due_at_once_if_a_quorum_may_be_free_and_otherwise_soon() -> None:
    """Other nodes may send no notice, so the head looks into a single one."""
    schedule, trying = TrySchedule(3, SystemRandomness()), waiter()
    schedule.begin(trying)
    end(schedule, trying, TryEnd.HELD)
    for notice, within_ms in zip(NOTICES, (100, 0, 0), strict=True):
        schedule.noticed(notice, NOW_MS)
        assert schedule.due_at_ms == NOW_MS + within_ms


def test_a_notice_from_a_node_that_granted_the_last_try_calls_for_none() -> None:
    """The own undo of the try sends it. A silent node may have a hold, and so may one that answers late."""
    schedule, trying = TrySchedule(3, SystemRandomness()), waiter()
    schedule.begin(trying)
    held = tuple((node, Held("d" * 64, 5, "", TTL_MS)) for node in (0, 1))
    schedule.refused(trying, Refusal(Failure.HELD, held, (), granted=(2,)), NOW_MS)
    end_ms = schedule.due_at_ms
    schedule.noticed(NOTICES[2], NOW_MS)
    assert schedule.due_at_ms == end_ms > NOW_MS + TTL_MS
    for granted, due_at_ms in ((True, end_ms), (False, NOW_MS + 100)):
        schedule.begin(trying)
        schedule.refused(trying, Refusal(Failure.HELD, held, ()), NOW_MS)
        schedule.watch.answered_late(2, granted=granted)
        schedule.noticed(NOTICES[2], NOW_MS)
        assert schedule.due_at_ms == due_at_ms
    for reason, due_at_ms in ((NoReply.CLOCK_SET, end_ms), (NoReply.TIMED_OUT, NOW_MS + 100)):
        schedule.begin(trying)
        schedule.refused(trying, Refusal(Failure.HELD, held, ((2, reason),)), NOW_MS)
        schedule.noticed(NOTICES[2], NOW_MS)
        assert schedule.due_at_ms == due_at_ms


@pytest.mark.parametrize("how", [TryEnd.GRANTED, TryEnd.HELD])
def test_a_notice_during_the_try_makes_the_next_one_due_at_once(how: TryEnd) -> None:
    """It tells the end of the very hold that the try finds."""
    schedule, trying = TrySchedule(3, SystemRandomness()), waiter()
    schedule.begin(trying)
    for notice in NOTICES:
        schedule.noticed(notice, NOW_MS)
    end(schedule, trying, how)
    assert schedule.due_at_ms <= NOW_MS


def test_a_grant_that_asked_for_no_notice_makes_a_try_due_at_once() -> None:
    """The next waiter asks for one."""
    schedule, trying = TrySchedule(3, SystemRandomness()), waiter(asked=False)
    schedule.begin(trying)
    end(schedule, trying, TryEnd.GRANTED)
    assert schedule.due_at_ms <= NOW_MS


def test_the_end_of_a_retry_leaves_the_try_of_the_head_under_way() -> None:
    """A waiter that repeats its Acquire tries beside the head."""
    schedule, head = TrySchedule(3, SystemRandomness()), waiter()
    for how in TryEnd:
        schedule.begin(head)
        end(schedule, waiter(2), how)
        assert schedule.trying is head


def test_handovers_in_a_row_are_bounded_while_another_server_waits() -> None:
    """Then the release is open once, the head holds back, and the count begins anew."""
    schedule = TrySchedule(3, SystemRandomness())
    for number in range(HAND_OVERS_MAX + 1):
        assert number == 0 or schedule.may_hand_over(waiter(number - 1).digest, NOW_MS)
        schedule.begin(waiter(number), by_hand_over=number > 0)
        schedule.granted(
            schedule.trying or waiter(), AttemptGranted(number, NOW_MS - 2, contended=True), NOW_MS
        )
    last = waiter(HAND_OVERS_MAX).digest
    assert schedule.forget_at_ms > NOW_MS + TTL_MS - 5, "an empty queue goes on counting"
    assert not schedule.may_hand_over(last, NOW_MS)
    assert NOW_MS + 14 <= min(schedule.due_at_ms, schedule.forget_at_ms) <= NOW_MS + 18
    assert schedule.may_hand_over(last, NOW_MS)
