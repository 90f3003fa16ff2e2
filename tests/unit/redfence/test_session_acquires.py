"""The session core sends, repeats and answers acquires. No test here has a loop, a thread or a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from unit.redfence.core_world import (
    Slot,
    World,
    drains,
    failed,
    granted,
    limited,
    not_granted,
    released,
    too_many,
    without_quorum,
)

import redfence
from redfence._core.acquires import TRY_INTERVAL_MS
from redfence._core.outbox import COMMANDS_IN_FLIGHT_MAX, COMMANDS_PER_MESSAGE_MAX, WAITS_SHARE
from redfence._messages.requests import acquire_order
from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2

_HELD = lock_pb2.ACQUIRE_OUTCOME_HELD
_WAIT_TIMEOUT = lock_pb2.ACQUIRE_OUTCOME_WAIT_TIMEOUT


def test_an_acquire_is_sent_as_asked_and_its_grant_reaches_the_caller(world: World) -> None:
    slot, command = world.ask("orders/42", ttl=9, wait=2.5)
    assert command.acquire.resource == "orders/42"
    assert command.acquire.ttl.ToMilliseconds() == 9000
    assert command.acquire.wait_timeout.ToMilliseconds() == 2500
    assert len(command.acquire.lease_id) == 32
    world.answer(granted(command, token=41))
    assert slot.result.token == 41
    assert slot.result.state is redfence.LeaseState.ACTIVE


def test_commands_issued_together_leave_in_one_message_within_the_size_limit(world: World) -> None:
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
    ("wait", "outcome", "kind"),
    [(0, _HELD, redfence.LockHeldError), (1, _WAIT_TIMEOUT, redfence.AcquireTimeoutError)],
)
def test_a_held_lock_is_an_error_that_tells_who_holds_it(
    world: World, wait: float, outcome: int, kind: type[Exception]
) -> None:
    slot, command = world.ask(wait=wait)
    world.later(wait * 1000)
    world.answer(not_granted(command, outcome))  # type: ignore[arg-type]
    error = slot.error
    assert type(error) is kind
    assert isinstance(error, redfence.LockHeldError | redfence.AcquireTimeoutError)
    assert (error.resource, error.holder, error.token, error.remaining) == ("r", "them", 7, 1.5)
    assert world.sent() == [], "nothing was granted, so nothing is released"


def test_a_wait_for_ever_is_a_day_after_a_day_with_the_same_lease_id(world: World) -> None:
    slot, first = world.ask(wait=None)
    assert first.acquire.wait_timeout.ToMilliseconds() == 24 * 3600 * 1000
    world.later_with_echo(24 * 3600 * 1000)
    world.answer(not_granted(first, _WAIT_TIMEOUT))
    second = world.one("acquire")
    assert second.acquire == first.acquire
    world.answer(granted(second))
    assert slot.result.token == 1


@pytest.mark.parametrize(("early_ms", "is_over"), [(0, True), (3_600, True), (3_700, False)])
def test_a_servers_clock_may_end_a_wait_a_little_early(early_ms: float, is_over: bool) -> None:  # noqa: FBT001
    """Two clocks may differ by a thousandth. The client asks again only for more than that."""
    world = World().connected()
    slot, command = world.ask(wait=3600)
    assert command.acquire.wait_timeout.ToMilliseconds() == 3_600_000, "whole, so that it keeps its place"
    world.later_with_echo(3_600_000 - early_ms)
    world.answer(not_granted(command, _WAIT_TIMEOUT))
    assert slot.done() is is_over
    assert world.sent_kinds() == ([] if is_over else ["acquire"])


@pytest.mark.parametrize(
    ("position", "words"),
    [(0, ""), (1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (12, "12th"), (101, "101st")],
)
def test_a_wait_that_ran_out_tells_its_place_in_the_queue(world: World, position: int, words: str) -> None:
    slot, command = world.ask(wait=5)
    world.later(5000)
    world.answer(not_granted(command, _WAIT_TIMEOUT, position=position))
    assert isinstance(slot.error, redfence.AcquireTimeoutError)
    assert slot.error.position == position
    still = f"; still {words} in line" if words else ""
    assert str(slot.error) == f"'r' was still held by 'them' after 5 s{still}"


def test_a_waiting_acquire_never_keeps_a_release_from_leaving(world: World) -> None:
    """The stream reserves room for releases and renewals."""
    lease = world.held(resource="mine")
    for _ in range(COMMANDS_IN_FLIGHT_MAX + 10):
        world.acquire(wait=None)
    assert len(world.sent()) == int(COMMANDS_IN_FLIGHT_MAX * WAITS_SHARE)
    world.core.release(lease, None, now_ms=world.now_ms)
    assert world.sent_kinds() == ["release"]


@pytest.mark.slow
def test_an_acquire_that_queues_behind_others_is_not_given_up_while_its_wait_lasts() -> None:
    world = World(rpc_timeout=1).connected()
    sent = [world.acquire(wait=60)[1] for _ in range(COMMANDS_IN_FLIGHT_MAX)]
    _, queued = world.acquire(wait=None)
    world.sent()
    world.later(61_000)
    assert isinstance(sent[0].error, redfence.OutcomeUnknownError)
    assert queued.error is None


@pytest.mark.parametrize("commands_max", [*range(1, 130), 1000, 10_000])
def test_within_any_limit_of_a_server_releases_always_leave(world: World, commands_max: int) -> None:
    lease = world.held(resource="mine")
    for _ in range(commands_max):
        world.acquire(wait=None)
    waiting = len(limited(world, str(commands_max)).sent())
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
def test_a_limit_that_is_no_number_is_ignored(world: World, limit: str) -> None:
    world.acquire()
    assert len(limited(world, limit).sent()) == 1


def test_a_queued_wait_is_tried_once_when_its_time_is_over() -> None:
    world = limited(World().connected(), "2")
    world.acquire(wait=None)
    slots = [world.acquire(resource, wait=2)[1] for resource in ("held", "free")]
    assert len(world.sent()) == 1
    world.later(1999)
    assert world.sent() == []
    world = limited(world, "100").later(1)
    held, free, _ = world.sent()
    assert [command.acquire.wait_timeout.ToMilliseconds() for command in (held, free)] == [0, 0]
    world.answer(not_granted(held, _HELD), granted(free))
    assert type(slots[0].error) is redfence.AcquireTimeoutError
    assert slots[1].result.token == 1


def test_a_wait_that_was_sent_late_has_all_of_its_time() -> None:
    """The rpc timeout counts from the end of the wait that the server was asked for."""
    world = limited(World(rpc_timeout=1).connected(), "2")
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
    world = limited(World().connected(), "40")
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


def test_a_full_queue_costs_nobody_else_its_place() -> None:
    world = World(address_count=2).connected()
    _, waiting = world.acquire("other", wait=None)
    world.one("acquire")
    slot, command = world.ask(wait=None)
    world.answer(too_many(command, "resource"))
    assert isinstance(slot.error, redfence.OverloadedError)
    assert not world.core.leaving
    assert not waiting.done()


def test_a_full_connection_is_waited_for_in_the_client(world: World) -> None:
    slots = [world.acquire(f"r{number}", wait=None)[1] for number in range(5)]
    commands = world.sent()
    world.answer(*(too_many(command, "connection") for command in commands[2:]))
    world.acquire("latest", wait=None)
    assert world.sent() == []
    assert not any(slot.done() for slot in slots)
    waiting = commands[:2]
    for expected in ("r2", "r3", "r4", "latest"):
        world.answer(granted(waiting.pop(0)))
        waiting.append(world.one("acquire"))
        assert waiting[-1].acquire.resource == expected


def test_the_next_server_has_room_of_its_own(world: World) -> None:
    for number in range(5):
        world.acquire(f"r{number}", wait=None)
    world.answer(*(too_many(command, "connection") for command in world.sent()[2:]))
    assert world.sent() == []
    world.reconnect()
    assert len(world.sent()) == 5


def test_acquires_keep_their_places_when_the_link_breaks(world: World) -> None:
    for resource in ("first", "second"):
        world.ask(resource, wait=None)
    world.acquire("third", wait=None)
    world.reconnect()
    assert [command.acquire.resource for command in world.sent()] == ["first", "second", "third"]


def test_an_acquire_that_the_server_cancelled_is_asked_for_again_on_the_next_link(world: World) -> None:
    _, slot = world.acquire(wait=None)
    world.acquire()
    first = next(command for command in world.sent() if command.acquire.HasField("wait_timeout"))
    world.answer(failed(first, 1, lock_pb2.ERROR_REASON_CANCELLED))
    assert world.sent() == [], "this stream is about to end"
    limited(world, "50")
    again = next(command for command in world.sent() if command.acquire.lease_id == first.acquire.lease_id)
    world.answer(granted(again))
    assert slot.result.token == 1


def test_a_grant_that_arrives_past_its_validity_is_released_and_not_handed_out() -> None:
    world = World(rpc_timeout=60).connected()
    slot, command = world.ask(ttl=9)
    world.later(9000)
    world.answer(granted(command))
    assert isinstance(slot.error, redfence.LeaseLostError)
    assert world.one("release").release.lease_id == command.acquire.lease_id


def test_a_lease_id_is_in_no_representation_of_a_call(world: World) -> None:
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


def test_a_client_knows_which_of_its_acquires_waits_for_a_resource(world: World) -> None:
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


def _refused(command: lock_pb2.SessionCommand) -> lock_pb2.SessionResult:
    return failed(command, 3, lock_pb2.ERROR_REASON_INVALID_TTL)


def _too_many_of(scope: str) -> Callable[[lock_pb2.SessionCommand], lock_pb2.SessionResult]:
    return lambda command: too_many(command, scope)


@pytest.mark.parametrize(
    ("refusal", "kind", "releases"),
    [
        (_refused, redfence.InvalidArgumentError, []),
        (_too_many_of("resource"), redfence.OverloadedError, []),
        # No acquire of this client waits on the connection, so none would ever make room.
        (_too_many_of("connection"), redfence.OverloadedError, []),
        # A node may keep a part of the mint.
        (without_quorum, redfence.UnavailableError, ["release"]),
    ],
)
def test_the_only_servers_refusal_reaches_the_caller_at_once(
    world: World,
    refusal: Callable[[lock_pb2.SessionCommand], lock_pb2.SessionResult],
    kind: type[Exception],
    releases: list[str],
) -> None:
    slot, command = world.ask(wait=None)
    world.answer(refusal(command))
    assert type(slot.error) is kind
    assert world.sent_kinds() == releases
    if isinstance(slot.error, redfence.OverloadedError):
        assert slot.error.scope in {"resource", "connection"}
        assert slot.error.retry_after == 1.0


@pytest.mark.parametrize(
    ("address_count", "refusal", "kind"),
    [
        (2, without_quorum, redfence.UnavailableError),
        (2, _too_many_of("server"), redfence.OverloadedError),
        (1, drains, None),
        (2, drains, None),
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


def test_a_draining_server_gets_no_new_commands_and_is_left_when_it_has_answered(world: World) -> None:
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


def test_a_release_has_the_span_of_the_code_that_caused_it(world: World) -> None:
    """A cleanup after an acquire belongs to the acquire; a renewal belongs to no caller."""
    order = replace(acquire_order("r", ttl=9, wait=0, holder="", max_hold=None), traceparent="of acquire")
    given_up = world.core.acquire(order, Slot(), now_ms=world.now_ms)
    acquire = world.one("acquire")
    world.core.abandon(given_up, now_ms=world.now_ms)
    world.answer(granted(acquire))
    assert [each.traceparent for each in world.sent() if each.HasField("release")] == ["of acquire"]

    lease = world.held(ttl=9)
    world.later(4_000)
    assert world.one("renew").traceparent == ""
    world.core.release(lease, None, now_ms=world.now_ms, traceparent="of release")
    assert world.one("release").traceparent == "of release"
