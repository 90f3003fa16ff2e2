"""Waiting over real nodes and real gRPC: the order of the queue, what is told of it, and the ttl of who waited."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest

from harness.load.session_caller import SessionCaller
from harness.load.waiters import TTL_MS, Waiter, line_up
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    locks_left,
    memories,
    new_lease_id,
    now_ms,
    until,
    until_no_locks,
)
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ACQUIRE_OUTCOME_WAIT_TIMEOUT,
    ERROR_REASON_DRAINING,
    ERROR_REASON_VALIDITY_EXHAUSTED,
)

NAME = "orders/42"


# --- the order --------------------------------------------------------------------------------------------------------


async def take_turns(waiters: list[Waiter]) -> list[tuple[int, int]]:
    """Release each as soon as it is granted; return who was granted, by place in the list, and with which token, in order of time."""
    granted: list[tuple[int, int]] = []

    async def take_turn(number: int, waiter: Waiter) -> None:
        lease = await waiter.lease()
        granted.append((number, lease.fencing_token))
        await waiter.release()

    await asyncio.gather(*(take_turn(number, waiter) for number, waiter in enumerate(waiters)))
    return granted


@pytest.mark.slow
async def test_a_thousand_waiters_of_one_lock_are_granted_in_the_order_in_which_they_came(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Over four connections, eight sessions and calls of their own: one order, rising tokens, and nothing left behind."""
    nodes = await formed_nodes(3)
    server = await serve(nodes)
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(server.on_own_connection()) for _ in range(4)]
        sessions = [
            await stack.enter_async_context(SessionCaller(connections[number % 4])) for number in range(8)
        ]
        waiters: list[Waiter] = []
        for turn in range(40):
            there = connections[turn % 4]
            waiters += await line_up(there, NAME, 24, session=sessions[turn % 8])
            waiters += await line_up(there, NAME, 1)
        assert len(waiters) == 1_000
        await server.release(NAME, held.lease_id)
        granted = await take_turns(waiters)
    assert [number for number, _ in granted] == list(range(1_000))
    tokens = [held.fencing_token, *(token for _, token in granted)]
    assert tokens == sorted(set(tokens))
    await server.until_waiting(NAME, count=0)
    kept = {b"redfence:node", b"redfence:high", b"redfence:counter:orders/42"}

    async def clean() -> bool:
        return all(set(each) == kept for each in await memories(nodes))

    await until(clean)


async def test_those_who_leave_from_the_middle_of_a_queue_leave_no_hole_and_the_others_keep_their_order(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Every third of a hundred gives up, by cancel commands and cancelled calls, before and while the others are served."""
    server = await serve(await formed_nodes(3))
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    async with SessionCaller(server) as session:
        waiters: list[Waiter] = []
        for _ in range(5):
            waiters += await line_up(server, NAME, 10, session=session)
            waiters += await line_up(server, NAME, 10)
        leaving = waiters[1::3]
        staying = [each for number, each in enumerate(waiters) if number % 3 != 1]
        for waiter in leaving[::2]:
            waiter.give_up()
        await server.until_waiting(NAME, count=len(waiters) - len(leaving[::2]))
        serving = asyncio.create_task(take_turns(staying))
        await server.release(NAME, held.lease_id)
        await asyncio.gather(*(waiter.withdraw() for waiter in leaving[1::2]))
        granted = await serving
    assert [number for number, _ in granted] == list(range(len(staying)))
    tokens = [token for _, token in granted]
    assert tokens == sorted(set(tokens))
    await until_no_locks(server.nodes)


async def test_a_call_that_does_not_wait_is_tried_past_the_queue_and_takes_nobodys_place(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """It is told HELD at once, and who waits is served as if it had never been there."""
    server = await serve(await formed_nodes(3))
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    waiters = await line_up(server, NAME, 3)
    for _ in range(5):
        assert (await server.acquire(NAME)).outcome == lock_pb2.ACQUIRE_OUTCOME_HELD
    assert [await each.position() for each in waiters] == [1, 2, 3]
    await server.release(NAME, held.lease_id)
    assert [number for number, _ in await take_turns(waiters)] == [0, 1, 2]


# --- what is told of it -----------------------------------------------------------------------------------------------


async def test_a_place_in_the_queue_is_told_by_lease_id_and_counts_down_as_those_ahead_leave(
    server: LockServer,
) -> None:
    """1 is the next to be granted; it changes when somebody ahead gives up or is granted, and not when somebody behind does."""
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    first, second, third, fourth = await line_up(server, NAME, 4)
    assert [await each.position() for each in (first, second, third, fourth)] == [1, 2, 3, 4]
    second.give_up()
    await server.until_waiting(NAME, count=3)
    assert [await each.position() for each in (first, second, third, fourth)] == [1, 0, 2, 3]
    fourth.give_up()
    await server.until_waiting(NAME, count=2)
    assert [await each.position() for each in (first, third)] == [1, 2]
    await server.release(NAME, held.lease_id)
    await first.lease()
    assert [await each.position() for each in (first, third)] == [0, 1]
    for lease_id in (new_lease_id(), held.lease_id, ""):
        assert (await server.look(NAME, lease_id=lease_id)).position == 0


async def test_a_look_lists_who_waits_in_order_by_label_and_waiting_time_and_no_more_than_a_hundred(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The count and one's own place are exact beyond that, and nobody's lease id is told."""
    server = await serve(await formed_nodes(3))
    await server.acquire(NAME, ttl_ms=TTL_MS)
    async with SessionCaller(server) as session:
        waiters = await line_up(server, NAME, 99, session=session)
        view = await server.look(NAME)
        assert [each.holder for each in view.queue] == [f"waiter-{number}" for number in range(99)]
        waiters += await line_up(server, NAME, 31, session=session)
        sent_at_ms = now_ms()
        view = await server.look(NAME, lease_id=waiters[119].lease_id)
    assert view.waiters == 130
    assert view.position == 120
    assert [each.holder for each in view.queue] == [f"waiter-{number}" for number in range(100)]
    waited_ms = [each.waited.ToMilliseconds() for each in view.queue]
    assert waited_ms == sorted(waited_ms, reverse=True)
    assert 0 < waited_ms[0] <= now_ms() - waiters[0].began_at_ms
    assert waited_ms[99] <= now_ms() - waiters[99].began_at_ms
    assert sent_at_ms - waiters[0].began_at_ms - waited_ms[0] < 1_000
    told = view.SerializeToString()
    assert not any(each.lease_id.encode() in told for each in waiters)


async def test_queues_of_different_resources_and_servers_know_nothing_of_each_other(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A queue is of one resource at one server, and so is what GetLock tells of it."""
    nodes = await formed_nodes(3)
    here, elsewhere = await serve(nodes), await serve(nodes)
    for name in ("a", "b"):
        await here.acquire(name, ttl_ms=TTL_MS)
    [waiter] = await line_up(here, "a", 1)
    for server, name in ((here, "b"), (elsewhere, "a")):
        view = await server.look(name, lease_id=waiter.lease_id)
        assert (view.waiters, view.position, len(view.queue)) == (0, 0, 0)
    assert await waiter.position() == 1


@pytest.mark.slow
@pytest.mark.parametrize("route", ["call", "session"])
async def test_a_wait_that_ends_is_told_with_its_place_and_who_holds_the_lock_now(
    route: str, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The holder is the present one, also if it was granted after the waiter had come; nobody is left in the queue."""
    server = await serve(await formed_nodes(3))
    first = (await server.acquire(NAME, ttl_ms=TTL_MS, holder="first")).lease
    async with SessionCaller(server) as session:
        second, third = await line_up(server, NAME, 2)
        # Until then the second has to be granted, also on a machine that stands still for a while.
        last = Waiter(server, NAME, session=session if route == "session" else None, wait_ms=2_000)
        await server.until_waiting(NAME, count=3)
        await server.release(NAME, first.lease_id)
        granted = await second.lease()
        answer = await last.answer()
    assert isinstance(answer, lock_pb2.AcquireResponse)
    assert answer.outcome == ACQUIRE_OUTCOME_WAIT_TIMEOUT
    assert answer.position == 2
    assert answer.current.holder == "waiter-0"
    assert answer.current.fencing_token == granted.fencing_token
    assert 0 < answer.current.remaining.ToMilliseconds() <= TTL_MS
    assert not answer.HasField("lease")
    view = await server.look(NAME)
    assert [each.holder for each in view.queue] == ["waiter-1"]
    third.give_up()


async def test_an_acquire_repeated_while_it_waits_is_granted_once_and_both_are_told_the_same(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A caller whose connection broke asks again with its lease id: both places come to the same grant, and no other one is held up."""
    server = await serve(await formed_nodes(3))
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    lease_id = new_lease_id()
    [first] = await line_up(server, NAME, 1, lease_id=lease_id)
    [between] = await line_up(server, NAME, 1)
    [again] = await line_up(server, NAME, 1, lease_id=lease_id)
    await server.release(NAME, held.lease_id)
    token = (await first.lease()).fencing_token
    assert (await again.lease()).fencing_token == token
    assert not between.done
    assert await between.position() == 1
    await first.release()
    assert (await between.lease()).fencing_token > token


# --- the ttl ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_ttl_of_a_lease_that_a_waiter_gets_starts_at_the_grant(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The nodes keep it for the whole ttl from then on, and its validity, counted from the send, is the wait and that ttl less drift."""
    server = await serve(await formed_nodes(3))
    ttl_ms, drift_ms = 1_000, 12
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    [waiter] = await line_up(server, NAME, 1, ttl_ms=ttl_ms)
    in_line_at_ms = now_ms()

    async def waited_longer_than_its_ttl() -> bool:
        return (await server.look(NAME)).queue[0].waited.ToMilliseconds() > 1.2 * ttl_ms

    await until(waited_longer_than_its_ttl)
    released_at_ms = now_ms()
    await server.release(NAME, held.lease_id)
    lease = await waiter.lease()
    looked_at_ms = now_ms()
    remaining_ms = (await server.look(NAME)).current.remaining.ToMilliseconds()
    seen_at_ms = now_ms()
    assert lease.ttl.ToMilliseconds() == ttl_ms
    # Granted between the sending of the release and the reading of the answer.
    assert ttl_ms - (seen_at_ms - released_at_ms) - 1 <= remaining_ms <= ttl_ms
    least_ms, most_ms = released_at_ms - in_line_at_ms, looked_at_ms - waiter.began_at_ms
    # Of the wait, 0.05 % is for clocks that part, and a part of a millisecond is lost to rounding.
    validity_ms = lease.validity.ToMilliseconds()
    assert least_ms * 0.9995 + ttl_ms - drift_ms - 1 <= validity_ms <= most_ms + ttl_ms - drift_ms


@pytest.mark.slow
async def test_a_grant_to_a_waiter_that_comes_too_late_to_be_worth_anything_is_undone_and_tried_again(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """While the nodes are slower than the ttl is long nobody is told GRANTED; when they are fast again, the waiter is granted."""
    nodes = await formed_nodes(3)
    server = await serve(nodes, proxied=True, node_timeout_ms=5_000)
    await server.until_states(*[lock_pb2.NODE_STATE_READY] * 3)
    for proxy in server.proxies:
        proxy.delay(replies_ms=150)
    patient = Waiter(server, NAME, ttl_ms=100)

    async def tried_again() -> bool:
        counter = await nodes[0].call("GET", f"redfence:counter:{NAME}")
        return isinstance(counter, bytes) and int(counter) >= 3

    await until(tried_again)
    assert not patient.done
    impatient = await Waiter(server, "other", ttl_ms=100, wait_ms=200).failure()
    assert (impatient.code, impatient.reason) == (
        grpc.StatusCode.UNAVAILABLE,
        ERROR_REASON_VALIDITY_EXHAUSTED,
    )
    for proxy in server.proxies:
        await proxy.heal()
    lease = await patient.lease()
    assert lease.fencing_token > 3
    assert patient.began_at_ms + lease.validity.ToMilliseconds() > patient.answered_at_ms
    await until_no_locks(nodes)


# --- a drain ----------------------------------------------------------------------------------------------------------


async def test_waiters_of_a_draining_server_go_on_at_another_with_their_lease_ids_in_their_order(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Each is told DRAINING with a RetryInfo at once, call or command; whom it held the lock for is told nothing, for it still does."""
    nodes = await formed_nodes(3)
    draining, another = await serve(nodes), await serve(nodes)
    held = (await draining.acquire(NAME, ttl_ms=TTL_MS)).lease
    async with SessionCaller(draining) as session:
        waiters = await line_up(draining, NAME, 10)
        waiters += await line_up(draining, NAME, 10, session=session)
        drained = draining.drain(grace_ms=60_000)
        failures = [await each.failure() for each in waiters]
        # Long before the grace is over.
        await asyncio.wait_for(drained, timeout=5)
    assert {(each.code, each.reason, each.retry_after_ms) for each in failures} == {
        (grpc.StatusCode.UNAVAILABLE, ERROR_REASON_DRAINING, 50)
    }
    assert len(await locks_left(nodes)) == 3
    async with SessionCaller(another) as session:
        again = [Waiter(another, NAME, session=session, lease_id=each.lease_id) for each in waiters]
        await another.until_waiting(NAME, count=20)
        await another.release(NAME, held.lease_id)
        granted = await take_turns(again)
    assert [number for number, _ in granted] == list(range(20))
    await until_no_locks(nodes)


async def test_a_lock_released_through_a_draining_server_goes_to_a_waiter_elsewhere(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """It hands over to nobody it has just sent away."""
    nodes = await formed_nodes(3)
    draining, another = await serve(nodes), await serve(nodes)
    held = (await draining.acquire(NAME, ttl_ms=TTL_MS)).lease
    here = await line_up(draining, NAME, 3)
    [there] = await line_up(another, NAME, 1)
    releasing = asyncio.create_task(draining.release(NAME, held.lease_id))
    await draining.begin_drain()
    assert await releasing == lock_pb2.RELEASE_OUTCOME_RELEASED
    for waiter in here:
        answer = await waiter.answer()
        if isinstance(answer, lock_pb2.AcquireResponse):
            # The release was there before the drain.
            assert (waiter, answer.outcome) == (here[0], ACQUIRE_OUTCOME_GRANTED)
            await another.release(NAME, waiter.lease_id)
        else:
            assert (await waiter.failure()).reason == ERROR_REASON_DRAINING
    assert (await there.lease()).fencing_token > held.fencing_token
