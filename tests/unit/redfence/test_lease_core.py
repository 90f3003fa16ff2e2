"""A lease's life: every state with every event, and the arithmetic of its deadline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.redfence.core_world import in_state

from redfence import LeaseState, LossReason
from redfence._core.lease import TRANSITIONS, LeaseCore, LeaseEvent

_TTL_MS = 9000.0
_VALIDITY_MS = 8900.0
_NOW_MS = 100.0


def _lease(**changes: Any) -> LeaseCore:
    proven = {"sent_at_ms": 0.0, "now_ms": 0.0, "validity_ms": _VALIDITY_MS, "max_hold_ms": None} | changes
    return LeaseCore(resource="r", lease_id="0" * 32, token=7, ttl_ms=_TTL_MS, fraction=lambda: 0.0, **proven)


def _in_state(state: LeaseState) -> LeaseCore:
    lease = _lease()
    if state is LeaseState.AT_RISK:
        lease.renewal_failed(sent_at_ms=1.0, now_ms=_NOW_MS)
    elif state is LeaseState.LOST:
        lease.end(LossReason.NOT_HELD, now_ms=_NOW_MS)
    elif state is LeaseState.RELEASED:
        lease.end(LossReason.RELEASED, now_ms=_NOW_MS)
    assert lease.state is state
    return lease


_DO: dict[LeaseEvent, Callable[[LeaseCore, float], object]] = {
    LeaseEvent.RENEWED: lambda lease, now_ms: lease.renewed(
        sent_at_ms=now_ms - 1, validity_ms=_VALIDITY_MS, now_ms=now_ms
    ),
    LeaseEvent.RENEWAL_FAILED: lambda lease, now_ms: lease.renewal_failed(
        sent_at_ms=now_ms - 1, now_ms=now_ms
    ),
    LeaseEvent.REPORTED_LOST: lambda lease, now_ms: lease.end(LossReason.NOT_HELD, now_ms=now_ms),
    LeaseEvent.DEADLINE_PASSED: lambda lease, _: lease.wake(_VALIDITY_MS),
    LeaseEvent.RELEASED: lambda lease, now_ms: lease.end(LossReason.RELEASED, now_ms=now_ms),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(LeaseState, LeaseEvent)))
def test_every_event_in_every_state_leads_where_the_rules_say(state: LeaseState, event: LeaseEvent) -> None:
    lease = _in_state(state)
    _DO[event](lease, _NOW_MS + 1)
    expected: LeaseState
    if state in {LeaseState.LOST, LeaseState.RELEASED}:
        expected = state
    else:
        expected = {
            LeaseEvent.RENEWED: LeaseState.ACTIVE,
            LeaseEvent.RENEWAL_FAILED: LeaseState.AT_RISK,
            LeaseEvent.REPORTED_LOST: LeaseState.LOST,
            LeaseEvent.DEADLINE_PASSED: LeaseState.LOST,
            LeaseEvent.RELEASED: LeaseState.RELEASED,
        }[event]
    assert TRANSITIONS[state, event] is expected
    assert lease.state is expected


@pytest.mark.parametrize("event", LeaseEvent)
@pytest.mark.parametrize("state", [LeaseState.ACTIVE, LeaseState.AT_RISK])
def test_past_the_deadline_the_lease_is_lost_whatever_happens(state: LeaseState, event: LeaseEvent) -> None:
    lease = _in_state(state)
    late_ms = _VALIDITY_MS
    _DO[event](lease, late_ms)
    assert in_state(lease, LeaseState.LOST)
    assert lease.loss is LossReason.EXPIRED
    assert lease.wake_at_ms == math.inf
    assert lease.remaining_ms(late_ms) == 0.0


def test_no_grant_counts_for_longer_than_a_ttl_from_now() -> None:
    lease = _lease(sent_at_ms=0.0, now_ms=60_000.0, validity_ms=60_000.0 + _VALIDITY_MS + 5000.0)
    assert lease.deadline_ms == 60_000.0 + _TTL_MS


def test_loss_is_decided_by_the_clock_and_not_by_a_timer() -> None:
    lease = _lease()
    warn_at_ms = _VALIDITY_MS - _TTL_MS / 3
    assert lease.state_at(warn_at_ms - 1) is LeaseState.ACTIVE
    assert lease.state_at(warn_at_ms) is LeaseState.AT_RISK
    assert lease.state_at(_VALIDITY_MS - 1) is LeaseState.AT_RISK
    assert lease.ended(_VALIDITY_MS - 1) is None
    assert lease.state_at(_VALIDITY_MS) is LeaseState.LOST
    assert lease.ended(_VALIDITY_MS) is LossReason.EXPIRED
    error = lease.lost_error(_VALIDITY_MS)
    assert error is not None
    assert (error.resource, error.token, error.reason) == ("r", 7, LossReason.EXPIRED)
    assert in_state(lease, LeaseState.ACTIVE), "looking changes nothing"


def test_a_late_bad_answer_says_nothing_about_a_newer_renewal() -> None:
    lease = _lease()
    lease.renewed(sent_at_ms=4000.0, validity_ms=_VALIDITY_MS, now_ms=4010.0)
    lease.renewal_failed(sent_at_ms=3000.0, now_ms=4020.0)
    assert in_state(lease, LeaseState.ACTIVE)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000), st.integers(0, 3000)), max_size=30))
def test_the_deadline_is_always_the_latest_instant_proven_while_alive(
    answers: list[tuple[bool, int, int]],
) -> None:
    lease = _lease()
    model_ms, now_ms = _VALIDITY_MS, 0.0
    for good, pause_ms, delay_ms in answers:
        now_ms += pause_ms
        sent_at_ms = max(0.0, now_ms - delay_ms)
        alive = now_ms < model_ms
        if good:
            lease.renewed(sent_at_ms=sent_at_ms, validity_ms=_VALIDITY_MS, now_ms=now_ms)
            model_ms = max(model_ms, sent_at_ms + _VALIDITY_MS) if alive else model_ms
        else:
            lease.renewal_failed(sent_at_ms=sent_at_ms, now_ms=now_ms)
        assert lease.deadline_ms == model_ms
        assert (lease.state is LeaseState.LOST) == (not alive)
        if not alive:
            return


def test_a_lease_is_renewed_at_a_third_of_its_ttl() -> None:
    lease = _lease()
    assert lease.wake_at_ms == 3000.0
    assert not lease.wake(2999.0)
    assert lease.wake(3000.0)
    assert not lease.wake(3001.0)
    lease.renewed(sent_at_ms=3000.0, validity_ms=_VALIDITY_MS, now_ms=3010.0)
    assert lease.wake_at_ms == 6000.0


@pytest.mark.parametrize(("waited_ms", "at_once"), [(2999.0, False), (3001.0, True), (60_000.0, True)])
def test_a_grant_that_waited_longer_than_a_third_of_its_ttl_is_renewed_at_once(
    waited_ms: float,
    at_once: bool,  # noqa: FBT001  (pytest passes it by name)
) -> None:
    lease = _lease(sent_at_ms=0.0, now_ms=waited_ms, validity_ms=waited_ms + _VALIDITY_MS)
    assert lease.wake(waited_ms) is at_once


def test_a_failed_renewal_is_repeated_sooner_with_growing_pauses_until_the_deadline() -> None:
    lease = _lease()
    tries, now_ms = [], 3000.0
    while lease.wake(now_ms):
        tries.append(now_ms)
        lease.renewal_failed(sent_at_ms=now_ms, now_ms=now_ms)
        assert in_state(lease, LeaseState.AT_RISK)
        now_ms = lease.wake_at_ms
    assert in_state(lease, LeaseState.LOST)
    assert 6 <= len(tries) <= 20
    assert tries[1] - tries[0] < tries[-1] - tries[-2] <= _TTL_MS / 6


def test_a_renewal_without_an_answer_counts_as_failed_and_is_repeated() -> None:
    lease = _lease()
    assert lease.wake(3000.0)
    assert lease.wake_at_ms == 4500.0
    assert lease.wake(4500.0)
    assert in_state(lease, LeaseState.AT_RISK)
    lease.renewed(sent_at_ms=3000.0, validity_ms=_VALIDITY_MS, now_ms=4600.0)
    assert in_state(lease, LeaseState.ACTIVE), "the first one's late answer counts"


def test_a_new_link_renews_a_lease_at_risk_at_once_and_leaves_others_alone() -> None:
    at_risk, active = _in_state(LeaseState.AT_RISK), _lease()
    at_risk.renew_soon(200.0)
    active.renew_soon(200.0)
    assert at_risk.wake(200.0)
    assert not active.wake(200.0)


def test_an_answer_that_comes_very_late_leaves_the_lease_at_risk() -> None:
    """The deadline moves, but the holder still has less than a third of the ttl to stop."""
    lease = _lease()
    for now_ms in (3000.0, 4500.0):
        assert lease.wake(now_ms)
    lease.renewed(sent_at_ms=1.0, validity_ms=_VALIDITY_MS, now_ms=8000.0)
    assert in_state(lease, LeaseState.AT_RISK)
    assert lease.deadline_ms == 1.0 + _VALIDITY_MS


def test_after_max_hold_the_lease_is_not_renewed_any_more_and_says_so() -> None:
    lease = _lease(max_hold_ms=5000.0)
    assert lease.wake(3000.0)
    lease.renewed(sent_at_ms=3000.0, validity_ms=_VALIDITY_MS, now_ms=3000.0)
    assert not lease.wake(6000.0)
    warn_at_ms = 3000.0 + _VALIDITY_MS - _TTL_MS / 3
    assert lease.wake_at_ms == warn_at_ms
    assert not lease.wake(warn_at_ms)
    assert in_state(lease, LeaseState.AT_RISK)
    assert lease.wake_at_ms == 3000.0 + _VALIDITY_MS
    assert not lease.wake(3000.0 + _VALIDITY_MS)
    assert lease.loss is LossReason.MAX_HOLD


def test_a_released_lease_protects_nothing_but_is_not_lost() -> None:
    lease = _in_state(LeaseState.RELEASED)
    assert lease.remaining_ms(_NOW_MS) == 0.0
    assert lease.ended(_NOW_MS) is LossReason.RELEASED
    assert lease.state_at(_VALIDITY_MS + 1) is LeaseState.RELEASED
