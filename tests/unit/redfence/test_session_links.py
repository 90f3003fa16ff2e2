"""A session whose links break, or whose server is silent: no loop, no thread, no clock."""

from __future__ import annotations

import math

import pytest
from unit.redfence.core_world import (
    Slot,
    World,
    echo,
    failed,
    granted,
    in_state,
    limited,
    not_granted,
    released,
    renewed,
)

from redfence import (
    AccessDeniedError,
    LeaseState,
    LockHeldError,
    OutcomeUnknownError,
    OverloadedError,
    UnavailableError,
    WrongServiceError,
)
from redfence._core.probe import LATE_MS_MAX, PROBE_AFTER_MS
from redfence_proto.v1 import lock_pb2

_HELD = lock_pb2.ACQUIRE_OUTCOME_HELD
_ACTIVE = lock_pb2.LEASE_STATE_ACTIVE
_RPC_TIMEOUT_MS = 5000


def test_after_a_broken_stream_an_acquire_is_sent_again_with_the_same_lease_id(world: World) -> None:
    slot, first = world.ask(ttl=9)
    world.later(1000).broken()
    world.later(500).connected()
    second = world.one("acquire")
    assert second.acquire == first.acquire
    assert second.id != first.id
    world.answer(granted(first))
    assert not slot.done(), "the answer belongs to the earlier stream"
    world.answer(granted(second))
    assert slot.result.proven_at_ms == 1500.0


def test_a_resent_acquire_that_is_then_refused_is_released(world: World) -> None:
    """The first sending may have left a shared hold that only its owner removes."""
    slot, _ = world.ask()
    world.reconnect()
    again = world.one("acquire")
    world.answer(not_granted(again, _HELD))
    assert type(slot.error) is LockHeldError
    assert world.one("release").release.lease_id == again.acquire.lease_id


def test_after_a_broken_stream_a_release_is_sent_again(world: World) -> None:
    lease = world.held()
    slot = Slot()
    world.core.release(lease, slot, now_ms=world.now_ms)
    first = world.one("release")
    world.reconnect()
    second = world.one("release")
    assert second.release == first.release
    world.answer(released(second, held=False))
    assert slot.result is False


def test_after_a_broken_stream_a_renewal_counts_as_failed_and_is_sent_anew(world: World) -> None:
    lease = world.held(ttl=9)
    world.later(3000)
    assert world.sent_kinds() == ["renew"]
    world.broken()
    assert in_state(lease, LeaseState.AT_RISK)
    world.later(10)
    world.connected().later(0)
    world.answer(renewed(world.one("renew"), _ACTIVE))
    assert in_state(lease, LeaseState.ACTIVE)


def test_without_a_server_a_call_fails_after_the_rpc_timeout_with_the_cause() -> None:
    world = World()
    _, slot = world.acquire(wait=None)
    cause = UnavailableError("a refused the connection")
    world.core.link_failed(cause, now_ms=world.now_ms)
    world.later(_RPC_TIMEOUT_MS - 1)
    assert not slot.done()
    world.later(1)
    assert type(slot.error) is UnavailableError
    assert slot.error.__cause__ is cause
    assert "a refused the connection" in str(slot.error)
    assert not world.core.wants_link


def test_refused_credentials_are_told_at_once() -> None:
    world = World()
    _, acquiring = world.acquire(wait=None)
    calling = Slot()
    world.core.await_link(calling, now_ms=0.0)
    world.core.link_failed(AccessDeniedError("who are you?"), now_ms=world.now_ms)
    assert isinstance(acquiring.error, AccessDeniedError)
    assert isinstance(calling.error, AccessDeniedError)


@pytest.mark.parametrize(("addresses", "replied"), [(1, False), (1, True), (2, False)])
def test_a_client_without_room_at_its_only_server_is_told_at_once(addresses: int, *, replied: bool) -> None:
    """A stream that was answered before may have run the acquire; another server may have room."""
    world = World(address_count=addresses).connected()
    if replied:
        world.held(resource="held")
    slot, _ = world.ask("other", wait=60)
    world.broken(OverloadedError("no room", error_reason="TOO_MANY_BUFFERED_BYTES"))
    assert slot.done() == (addresses == 1 and not replied)
    if slot.done():
        assert isinstance(slot.error, OverloadedError)


def test_an_expired_token_is_replaced_on_a_new_stream_before_the_caller_hears_of_it() -> None:
    """Only a stream that the server refuses at once shows that the client has no valid token."""
    world = World().connected()
    world.held(resource="held")
    slot, command = world.ask("other", wait=60)
    expired = AccessDeniedError("expired", error_reason="UNAUTHENTICATED")
    world.broken(expired)
    assert not slot.done()
    world.connected()
    again = [each for each in world.sent() if each.WhichOneof("command") == "acquire"]
    assert [each.acquire.lease_id for each in again] == [command.acquire.lease_id]
    world.broken(expired)
    assert isinstance(slot.error, AccessDeniedError)


@pytest.mark.parametrize("wait", [0, 3])
def test_an_acquire_without_an_answer_fails_after_the_rpc_timeout_and_is_released(wait: float) -> None:
    world = World().connected()
    slot, command = world.ask(wait=wait, ttl=60)
    world.later(wait * 1000 + _RPC_TIMEOUT_MS - 1)
    assert not slot.done()
    world.core.tick(world.now_ms + 1)
    assert type(slot.error) is OutcomeUnknownError
    assert world.core.should_leave(world.now_ms + 1), "a server that does not answer is left"
    world.reconnect()
    assert world.one("release").release.lease_id == command.acquire.lease_id


@pytest.mark.parametrize("wait", [0, 3, None])
def test_an_acquire_whose_server_vanished_is_unknown_and_released_when_one_is_back(
    world: World,
    wait: float | None,
) -> None:
    slot, _ = world.ask(wait=wait)
    world.broken()
    world.later(_RPC_TIMEOUT_MS - 1)
    assert not slot.done()
    world.later(1)
    assert type(slot.error) is OutcomeUnknownError
    assert world.core.wants_link
    world.connected()
    assert world.sent_kinds() == ["release"]


def test_a_server_that_does_not_answer_a_release_is_left(world: World) -> None:
    slot = Slot()
    world.core.release(world.held(), slot, now_ms=world.now_ms)
    world.sent()
    world.later(_RPC_TIMEOUT_MS)
    assert type(slot.error) is OutcomeUnknownError
    assert world.core.should_leave(world.now_ms)


def test_links_that_break_again_and_again_do_not_prolong_a_finite_wait() -> None:
    world = World()
    _, slot = world.acquire(wait=1)
    for _ in range(20):
        world.connected().sent()
        world.later(400).broken()
    assert isinstance(slot.error, OutcomeUnknownError)


def _silent(world: World, *, ms: float = PROBE_AFTER_MS) -> lock_pb2.SessionCommand:
    """Let nothing be heard for so long; return the probe, which is all that leaves, and at the end of it."""
    assert world.later(ms - 1).sent() == []
    return world.later(1).one("cancel")


@pytest.mark.parametrize("address_count", [1, 2])
@pytest.mark.parametrize("wait", [60, None])
def test_a_server_that_gives_no_echo_is_left_and_the_wait_goes_on(
    address_count: int, wait: float | None
) -> None:
    world = World(address_count=address_count).connected()
    slot, acquire = world.ask(wait=wait)
    for _ in range(2):
        _silent(world)
        world.later(_RPC_TIMEOUT_MS - 1)
        assert not world.core.leaving
        world.later(1)
        assert world.core.should_leave(world.now_ms)
        world.reconnect()
        again = world.one("acquire")
        assert again.acquire.lease_id == acquire.acquire.lease_id
    world.answer(granted(again))
    assert slot.result.token == 1


def test_a_server_is_not_asked_while_nothing_waits_there() -> None:
    world = World(rpc_timeout=60).connected()
    assert world.core.next_alarm_ms() == math.inf
    _, tried = world.ask(wait=0)
    assert world.later(60_000 - 1).sent() == []
    world.answer(not_granted(tried, _HELD))
    assert world.later(10 * PROBE_AFTER_MS).sent() == []
    for _ in range(2):
        _, slot = world.acquire(wait=None)
        acquire = world.one("acquire")
        world.answer(echo(_silent(world)))
        world.later(PROBE_AFTER_MS - 1)
        world.answer(failed(acquire, 3, lock_pb2.ERROR_REASON_INVALID_TTL))
        assert slot.done()
        assert world.core.next_alarm_ms() == math.inf
    assert world.later(10 * PROBE_AFTER_MS).sent() == []


def test_a_server_that_says_anything_else_is_not_asked(world: World) -> None:
    lease = world.held(resource="mine", ttl=36)
    world.ask(wait=None)
    for _ in range(300):
        world.later(12_000)
        world.answer(renewed(world.one("renew"), _ACTIVE, ttl_ms=36_000))
    assert world.later(0).sent() == []
    assert not world.core.leaving
    assert lease.remaining_ms(world.now_ms) > 35_000


@pytest.mark.parametrize("answers", [False, True])
def test_whatever_is_heard_answers_a_probe_until_the_next_silence(answers: bool) -> None:  # noqa: FBT001
    """The client asks no second time while the server owes an echo."""
    world = World().connected()
    world.ask(wait=None)
    probe = _silent(world)
    world.later(_RPC_TIMEOUT_MS - 1)
    world.core.received(lock_pb2.SessionResponse(), now_ms=world.now_ms)
    assert world.later(PROBE_AFTER_MS).sent() == []
    assert not world.core.leaving
    if answers:
        world.answer(echo(probe))
    assert world.later(_RPC_TIMEOUT_MS - 1).sent() == []
    assert not world.core.leaving
    assert world.later(1).core.should_leave(world.now_ms) is not answers


def test_a_thousand_waits_at_a_silent_server_ask_one_question(world: World) -> None:
    for _ in range(1000):
        world.acquire(wait=None)
        world.sent()
        world.later(1)
    probe = _silent(world, ms=PROBE_AFTER_MS - 1000)
    assert world.later(60 * PROBE_AFTER_MS).sent() == []
    world.answer(echo(probe))
    assert world.core.leaving


@pytest.mark.parametrize("suspended_ms", [_RPC_TIMEOUT_MS + LATE_MS_MAX + 1, 3_600_000])
@pytest.mark.parametrize("answers", [False, True])
def test_a_client_that_was_suspended_gives_a_silent_server_one_more_rpc_timeout(
    world: World,
    suspended_ms: int,
    answers: bool,  # noqa: FBT001
) -> None:
    """The echo may have arrived while the client could not read it."""
    world.ask(wait=None)
    probe = _silent(world)
    world.now_ms += suspended_ms
    world.core.tick(world.now_ms)
    assert not world.core.leaving
    assert world.later(_RPC_TIMEOUT_MS - 1).sent() == []
    assert not world.core.leaving
    if answers:
        world.answer(echo(probe))
    assert world.later(1).core.leaving is not answers
    assert world.core.should_leave(world.now_ms) is not answers


def test_a_server_without_room_for_a_probe_is_not_left() -> None:
    for commands_max, expected in (("1", []), ("2", ["cancel"])):
        world = World().connected()
        world.acquire(wait=None)
        world.sent()
        assert len(limited(world, commands_max).sent()) == 1
        assert world.later(PROBE_AFTER_MS).sent_kinds() == expected
        assert world.later(_RPC_TIMEOUT_MS).core.leaving is bool(expected)


def test_a_client_that_closes_asks_nothing(world: World) -> None:
    world.ask(wait=None)
    world.later(PROBE_AFTER_MS - 1)
    world.core.close(Slot(), now_ms=world.now_ms)
    assert world.sent_kinds() == ["cancel"]
    world.core.received(lock_pb2.SessionResponse(), now_ms=world.now_ms)
    world.core.stop()
    assert world.core.next_alarm_ms() == math.inf


def test_a_call_that_waits_for_a_link_goes_on_with_one_and_fails_without() -> None:
    world = World()
    served, late = Slot(), Slot()
    world.core.await_link(served, now_ms=world.now_ms)
    assert world.core.wants_link
    world.connected()
    assert served.settled
    world.core.await_link(at_once := Slot(), now_ms=world.now_ms)
    assert at_once.settled
    world.broken(UnavailableError("it went away"))
    world.core.await_link(late, now_ms=world.now_ms)
    world.later(_RPC_TIMEOUT_MS)
    assert type(late.error) is UnavailableError
    assert "it went away" in str(late.error)
    assert not world.core.wants_link


def test_streams_that_end_at_once_are_no_server_that_can_be_waited_for(world: World) -> None:
    """A proxy without a healthy server opens each stream, and ends it; even an endless wait is over then."""
    slot, _ = world.ask(wait=None)
    while not slot.done() and world.now_ms < 10 * _RPC_TIMEOUT_MS:
        world.broken(UnavailableError("no healthy upstream"))
        world.later(100).connected()
    assert world.now_ms == pytest.approx(_RPC_TIMEOUT_MS, abs=200)
    assert type(slot.error) is OutcomeUnknownError
    assert "no healthy upstream" in str(slot.error)


@pytest.mark.parametrize("silent_ms", [1_000, 10_000])
def test_a_waiter_has_the_rpc_timeout_to_find_another_server(world: World, silent_ms: int) -> None:
    """Its server had nothing to say, and died."""
    slot, _ = world.ask(wait=None)
    world.later(silent_ms).broken()
    world.later(_RPC_TIMEOUT_MS - 100).connected()
    assert not slot.done()
    assert world.one("acquire")


def test_an_acquire_that_may_have_been_granted_before_a_refusal_is_released(world: World) -> None:
    slot, first = world.ask(wait=None)
    world.reconnect()
    world.broken(WrongServiceError("Method not found!"))
    assert type(slot.error) is WrongServiceError
    assert world.connected().one("release").release.lease_id == first.acquire.lease_id


def test_another_service_is_told_at_once_if_there_is_no_other_address(world: World) -> None:
    slot, _ = world.ask(wait=None)
    world.broken(WrongServiceError("Method not found!"))
    assert type(slot.error) is WrongServiceError
    assert not world.connected().sent(), "the service ran nothing, so there is nothing to release"
