"""How a session gives up acquires, keeps leases and closes: no loop, no thread, no clock."""

from __future__ import annotations

import math

import pytest
from unit.redfence.core_world import (
    Slot,
    World,
    drains,
    failed,
    granted,
    in_state,
    not_granted,
    released,
    renewed,
    without_quorum,
)

from redfence import ClosedError, LeaseState, LossReason, OutcomeUnknownError, UnavailableError
from redfence._core.lease import LeaseCore
from redfence_proto.v1 import lock_pb2

_WAIT_TIMEOUT = lock_pb2.ACQUIRE_OUTCOME_WAIT_TIMEOUT
_AT_RISK = lock_pb2.LEASE_STATE_AT_RISK
_LOST = lock_pb2.LEASE_STATE_LOST
_RPC_TIMEOUT_MS = 5000


def _told(world: World, lease: LeaseCore) -> list[tuple[float, LeaseState]]:
    """Return a list that grows with each change of the lease's state: the instant and the state."""
    told: list[tuple[float, LeaseState]] = []
    lease.watchers.append(lambda: told.append((world.now_ms, lease.state)))
    return told


def test_a_cancelled_acquire_that_was_not_sent_leaves_nothing() -> None:
    world = World()
    wants_link = [world.core.wants_link]
    call, slot = world.acquire()
    wants_link.append(world.core.wants_link)
    slot.cancelled = True
    world.core.abandon(call, now_ms=0.0)
    wants_link.append(world.core.wants_link)
    assert wants_link == [False, True, False]
    assert world.connected().sent() == []


@pytest.mark.parametrize("outcome", ["granted", "cancelled", "held", "no answer", "broken"])
def test_a_cancelled_acquire_is_always_released_after_it_was_answered(world: World, outcome: str) -> None:
    """A Release that leaves before the answer could overtake the acquire."""
    call, slot = world.acquire(wait=None)
    command = world.one("acquire")
    slot.cancelled = True
    world.core.abandon(call, now_ms=0.0)
    assert world.one("cancel").cancel.id == command.id
    if outcome == "granted":
        world.answer(granted(command))
    elif outcome == "cancelled":
        world.answer(failed(command, 1, lock_pb2.ERROR_REASON_CANCELLED))
    elif outcome == "held":
        world.answer(not_granted(command, _WAIT_TIMEOUT))
    elif outcome == "no answer":
        world.later(_RPC_TIMEOUT_MS / 2)
    else:
        world.reconnect()
    if world.core.leaving:
        world.reconnect()
    assert world.one("release").release.lease_id == command.acquire.lease_id


def test_a_grant_that_meets_its_callers_cancellation_is_released(world: World) -> None:
    call, _ = world.acquire()
    world.answer(granted(world.one("acquire")))
    world.core.abandon(call, now_ms=0.0)
    assert world.sent_kinds() == ["release"]
    assert world.later(60_000).sent() == [], "and not kept alive"


def test_a_late_grant_of_an_acquire_that_was_given_up_is_released_once_more(world: World) -> None:
    """The nodes may have carried out the first Release before the mint."""
    call, slot = world.acquire(wait=None)
    command = world.one("acquire")
    slot.cancelled = True
    world.core.abandon(call, now_ms=0.0)
    world.sent()
    world.core._link._left_at_ms = (
        _RPC_TIMEOUT_MS / 2 - 1
    )  # another server was left just now, so this one is stayed with
    world.later(_RPC_TIMEOUT_MS / 2)
    release = world.one("release")
    world.answer(released(release, held=False))
    world.answer(granted(command))
    assert world.one("release").release.lease_id == command.acquire.lease_id


def test_a_lost_lease_is_told_once_and_never_renewed_again(world: World) -> None:
    lease = world.held(ttl=9)
    told = _told(world, lease)
    world.later(3000)
    world.answer(renewed(world.one("renew"), _LOST))
    assert (lease.state, lease.loss) == (LeaseState.LOST, LossReason.NOT_HELD)
    assert world.later(60_000).sent() == []
    assert told == [(3000, LeaseState.LOST)]


def test_a_server_that_says_nothing_loses_the_lease_at_the_deadline(world: World) -> None:
    lease = world.held(ttl=9)
    told = _told(world, lease)
    world.later(20_000)
    # The renewal was sent after a third of the ttl, and its answer was awaited for a sixth of it.
    assert told == [(4500, LeaseState.AT_RISK), (lease.deadline_ms, LeaseState.LOST)]
    assert lease.loss is LossReason.EXPIRED


def test_each_change_of_state_is_told_once() -> None:
    world = World().connected()
    lease = world.held(ttl=9)
    told = _told(world, lease)
    for _ in range(2):
        world.later(3000)
        world.answer(renewed(world.one("renew"), lock_pb2.LEASE_STATE_ACTIVE))
    for _ in range(2):
        world.later(lease.wake_at_ms - world.now_ms)
        world.answer(renewed(world.one("renew"), _AT_RISK))
    world.later(lease.wake_at_ms - world.now_ms)
    world.answer(renewed(world.one("renew"), lock_pb2.LEASE_STATE_ACTIVE))
    world.core.release(lease, None, now_ms=world.now_ms)
    assert [state for _, state in told] == [LeaseState.AT_RISK, LeaseState.ACTIVE, LeaseState.RELEASED]


def test_a_lease_that_is_not_renewed_any_more_is_at_risk_at_a_third_of_its_ttl() -> None:
    """After `max_hold` no renewal can fail, so only the clock warns the holder."""
    world = World().connected()
    lease = world.held(ttl=9, max_hold=1)
    told = _told(world, lease)
    world.later(20_000)
    warned_at_ms = lease.deadline_ms - 3000
    assert told == [(warned_at_ms, LeaseState.AT_RISK), (lease.deadline_ms, LeaseState.LOST)]


def test_a_new_server_has_time_to_answer_the_renewal_of_a_lease_at_risk() -> None:
    world = World(address_count=2).connected()
    lease = world.held(ttl=9)
    world.later(3000).reconnect()
    assert in_state(lease, LeaseState.AT_RISK)
    # The timer of a real client is never exact.
    world.now_ms += 1
    world.core.tick(world.now_ms)
    renewal = world.one("renew")
    assert not world.core.leaving
    world.later(1000).answer(renewed(renewal, lock_pb2.LEASE_STATE_ACTIVE))
    assert in_state(lease, LeaseState.ACTIVE)


def test_the_instant_to_leave_rings_once() -> None:
    """A silent server is left in time to save the lease at another one."""
    world = World(address_count=2).connected()
    lease = world.held(ttl=9)
    world.later(3000)
    world.sent()
    world.later(1500)
    assert in_state(lease, LeaseState.AT_RISK)
    assert world.core.should_leave(world.now_ms)
    world.core.tick(world.now_ms)
    assert world.core.next_alarm_ms() > world.now_ms


def test_a_server_that_says_anything_at_all_is_not_taken_for_frozen() -> None:
    world = World(address_count=2).connected()
    lease = world.held(ttl=9)
    world.now_ms = 3000.0
    world.core.tick(3000.0)
    world.sent()
    world.core.received(lock_pb2.SessionResponse(), now_ms=4000.0)
    world.core.tick(4500.0)
    assert in_state(lease, LeaseState.AT_RISK)
    assert not world.core.leaving


def test_every_departure_rings(world: World) -> None:
    draining = lock_pb2.SessionResponse(draining=lock_pb2.Draining())
    draining.draining.grace.FromSeconds(10)
    world.acquire(wait=None)
    rings = []
    for _ in range(2):
        world.sent()
        world.core.received(draining, now_ms=world.now_ms)
        rings.append(world.core.next_alarm_ms() - world.now_ms)
        world.later(1000)
        assert world.core.should_leave(world.now_ms)
        world.reconnect()
    assert rings == [1000, 1000]


@pytest.mark.parametrize("address_count", [1, 2])
def test_a_server_without_a_quorum_is_left_for_another_but_not_in_a_circle(address_count: int) -> None:
    world = World(address_count=address_count).connected()
    lease = world.held(ttl=9)
    world.later(3000)
    world.answer(renewed(world.one("renew"), _AT_RISK))
    assert in_state(lease, LeaseState.AT_RISK)
    assert world.core.should_leave(world.now_ms) is (address_count == 2)
    assert world.core.leaving is (address_count == 2)
    world.reconnect().later(0)
    world.answer(renewed(world.one("renew"), _AT_RISK))
    assert not world.core.should_leave(world.now_ms)


def test_a_release_ends_the_renewals_fails_without_a_quorum_and_outlasts_a_drain() -> None:
    for answer in (released, without_quorum, drains):
        world = World().connected()
        lease, slot = world.held(ttl=9), Slot()
        world.core.release(lease, slot, now_ms=world.now_ms)
        world.answer(answer(world.one("release")))
        if answer is without_quorum:
            assert type(slot.error) is UnavailableError
            continue
        if answer is drains:
            assert world.core.should_leave(world.now_ms)
            world.answer(released(world.reconnect().one("release")))
        assert slot.result is True
        assert in_state(lease, LeaseState.RELEASED)
        assert world.later(60_000).sent() == []


def test_closing_fails_calls_ends_leases_and_waits_for_the_releases(world: World) -> None:
    lease = world.held(ttl=9)
    told = _told(world, lease)
    _, waiting = world.acquire(wait=None)
    acquire = world.one("acquire")
    idle = Slot()
    world.core.close(idle, now_ms=world.now_ms)
    assert isinstance(waiting.error, ClosedError)
    assert (lease.loss, told) == (LossReason.CLIENT_CLOSED, [(0, LeaseState.LOST)])
    cancel, release = sorted(world.sent(), key=lambda command: str(command.WhichOneof("command")))
    assert cancel.cancel.id == acquire.id
    world.answer(released(release), failed(acquire, 1, lock_pb2.ERROR_REASON_CANCELLED))
    assert not idle.done()
    world.answer(released(world.one("release"), held=False))
    assert idle.done()


def test_closing_does_not_release_a_lease_that_the_clock_has_ended(world: World) -> None:
    """A paused process may close its client before an alarm tells the loss. A release would open the lock."""
    lease = world.held(ttl=9)
    told = _told(world, lease)
    idle = Slot()
    world.now_ms = lease.deadline_ms
    world.core.close(idle, now_ms=world.now_ms)
    assert (lease.loss, told) == (LossReason.EXPIRED, [(lease.deadline_ms, LeaseState.LOST)])
    assert world.sent() == []
    assert idle.done()


def test_a_closed_client_refuses_everything_and_holds_nobody_up(world: World) -> None:
    idle = Slot()
    world.core.close(idle, now_ms=0.0)
    assert idle.done()
    with pytest.raises(ClosedError):
        world.acquire()
    with pytest.raises(ClosedError):
        world.core.await_link(Slot(), now_ms=0.0)


def test_closing_without_a_server_ends_by_the_rpc_timeout(world: World) -> None:
    world.held()
    world.broken()
    idle = Slot()
    world.core.close(idle, now_ms=world.now_ms)
    assert not idle.done()
    world.later(_RPC_TIMEOUT_MS)
    assert idle.done()


def test_stopping_ends_whatever_closing_could_not(world: World) -> None:
    releasing, lease = Slot(), world.held(resource="releasing")
    world.held(resource="held")
    world.core.release(lease, releasing, now_ms=world.now_ms)
    _, acquiring = world.acquire(resource="acquiring", wait=None)
    world.sent()
    idle = Slot()
    world.core.close(idle, now_ms=world.now_ms)
    assert not idle.done()
    world.core.stop()
    assert type(releasing.error) is OutcomeUnknownError
    assert type(acquiring.error) is ClosedError
    assert idle.done()
    assert world.core.next_alarm_ms() == math.inf
    assert not world.core.wants_link
    world.broken()
    world.core.stop()


def test_a_caller_that_is_cancelled_while_the_client_closes_releases_nothing_twice(world: World) -> None:
    call, _ = world.acquire()
    world.answer(granted(world.one("acquire")))
    world.core.close(Slot(), now_ms=world.now_ms)
    world.core.abandon(call, now_ms=world.now_ms)
    assert world.sent_kinds() == ["release"]
