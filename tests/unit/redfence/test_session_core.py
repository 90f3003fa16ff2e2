"""Every decision of a session, told and asked by hand: no loop, no thread, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from unit.redfence.core_world import (
    Slot,
    World,
    echo,
    failed,
    granted,
    in_state,
    not_granted,
    released,
    renewed,
)

from redfence import (
    AccessDeniedError,
    AcquireTimeoutError,
    ClosedError,
    InvalidArgumentError,
    LeaseLostError,
    LeaseState,
    LockHeldError,
    LossReason,
    OutcomeUnknownError,
    OverloadedError,
    UnavailableError,
)
from redfence._core.acquires import TRY_INTERVAL_MS
from redfence._core.outbox import COMMANDS_IN_FLIGHT_MAX, COMMANDS_PER_MESSAGE_MAX, WAITS_SHARE
from redfence._core.probe import LATE_MS_MAX, PROBE_AFTER_MS
from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2

_HELD = lock_pb2.ACQUIRE_OUTCOME_HELD
_WAIT_TIMEOUT = lock_pb2.ACQUIRE_OUTCOME_WAIT_TIMEOUT
_ACTIVE, _AT_RISK, _LOST = (
    lock_pb2.LEASE_STATE_ACTIVE,
    lock_pb2.LEASE_STATE_AT_RISK,
    lock_pb2.LEASE_STATE_LOST,
)
_RPC_TIMEOUT_MS = 5000
_NO_QUORUM = (14, lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE)
_DRAINING = (14, lock_pb2.ERROR_REASON_DRAINING)


# Acquiring.


def test_an_acquire_is_sent_as_asked_and_its_grant_reaches_the_caller() -> None:
    world = World().connected()
    slot, command = world.ask("orders/42", ttl=9, wait=2.5)
    assert command.acquire.resource == "orders/42"
    assert command.acquire.ttl.ToMilliseconds() == 9000
    assert command.acquire.wait_timeout.ToMilliseconds() == 2500
    assert len(command.acquire.lease_id) == 32
    world.answer(granted(command, token=41))
    assert slot.result.token == 41
    assert slot.result.state is LeaseState.ACTIVE


def test_commands_issued_together_leave_in_one_message_within_the_size_limit() -> None:
    world = World().connected()
    for _ in range(COMMANDS_PER_MESSAGE_MAX + 1):
        order_of_256 = "é" * 128
        call, _ = world.acquire(order_of_256)
        object.__setattr__(call.order, "holder", "é" * 128)
    first, second = world.core.take_batch(0.0), world.core.take_batch(0.0)
    assert first is not None
    assert second is not None
    assert (len(first.commands), len(second.commands)) == (COMMANDS_PER_MESSAGE_MAX, 1)
    assert first.ByteSize() < bounds.MESSAGE_BYTES_MAX
    assert world.core.take_batch(0.0) is None


@pytest.mark.parametrize(
    ("wait", "outcome", "kind"), [(0, _HELD, LockHeldError), (1, _WAIT_TIMEOUT, AcquireTimeoutError)]
)
def test_a_held_lock_is_an_error_that_tells_who_holds_it(
    wait: float, outcome: int, kind: type[Exception]
) -> None:
    world = World().connected()
    slot, command = world.ask(wait=wait)
    world.later(wait * 1000)
    world.answer(not_granted(command, outcome))  # type: ignore[arg-type]
    error = slot.error
    assert type(error) is kind
    assert isinstance(error, LockHeldError | AcquireTimeoutError)
    assert (error.resource, error.holder, error.token, error.remaining) == ("r", "them", 7, 1.5)
    assert world.sent() == [], "nothing was granted, so nothing is released"


def test_a_wait_for_ever_is_a_day_after_a_day_with_the_same_lease_id() -> None:
    world = World().connected()
    slot, first = world.ask(wait=None)
    assert first.acquire.wait_timeout.ToMilliseconds() == 24 * 3600 * 1000
    world.later_with_echo(24 * 3600 * 1000)
    world.answer(not_granted(first, _WAIT_TIMEOUT))
    second = world.one("acquire")
    assert second.acquire == first.acquire
    world.answer(granted(second))
    assert slot.result.token == 1


@pytest.mark.parametrize("wait", [0.1, 90, 3600])
def test_a_wait_is_asked_for_whole_so_that_it_keeps_its_place(wait: float) -> None:
    world = World().connected()
    slot, command = world.ask(wait=wait)
    assert command.acquire.wait_timeout.ToMilliseconds() == wait * 1000
    world.later_with_echo(wait * 1000)
    world.answer(not_granted(command, _WAIT_TIMEOUT))
    assert type(slot.error) is AcquireTimeoutError


@pytest.mark.parametrize(("early_ms", "is_over"), [(0, True), (3_600, True), (3_700, False)])
def test_a_servers_clock_may_end_a_wait_a_little_early(early_ms: float, is_over: bool) -> None:  # noqa: FBT001
    """Two clocks may differ by a thousandth. The client asks again only for more than that."""
    world = World().connected()
    slot, command = world.ask(wait=3600)
    world.later_with_echo(3_600_000 - early_ms)
    world.answer(not_granted(command, _WAIT_TIMEOUT))
    assert slot.done() is is_over
    assert world.sent_kinds() == ([] if is_over else ["acquire"])


@pytest.mark.parametrize(
    ("position", "words"),
    [(0, ""), (1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (12, "12th"), (101, "101st")],
)
def test_a_wait_that_ran_out_tells_its_place_in_the_queue(position: int, words: str) -> None:
    world = World().connected()
    slot, command = world.ask(wait=5)
    world.later(5000)
    world.answer(not_granted(command, _WAIT_TIMEOUT, position=position))
    assert isinstance(slot.error, AcquireTimeoutError)
    assert slot.error.position == position
    still = f"; still {words} in line" if words else ""
    assert str(slot.error) == f"'r' was still held by 'them' after 5 s{still}"


def test_a_waiting_acquire_never_keeps_a_release_from_leaving() -> None:
    """The stream reserves room for releases and renewals."""
    world = World().connected()
    lease = world.held(resource="mine")
    for _ in range(COMMANDS_IN_FLIGHT_MAX + 10):
        world.acquire(wait=None)
    assert len(world.sent()) == int(COMMANDS_IN_FLIGHT_MAX * WAITS_SHARE)
    world.core.release(lease, None, now_ms=world.now_ms)
    assert world.sent_kinds() == ["release"]


@pytest.mark.slow
def test_an_acquire_that_queues_behind_others_is_not_given_up_while_its_wait_lasts() -> None:
    world = World(rpc_timeout_ms=1000).connected()
    sent = [world.acquire(wait=60)[1] for _ in range(COMMANDS_IN_FLIGHT_MAX)]
    _, queued = world.acquire(wait=None)
    world.sent()
    world.later(61_000)
    assert isinstance(sent[0].error, OutcomeUnknownError)
    assert queued.error is None


def _limited(world: World, commands_max: str) -> World:
    """End the stream as a server does that was asked for more than it allows; and open the next."""
    error = OverloadedError("too many", error_reason="TOO_MANY_COMMANDS", metadata={"limit": commands_max})
    world.broken(error)
    return world.connected()


@pytest.mark.parametrize("commands_max", [*range(1, 130), 1000, 10_000])
def test_within_any_limit_of_a_server_releases_always_leave(commands_max: int) -> None:
    world = World().connected()
    lease = world.held(resource="mine")
    for _ in range(commands_max):
        world.acquire(wait=None)
    waiting = len(_limited(world, str(commands_max)).sent())
    assert 1 <= waiting <= commands_max
    assert waiting >= commands_max * 0.7 - 2
    world.acquire(wait=0)
    tried = world.sent_kinds()
    assert tried == ([] if commands_max < 4 else ["acquire"])
    world.core.release(lease, None, now_ms=world.now_ms)
    released = world.sent_kinds()
    assert released == ([] if commands_max < 2 else ["release"])
    assert waiting + len(tried) + len(released) <= commands_max


@pytest.mark.parametrize("limit", ["", "many", "-1"])
def test_a_limit_that_is_no_number_is_ignored(limit: str) -> None:
    world = World().connected()
    world.acquire()
    assert len(_limited(world, limit).sent()) == 1


def test_a_queued_wait_is_tried_once_when_its_time_is_over() -> None:
    world = _limited(World().connected(), "2")
    world.acquire(wait=None)
    slots = [world.acquire(resource, wait=2)[1] for resource in ("held", "free")]
    assert len(world.sent()) == 1
    world.later(1999)
    assert world.sent() == []
    world = _limited(world, "100").later(1)
    held, free, _ = world.sent()
    assert [command.acquire.wait_timeout.ToMilliseconds() for command in (held, free)] == [0, 0]
    world.answer(not_granted(held, _HELD), granted(free))
    assert type(slots[0].error) is AcquireTimeoutError
    assert slots[1].result.token == 1


def test_a_wait_that_was_sent_late_has_all_of_its_time() -> None:
    """The rpc timeout counts from the end of the wait that the server was asked for."""
    world = _limited(World(rpc_timeout_ms=1000).connected(), "2")
    _, first = world.acquire(wait=100, ttl=3600)
    _, second = world.acquire(wait=100, ttl=3600)
    first_command = world.one("acquire")
    world.later(4_000)
    world.answer(granted(first_command))
    second_command = world.one("acquire")
    assert second_command.acquire.wait_timeout.ToMilliseconds() == 96_000
    world.later_with_echo(96_000)
    assert not second.done()
    assert not world.core.leaving
    world.answer(granted(second_command))
    assert second.result is not None
    assert first.result is not None


def test_a_wait_that_finds_no_room_is_tried_now_and_then_and_keeps_its_place() -> None:
    world = _limited(World().connected(), "40")
    for _ in range(28):
        world.acquire("others", wait=None)
    others = world.sent()
    for resource in ("early", "late", "last"):
        assert world.sent() == []
        world.acquire(resource, wait=None)
        tries = world.later(TRY_INTERVAL_MS).sent()
        assert [each.acquire.resource for each in tries] == ["early", "late", "last"][: len(tries)]
        assert not any(each.acquire.HasField("wait_timeout") for each in tries)
        world.answer(*(not_granted(each, _HELD) for each in tries))
    assert len(tries) == 3
    for other, resource in zip(others, ("early", "late", "last"), strict=False):
        world.answer(granted(other))
        (command,) = (each for each in world.sent() if each.HasField("acquire"))
        assert command.acquire.resource == resource
        assert command.acquire.HasField("wait_timeout")


def _too_many(command: lock_pb2.SessionCommand, scope: str) -> lock_pb2.SessionResult:
    result = failed(command, 8, lock_pb2.ERROR_REASON_TOO_MANY_WAITERS)
    result.error.metadata["scope"] = scope
    result.error.retry_after.FromSeconds(1)
    return result


def test_a_full_queue_costs_nobody_else_its_place() -> None:
    world = World(address_count=2).connected()
    _, waiting = world.acquire("other", wait=None)
    world.one("acquire")
    slot, command = world.ask(wait=None)
    world.answer(_too_many(command, "resource"))
    assert isinstance(slot.error, OverloadedError)
    assert not world.core.leaving
    assert not waiting.done()


def test_a_full_connection_is_waited_for_in_the_client() -> None:
    world = World().connected()
    slots = [world.acquire(f"r{number}", wait=None)[1] for number in range(5)]
    commands = world.sent()
    world.answer(*(_too_many(command, "connection") for command in commands[2:]))
    world.acquire("latest", wait=None)
    assert world.sent() == []
    assert not any(slot.done() for slot in slots)
    waiting = commands[:2]
    for expected in ("r2", "r3", "r4", "latest"):
        world.answer(granted(waiting.pop(0)))
        waiting.append(world.one("acquire"))
        assert waiting[-1].acquire.resource == expected


def test_the_next_server_has_room_of_its_own() -> None:
    world = World().connected()
    for number in range(5):
        world.acquire(f"r{number}", wait=None)
    world.answer(*(_too_many(command, "connection") for command in world.sent()[2:]))
    assert world.sent() == []
    world.reconnect()
    assert len(world.sent()) == 5


def test_acquires_keep_their_places_when_the_link_breaks() -> None:
    world = World().connected()
    for resource in ("first", "second"):
        world.ask(resource, wait=None)
    world.acquire("third", wait=None)
    world.reconnect()
    assert [command.acquire.resource for command in world.sent()] == ["first", "second", "third"]


def test_an_acquire_that_the_server_cancelled_is_asked_for_again_on_the_next_link() -> None:
    world = World().connected()
    _, slot = world.acquire(wait=None)
    world.acquire()
    first = next(command for command in world.sent() if command.acquire.HasField("wait_timeout"))
    world.answer(failed(first, 1, lock_pb2.ERROR_REASON_CANCELLED))
    assert world.sent() == [], "this stream is about to end"
    _limited(world, "50")
    again = next(command for command in world.sent() if command.acquire.lease_id == first.acquire.lease_id)
    world.answer(granted(again))
    assert slot.result.token == 1


def test_a_grant_that_arrives_past_its_validity_is_released_and_not_handed_out() -> None:
    world = World(rpc_timeout_ms=60_000).connected()
    slot, command = world.ask(ttl=9)
    world.later(9000)
    world.answer(granted(command))
    assert isinstance(slot.error, LeaseLostError)
    assert world.one("release").release.lease_id == command.acquire.lease_id


def test_a_lease_id_is_in_no_representation_of_a_call() -> None:
    world = World().connected()
    call, _ = world.acquire()
    command = world.one("acquire")
    assert command.acquire.lease_id not in repr(call)
    world.answer(granted(command))
    assert command.acquire.lease_id not in repr(call)


def test_acquires_that_were_given_up_before_they_left_are_forgotten() -> None:
    world = World()
    world.acquire("stays", wait=None)
    for _ in range(1000):
        call, _ = world.acquire(wait=None)
        world.core.abandon(call, now_ms=world.now_ms)
    assert len(world.core._outbox._waits._numbers) < 100
    assert [each.acquire.resource for each in world.connected().sent()] == ["stays"]


def test_a_client_knows_which_of_its_acquires_waits_for_a_resource() -> None:
    world = World().connected()
    world.acquire(wait=0)
    world.acquire("other", wait=None)
    first, _ = world.acquire(wait=None)
    second, _ = world.acquire(wait=None)
    seen = [world.core.waiting_lease_id("r")]
    world.sent()
    seen.append(world.core.waiting_lease_id("r"))
    world.core.abandon(first, now_ms=world.now_ms)
    seen.append(world.core.waiting_lease_id("r"))
    assert seen == ["", first.lease_id, second.lease_id]


# Errors of an acquire.


def _refused(command: lock_pb2.SessionCommand) -> lock_pb2.SessionResult:
    return failed(command, 3, lock_pb2.ERROR_REASON_INVALID_TTL)


def _without_quorum(command: lock_pb2.SessionCommand) -> lock_pb2.SessionResult:
    return failed(command, *_NO_QUORUM)


def _drains(command: lock_pb2.SessionCommand) -> lock_pb2.SessionResult:
    return failed(command, *_DRAINING)


def _too_many_of(scope: str) -> Callable[[lock_pb2.SessionCommand], lock_pb2.SessionResult]:
    return lambda command: _too_many(command, scope)


@pytest.mark.parametrize(
    ("refusal", "kind", "releases"),
    [
        (_refused, InvalidArgumentError, []),
        (_too_many_of("resource"), OverloadedError, []),
        # No acquire of this client waits on the connection, so none would ever make room.
        (_too_many_of("connection"), OverloadedError, []),
        # A node may keep a part of the mint.
        (_without_quorum, UnavailableError, ["release"]),
    ],
)
def test_the_only_servers_refusal_reaches_the_caller_at_once(
    refusal: Callable[[lock_pb2.SessionCommand], lock_pb2.SessionResult],
    kind: type[Exception],
    releases: list[str],
) -> None:
    world = World().connected()
    slot, command = world.ask(wait=None)
    world.answer(refusal(command))
    assert type(slot.error) is kind
    assert world.sent_kinds() == releases
    if isinstance(slot.error, OverloadedError):
        assert slot.error.scope in {"resource", "connection"}
        assert slot.error.retry_after == 1.0


@pytest.mark.parametrize(
    ("address_count", "refusal", "kind"),
    [
        (2, _without_quorum, UnavailableError),
        (2, _too_many_of("server"), OverloadedError),
        (1, _drains, None),
        (2, _drains, None),
    ],
)
def test_an_acquire_that_one_server_refuses_is_asked_for_at_the_next(
    address_count: int,
    refusal: Callable[[lock_pb2.SessionCommand], lock_pb2.SessionResult],
    kind: type[Exception] | None,
) -> None:
    """A second refusal is final, unless the server drains. The first one may have left a part of a mint."""
    world = World(address_count=address_count).connected()
    slot, first = world.ask(wait=None)
    world.answer(refusal(first))
    assert world.core.should_leave(world.now_ms)
    assert world.sent() == []
    second = world.reconnect().one("acquire")
    assert second.acquire.lease_id == first.acquire.lease_id
    world.answer(granted(second) if kind is None else refusal(second))
    assert type(slot.error) is (kind or type(None))
    assert world.sent_kinds() == ([] if kind is None else ["release"])


def test_a_draining_server_gets_no_new_commands_and_is_left_when_it_has_answered() -> None:
    world = World().connected()
    lease = world.held()
    world.core.release(lease, None, now_ms=world.now_ms)
    release = world.one("release")
    draining = lock_pb2.SessionResponse(draining=lock_pb2.Draining())
    draining.draining.grace.FromSeconds(10)
    world.core.received(draining, now_ms=world.now_ms)
    world.acquire()
    assert world.sent() == []
    assert not world.core.should_leave(world.now_ms)
    assert world.core.should_leave(world.now_ms + 1000)
    world.answer(released(release))
    assert world.core.should_leave(world.now_ms)


# Links that break.


def test_after_a_broken_stream_an_acquire_is_sent_again_with_the_same_lease_id() -> None:
    world = World().connected()
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


def test_a_resent_acquire_that_is_then_refused_is_released() -> None:
    """The first sending may have left a shared hold that only its owner removes."""
    world = World().connected()
    slot, _ = world.ask()
    world.reconnect()
    again = world.one("acquire")
    world.answer(not_granted(again, _HELD))
    assert type(slot.error) is LockHeldError
    assert world.one("release").release.lease_id == again.acquire.lease_id


def test_after_a_broken_stream_a_release_is_sent_again() -> None:
    world = World().connected()
    lease = world.held()
    slot = Slot()
    world.core.release(lease, slot, now_ms=world.now_ms)
    first = world.one("release")
    world.reconnect()
    second = world.one("release")
    assert second.release == first.release
    world.answer(released(second, held=False))
    assert slot.result is False


def test_after_a_broken_stream_a_renewal_counts_as_failed_and_is_sent_anew() -> None:
    world = World().connected()
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
    world.core.link_failed(cause)
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
    world.core.link_failed(AccessDeniedError("who are you?"))
    assert isinstance(acquiring.error, AccessDeniedError)
    assert isinstance(calling.error, AccessDeniedError)


@pytest.mark.parametrize("wait", [0, 3])
def test_an_acquire_without_an_answer_fails_after_the_rpc_timeout_and_is_released(
    wait: float,
) -> None:
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
    wait: float | None,
) -> None:
    world = World().connected()
    slot, _ = world.ask(wait=wait)
    world.broken()
    world.later(_RPC_TIMEOUT_MS - 1)
    assert not slot.done()
    world.later(1)
    assert type(slot.error) is OutcomeUnknownError
    assert world.core.wants_link
    world.connected()
    assert world.sent_kinds() == ["release"]


def test_a_server_that_does_not_answer_a_release_is_left() -> None:
    world = World().connected()
    slot = Slot()
    world.core.release(world.held(), slot, now_ms=world.now_ms)
    world.sent()
    world.later(_RPC_TIMEOUT_MS)
    assert type(slot.error) is OutcomeUnknownError
    assert world.core.should_leave(world.now_ms)


def test_clean_up_is_bounded() -> None:
    world = World()
    lease = world.connected().held()
    world.core.release(lease, None, now_ms=0.0)
    world.broken()
    world.later(_RPC_TIMEOUT_MS)
    assert not world.core.wants_link


def test_links_that_break_again_and_again_do_not_prolong_a_finite_wait() -> None:
    world = World()
    _, slot = world.acquire(wait=1)
    for _ in range(20):
        world.connected().sent()
        world.later(400).broken()
    assert isinstance(slot.error, OutcomeUnknownError)


# Servers that are silent.


def _silent(world: World, *, ms: float = PROBE_AFTER_MS) -> lock_pb2.SessionCommand:
    """Let nothing be heard for so long; return the probe, which is all that leaves, and at the end of it."""
    assert world.later(ms - 1).sent() == []
    return world.later(1).one("cancel")


def test_a_silent_server_with_waiting_acquires_is_asked_for_an_echo() -> None:
    world = World(address_count=2).connected()
    slot, acquire = world.ask(wait=None)
    for _ in range(3):
        probe = _silent(world)
        assert probe.cancel.id == probe.id
        world.later(_RPC_TIMEOUT_MS - 1).answer(echo(probe))
    assert not world.core.leaving
    world.answer(granted(acquire, waited_ms=int(world.now_ms)))
    assert slot.result.token == 1


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
    world = World(rpc_timeout_ms=60_000).connected()
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


def test_a_server_that_says_anything_else_is_not_asked() -> None:
    world = World().connected()
    world.held(resource="mine", ttl=36)
    world.ask(wait=None)
    for _ in range(300):
        world.later(12_000)
        world.answer(renewed(world.one("renew"), _ACTIVE, ttl_ms=36_000))
    assert world.later(0).sent() == []
    assert not world.core.leaving


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


def test_a_thousand_waits_at_a_silent_server_ask_one_question() -> None:
    world = World().connected()
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
    suspended_ms: int,
    answers: bool,  # noqa: FBT001
) -> None:
    """The echo may have arrived while the client could not read it."""
    world = World().connected()
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
        assert len(_limited(world, commands_max).sent()) == 1
        assert world.later(PROBE_AFTER_MS).sent_kinds() == expected
        assert world.later(_RPC_TIMEOUT_MS).core.leaving is bool(expected)


def test_a_client_that_closes_asks_nothing() -> None:
    world = World().connected()
    world.ask(wait=None)
    world.later(PROBE_AFTER_MS - 1)
    world.core.close(Slot(), now_ms=world.now_ms)
    assert world.sent_kinds() == ["cancel"]
    world.core.received(lock_pb2.SessionResponse(), now_ms=world.now_ms)
    world.core.stop()
    assert world.core.next_alarm_ms() == math.inf


# Giving up.


def test_a_cancelled_acquire_that_was_not_sent_leaves_nothing() -> None:
    world = World().connected()
    call, slot = world.acquire()
    slot.cancelled = True
    world.core.abandon(call, now_ms=0.0)
    assert world.sent() == []
    assert not world.core.wants_link


@pytest.mark.parametrize("outcome", ["granted", "cancelled", "held", "no answer", "broken"])
def test_a_cancelled_acquire_is_always_released_after_it_was_answered(outcome: str) -> None:
    """A Release that leaves before the answer could overtake the acquire."""
    world = World().connected()
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


def test_a_grant_that_meets_its_callers_cancellation_is_released() -> None:
    world = World().connected()
    call, _ = world.acquire()
    world.answer(granted(world.one("acquire")))
    world.core.abandon(call, now_ms=0.0)
    assert world.sent_kinds() == ["release"]
    assert world.later(60_000).sent() == [], "and not kept alive"


def test_a_late_grant_of_an_acquire_that_was_given_up_is_released_once_more() -> None:
    """The nodes may have carried out the first Release before the mint."""
    world = World().connected()
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


# Keeping alive.


def test_a_lease_is_renewed_and_lives_on() -> None:
    world = World().connected()
    lease = world.held(ttl=9)
    for _ in range(10):
        world.later(3000)
        world.answer(renewed(world.one("renew"), _ACTIVE))
    assert lease.remaining_ms(world.now_ms) > 8000


def test_a_lost_lease_is_told_once_and_never_renewed_again() -> None:
    world = World().connected()
    lease = world.held(ttl=9)
    told: list[str] = []
    lease.on_lost = lambda: told.append("lost")
    world.later(3000)
    world.answer(renewed(world.one("renew"), _LOST))
    assert (lease.state, lease.loss, told) == (LeaseState.LOST, LossReason.NOT_HELD, ["lost"])
    assert world.later(60_000).sent() == []
    assert told == ["lost"]


def test_a_server_that_says_nothing_loses_the_lease_at_the_deadline() -> None:
    world = World().connected()
    lease = world.held(ttl=9)
    told: list[float] = []
    lease.on_lost = lambda: told.append(world.now_ms)
    world.later(20_000)
    assert told == [lease.deadline_ms]
    assert lease.loss is LossReason.EXPIRED


def test_a_silent_server_is_left_for_another_one_in_time_to_save_the_lease() -> None:
    world = World(address_count=2).connected()
    lease = world.held(ttl=9)
    world.now_ms = 3000.0
    world.core.tick(3000.0)
    world.sent()
    world.core.tick(4500.0)
    assert in_state(lease, LeaseState.AT_RISK)
    assert world.core.should_leave(4500.0)


def test_the_instant_to_leave_rings_once() -> None:
    world = World(address_count=2).connected()
    world.held(ttl=9)
    world.later(3000)
    world.sent()
    world.later(1500)
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


def test_every_departure_rings() -> None:
    world = World().connected()
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
    for answer in (released, _without_quorum, _drains):
        world = World().connected()
        lease, slot = world.held(ttl=9), Slot()
        world.core.release(lease, slot, now_ms=world.now_ms)
        world.answer(answer(world.one("release")))
        if answer is _without_quorum:
            assert type(slot.error) is UnavailableError
            continue
        if answer is _drains:
            assert world.core.should_leave(world.now_ms)
            world.answer(released(world.reconnect().one("release")))
        assert slot.result is True
        assert in_state(lease, LeaseState.RELEASED)
        assert world.later(60_000).sent() == []


# Waiting for a link.


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


# Closing.


def test_closing_fails_calls_ends_leases_and_waits_for_the_releases() -> None:
    world = World().connected()
    lease = world.held(ttl=9)
    told: list[str] = []
    lease.on_lost = lambda: told.append("lost")
    _, waiting = world.acquire(wait=None)
    acquire = world.one("acquire")
    idle = Slot()
    world.core.close(idle, now_ms=world.now_ms)
    assert isinstance(waiting.error, ClosedError)
    assert (lease.loss, told) == (LossReason.CLIENT_CLOSED, ["lost"])
    cancel, release = sorted(world.sent(), key=lambda command: str(command.WhichOneof("command")))
    assert cancel.cancel.id == acquire.id
    world.answer(released(release), failed(acquire, 1, lock_pb2.ERROR_REASON_CANCELLED))
    assert not idle.done()
    world.answer(released(world.one("release"), held=False))
    assert idle.done()


def test_a_closed_client_refuses_everything_and_holds_nobody_up() -> None:
    world = World().connected()
    idle = Slot()
    world.core.close(idle, now_ms=0.0)
    assert idle.done()
    with pytest.raises(ClosedError):
        world.acquire()
    with pytest.raises(ClosedError):
        world.core.await_link(Slot(), now_ms=0.0)


def test_closing_without_a_server_ends_by_the_rpc_timeout() -> None:
    world = World().connected()
    world.held()
    world.broken()
    idle = Slot()
    world.core.close(idle, now_ms=world.now_ms)
    assert not idle.done()
    world.later(_RPC_TIMEOUT_MS)
    assert idle.done()


def test_stopping_ends_whatever_closing_could_not() -> None:
    world = World().connected()
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


def test_a_caller_that_is_cancelled_while_the_client_closes_releases_nothing_twice() -> None:
    world = World().connected()
    call, _ = world.acquire()
    world.answer(granted(world.one("acquire")))
    world.core.close(Slot(), now_ms=world.now_ms)
    world.core.abandon(call, now_ms=world.now_ms)
    assert world.sent_kinds() == ["release"]


def test_an_idle_client_wants_no_link() -> None:
    world = World()
    wants_link = [world.core.wants_link]
    call, _ = world.acquire()
    wants_link.append(world.core.wants_link)
    world.core.abandon(call, now_ms=0.0)
    wants_link.append(world.core.wants_link)
    assert wants_link == [False, True, False]
