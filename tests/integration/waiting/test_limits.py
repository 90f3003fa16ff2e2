"""Limits on waiters."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from harness.load.failures import Failure
from harness.load.session_caller import SessionCaller
from harness.load.waiters import TTL_MS, Waiter, line_up
from harness.processes.commands import CommandProcesses
from harness.processes.servers import FormedNodes, LockServer, Serve
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import ACQUIRE_OUTCOME_GRANTED, ACQUIRE_OUTCOME_HELD

NAME = "orders/42"
SCOPES = {
    "waiters_per_resource_max": "resource",
    "waiters_max": "server",
    "waiters_per_connection_max": "connection",
}


def is_refusal(failure: Failure, *, scope: str, limit: int) -> None:
    """Fail unless the failure tells this limit."""
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.reason == lock_pb2.ERROR_REASON_TOO_MANY_WAITERS
    assert failure.metadata == {"limit": str(limit), "scope": scope}
    assert failure.retry_after_ms == 1_000
    assert str(limit) in failure.message


async def hold(server: LockServer, *names: str) -> list[lock_pb2.Lease]:
    return [(await server.acquire(name, ttl_ms=TTL_MS)).lease for name in names]


@pytest.mark.parametrize("setting", SCOPES)
async def test_one_waiter_too_many_is_refused_until_another_one_leaves(
    setting: str, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A waiter leaves when it is granted, gives up or loses its stream."""
    settings: dict[str, Any] = {setting: 3}
    server = await serve(await formed_nodes(3), **settings)
    scope = SCOPES[setting]
    [held] = await hold(server, NAME)
    first, second = await line_up(server, NAME, 2)
    session = SessionCaller(server)
    third = Waiter(server, NAME, session=session)
    await server.until_waiting(NAME, count=3)
    is_refusal(await Waiter(server, NAME).failure(), scope=scope, limit=3)
    is_refusal(await Waiter(server, NAME, session=session).failure(), scope=scope, limit=3)
    assert (await server.look(NAME)).waiters == 3
    # Neither a single try nor a free lock needs a place.
    assert (await server.acquire(NAME)).outcome == ACQUIRE_OUTCOME_HELD
    assert (await Waiter(server, "free").lease()).fencing_token > 0
    # One is granted.
    await server.release(NAME, held.lease_id)
    await first.lease()
    fourth = Waiter(server, NAME, holder="fourth")
    await server.until_waiting(NAME, count=3)
    is_refusal(await Waiter(server, NAME).failure(), scope=scope, limit=3)
    # One gives up.
    second.give_up()
    await server.until_waiting(NAME, count=2)
    fifth = Waiter(server, NAME, holder="fifth")
    await server.until_waiting(NAME, count=3)
    is_refusal(await Waiter(server, NAME).failure(), scope=scope, limit=3)
    # One loses its stream.
    await session.cancel()
    assert await third.answer() is None
    await server.until_waiting(NAME, count=2)
    sixth = Waiter(server, NAME, holder="sixth")
    await server.until_waiting(NAME, count=3)
    assert [each.holder for each in (await server.look(NAME)).queue] == ["fourth", "fifth", "sixth"]
    for before, after in ((first, fourth), (fourth, fifth), (fifth, sixth)):
        await before.release()
        await after.lease()


async def test_calls_and_streams_of_one_connection_count_together_and_others_do_not(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    server = await serve(await formed_nodes(3), waiters_per_connection_max=2)
    await hold(server, "a", "b")
    async with server.on_own_connection() as one, server.on_own_connection() as another:
        for there in (one, another):
            async with SessionCaller(there) as session:
                before = (await server.look("a")).waiters
                await line_up(there, "a", 1)
                [waiter] = await line_up(there, "b", 1, session=session)
                is_refusal(await Waiter(there, "a").failure(), scope="connection", limit=2)
                is_refusal(await Waiter(there, "b", session=session).failure(), scope="connection", limit=2)
                assert (await server.look("a")).waiters == before + 1
                waiter.give_up()
                await server.until_waiting("b", count=0)


async def test_when_a_thousand_come_at_once_exactly_the_limit_stays(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The first one has its place while the server tries for it."""
    server = await serve(await formed_nodes(3), waiters_per_resource_max=100)
    [held] = await hold(server, NAME)
    async with SessionCaller(server) as session:
        waiters = [Waiter(server, NAME, session=session) for _ in range(1_000)]
        await eventually(lambda: sum(each.done for each in waiters) == 900, interval_s=0.005)
        for waiter in waiters:
            if waiter.done:
                is_refusal(await waiter.failure(), scope="resource", limit=100)
        assert (await server.look(NAME)).waiters == 100
        await server.release(NAME, held.lease_id)
        await waiters[0].lease()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flag", "environment"])
@pytest.mark.parametrize("setting", SCOPES)
async def test_the_limits_are_settings_of_the_command(
    setting: str, how: str, commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    flags = [flag for node in await formed_nodes(3) for flag in ("--node", node.url)]
    environment = {}
    if how == "flag":
        flags += [f"--{setting.replace('_', '-')}", "1"]
    else:
        environment[f"REDFENCE_{setting.upper()}"] = "1"
    process = commands.start_redfence("serve", "--listen", "127.0.0.1:0", *flags, environment=environment)
    address = (await process.wait_for_line(r"^redfence serving on (\S+)", timeout_s=20))[1]
    async with grpc.aio.insecure_channel(address) as channel:
        server = LockServer(channel)
        await hold(server, NAME)
        await line_up(server, NAME, 1)
        is_refusal(await Waiter(server, NAME).failure(), scope=SCOPES[setting], limit=1)
        assert (await server.acquire("free")).outcome == ACQUIRE_OUTCOME_GRANTED
    assert await asyncio.wait_for(process.stop(), 10) == 0
