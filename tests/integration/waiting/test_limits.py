"""How many may wait: each limit by itself, what it leaves alone, and where it is set."""

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
    """Fail unless this is how one too many is refused."""
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.reason == lock_pb2.ERROR_REASON_TOO_MANY_WAITERS
    assert failure.metadata == {"limit": str(limit), "scope": scope}
    assert failure.retry_after_ms == 1_000
    assert str(limit) in failure.message


@pytest.fixture(params=SCOPES)
def setting(request: pytest.FixtureRequest) -> str:
    """Each limit in turn."""
    assert isinstance(request.param, str)
    return request.param


async def hold(server: LockServer, *names: str) -> list[lock_pb2.Lease]:
    """Hold these locks."""
    return [(await server.acquire(name, ttl_ms=TTL_MS)).lease for name in names]


async def test_one_waiter_too_many_is_refused_and_whoever_leaves_makes_room(
    setting: str, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Whether one gives up, is granted, or loses its stream; the refused one takes no place, and a free lock needs none."""
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
    # To try once is no waiting, and neither is to take what is free.
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


async def test_a_limit_for_one_resource_leaves_the_others_alone(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Each resource has its own places."""
    server = await serve(await formed_nodes(3), waiters_per_resource_max=2)
    await hold(server, "a", "b")
    for name in ("a", "b"):
        await line_up(server, name, 2)
        is_refusal(await Waiter(server, name).failure(), scope="resource", limit=2)


async def test_a_limit_for_one_connection_leaves_the_others_alone(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Calls and streams of one connection count together, for whatever resource; other connections have their own places."""
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


async def test_a_limit_of_the_server_counts_over_every_resource_and_connection(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Whoever comes after that is sent away, wherever from and whatever for."""
    server = await serve(await formed_nodes(3), waiters_max=2)
    await hold(server, "a", "b", "c")
    async with server.on_own_connection() as one, server.on_own_connection() as another:
        await line_up(one, "a", 1)
        [waiter] = await line_up(another, "b", 1)
        for there, name in ((one, "c"), (another, "a"), (server, "b")):
            is_refusal(await Waiter(there, name).failure(), scope="server", limit=2)
        waiter.give_up()
        await server.until_waiting("b", count=0)
        await line_up(one, "c", 1)


async def test_who_came_first_is_not_the_one_who_is_sent_away_when_too_many_come_at_once(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """It has its place while it is tried for the first time."""
    server = await serve(await formed_nodes(3), waiters_per_resource_max=10)
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    async with SessionCaller(server) as session:
        crowd = [Waiter(server, NAME, session=session) for _ in range(50)]
        for waiter in crowd[10:]:
            await waiter.failure()
        await server.release(NAME, held.lease_id)
        await crowd[0].lease()


async def test_a_thousand_who_come_at_once_are_as_many_as_the_limit_says_and_the_others_are_refused(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Nobody slips through while the first of them is being tried."""
    server = await serve(await formed_nodes(3), waiters_per_resource_max=100)
    await hold(server, NAME)
    async with SessionCaller(server) as session:
        crowd = [Waiter(server, NAME, session=session) for _ in range(1_000)]
        await eventually(lambda: sum(each.done for each in crowd) == 900, interval_s=0.005)
        for waiter in crowd:
            if waiter.done:
                is_refusal(await waiter.failure(), scope="resource", limit=100)
        assert (await server.look(NAME)).waiters == 100


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flag", "environment"])
async def test_the_limits_are_settings_of_the_command(
    setting: str, how: str, commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """By flag and by environment, each under its name."""
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
