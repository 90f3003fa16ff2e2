"""The queue over real nodes and real gRPC: its order, what GetLock reports of it, and a drain."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from harness.load.session_caller import SessionCaller
from harness.load.waiters import TTL_MS, Waiter, line_up
from harness.processes.servers import (
    FormedNodes,
    Serve,
    acquire_request,
    locks_left,
    memories,
    now_ms,
    until,
    until_no_locks,
)
from redfence_proto.v1.lock_pb2 import (
    ERROR_REASON_DRAINING,
)

NAME = "orders/42"


async def take_turns(waiters: list[Waiter]) -> list[tuple[int, int]]:
    """Release each waiter once it is granted; return place and token of each, in the order of the grants."""
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
    """They use four connections, eight sessions and single calls. Nothing is left behind."""
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


async def test_get_lock_lists_the_first_hundred_waiters_in_order_and_counts_them_all(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """It reports labels and waiting times, but no lease id."""
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


@pytest.mark.slow
async def test_the_ttl_of_a_lease_that_a_waiter_gets_starts_at_the_grant(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The validity counts from the send, so it is the wait plus the ttl less drift."""
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
    # The server subtracts 0.05 % of the wait, because clocks differ. Rounding loses less than 1 ms.
    validity_ms = lease.validity.ToMilliseconds()
    assert least_ms * 0.9995 + ttl_ms - drift_ms - 1 <= validity_ms <= most_ms + ttl_ms - drift_ms


async def test_a_waiter_may_wait_for_ever(formed_nodes: FormedNodes, serve: Serve) -> None:
    """The server sets no bound: it accepts the greatest wait_timeout that a Duration can hold."""
    server = await serve(await formed_nodes(3))
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    request = acquire_request(NAME)
    request.wait_timeout.CopyFrom(Duration(seconds=315_576_000_000, nanos=999_999_999))
    waiting = asyncio.ensure_future(server.locks.Acquire(request))
    await server.until_waiting(NAME)
    await server.release(NAME, held.lease_id)
    assert (await waiting).lease.fencing_token > held.fencing_token


async def test_waiters_of_a_draining_server_go_on_at_another_in_their_order(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Each is told DRAINING at once, and repeats its Acquire. The holder keeps the lock."""
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
    assert not any(each.metadata for each in failures)
    assert len(await locks_left(nodes)) == 3
    async with SessionCaller(another) as session:
        again = [Waiter(another, NAME, session=session, lease_id=each.lease_id) for each in waiters]
        await another.until_waiting(NAME, count=20)
        await another.release(NAME, held.lease_id)
        granted = await take_turns(again)
    assert [number for number, _ in granted] == list(range(20))
    await until_no_locks(nodes)
