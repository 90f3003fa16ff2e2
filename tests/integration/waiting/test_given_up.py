"""A waiter lives exactly as long as its call, its command or its stream, and what was minted for it goes with it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from harness.load.session_caller import SessionCaller
from harness.load.waiters import TTL_MS, Waiter, line_up
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    locks_left,
    until,
    until_idle,
    until_no_locks,
)
from harness.processes.tcp_proxy import TcpProxy
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import NODE_STATE_READY, RELEASE_OUTCOME_RELEASED

NAME = "orders/42"
# What is seen on the wire is the doing of the test's own calls alone.
NO_HEARTBEAT_MS = 60_000
# Before that comes, everything else of a test has to have happened.
DEADLINE_S = 3.0
# Waits for the lock for ever.
_CLIENT = """
import sys, redfence
with redfence.Client(sys.argv[1]) as client, client.lock(sys.argv[2], ttl=60):
    print("granted", flush=True)
    sys.stdin.read()
"""
# How a caller gives up; each opens what it needs and yields how to go.
Leave = Callable[[], None]
WAYS = [
    "call cancelled",
    "deadline",
    "cancel command",
    "stream cancelled",
    "connection cut under a call",
    "connection cut under a stream",
    "process killed",
]


@asynccontextmanager
async def first_in_line(server: LockServer, way: str, commands: CommandProcesses) -> AsyncIterator[Leave]:
    """Have somebody wait, alone so far, who will go in this way when told; who has a deadline goes by itself."""
    async with AsyncExitStack() as stack:
        if way == "process killed":
            process: CommandProcess = commands.start(sys.executable, "-c", _CLIENT, server.target, NAME)
            await server.until_waiting(NAME, timeout_s=20)
            yield process.kill
            return
        there = server
        if way.startswith("connection cut"):
            wire = await stack.enter_async_context(TcpProxy(server.port))
            there = await stack.enter_async_context(server.on_own_connection(port=wire.port))
        session = None
        if way in {"cancel command", "stream cancelled", "connection cut under a stream"}:
            session = await stack.enter_async_context(SessionCaller(there))
        waiter = Waiter(
            there, NAME, session=session, timeout_s=DEADLINE_S if way == "deadline" else None, holder="gone"
        )
        await server.until_waiting(NAME)
        cancelling: list[asyncio.Task[None]] = []
        match way:
            case "call cancelled" | "cancel command":
                yield waiter.give_up
            case "deadline":
                yield lambda: None
            case "stream cancelled":
                assert session is not None
                stream = session
                yield lambda: cancelling.append(asyncio.create_task(stream.cancel()))
            case _:
                yield wire.refuse
        await asyncio.gather(*cancelling)
        answer = await waiter.answer()
        assert not (isinstance(answer, lock_pb2.AcquireResponse) and answer.HasField("lease")), (
            "it was granted"
        )


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """Each way of giving up in turn."""
    assert isinstance(request.param, str)
    return request.param


async def all_ready(server: LockServer) -> None:
    """Every node votes."""
    await server.until_states(*[NODE_STATE_READY] * len(server.nodes))


async def holders_on(server: LockServer) -> list[object]:
    """Return the label of the hold on each node, as the node itself says."""
    return [await node.call("HGET", f"redfence:lock:{NAME}", "holder") for node in server.nodes]


async def until_held_by(server: LockServer, holder: bytes) -> None:
    """Every node holds the lock for this one."""

    async def held() -> bool:
        return await holders_on(server) == [holder] * len(server.nodes)

    await until(held)


@pytest.mark.slow
async def test_a_waiter_that_is_gone_is_gone_from_the_queue_and_the_next_in_line_is_served(
    way: str, commands: CommandProcesses, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """However it goes, nothing is minted for it: the next in line is granted the next token."""
    server = await serve(await formed_nodes(3))
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    async with first_in_line(server, way, commands) as leave:
        [following] = await line_up(server, NAME, 1)
        assert await following.position() == 2
        leave()
        await server.until_waiting(NAME)
        assert await following.position() == 1
    assert await server.release(NAME, held.lease_id) == RELEASE_OUTCOME_RELEASED
    assert (await following.lease()).fencing_token == held.fencing_token + 1


@pytest.mark.slow
async def test_a_hand_over_to_a_waiter_that_is_gone_before_it_is_known_is_undone_and_the_next_in_line_is_served(
    way: str, commands: CommandProcesses, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The nodes have minted for it, their answers are late; the undo and the next mint need no answer to be sent."""
    server = await serve(
        await formed_nodes(3), proxied=True, node_timeout_ms=10_000, heartbeat_interval_ms=NO_HEARTBEAT_MS
    )
    await all_ready(server)
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    async with first_in_line(server, way, commands) as leave:
        [following] = await line_up(server, NAME, 1, holder="next")
        # The look that follows an arrival would be held back as well, and taken for what is waited for below.
        await until_idle(server.nodes)
        for proxy in server.proxies:
            proxy.hold(requests=False)
        releasing = asyncio.create_task(server.release(NAME, held.lease_id))
        if way != "process killed":
            await until_held_by(server, b"gone")
        else:
            await eventually(lambda: all(proxy.replies.kept_bytes for proxy in server.proxies))
        assert not following.done
        leave()
        await until_held_by(server, b"next")
        for proxy in server.proxies:
            await proxy.heal()
        assert await releasing == RELEASE_OUTCOME_RELEASED
        lease = await following.lease()
        # What was minted for the one that is gone stays used.
        assert lease.fencing_token == held.fencing_token + 2
    await following.release()
    await until_no_locks(server.nodes)


@pytest.mark.slow
async def test_a_mint_for_a_waiter_that_is_gone_before_it_arrives_is_undone_when_it_does(
    way: str, commands: CommandProcesses, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Woken by a notice it tried, the network holds the mint back; the undo arrives right behind it, and the next mint behind that."""
    nodes = await formed_nodes(3)
    server = await serve(nodes, proxied=True, node_timeout_ms=10_000, heartbeat_interval_ms=NO_HEARTBEAT_MS)
    elsewhere = await serve(nodes, heartbeat_interval_ms=NO_HEARTBEAT_MS)
    await all_ready(server)
    held = (await elsewhere.acquire(NAME, ttl_ms=TTL_MS)).lease
    async with first_in_line(server, way, commands) as leave:
        [following] = await line_up(server, NAME, 1, holder="next")
        # The look that follows an arrival would be held back as well, and taken for what is waited for below.
        await until_idle(server.nodes)
        for proxy in server.proxies:
            proxy.hold(replies=False)
        assert await elsewhere.release(NAME, held.lease_id) == RELEASE_OUTCOME_RELEASED
        await eventually(lambda: all(proxy.requests.kept_bytes for proxy in server.proxies))
        minted = [proxy.requests.taken_bytes for proxy in server.proxies]
        assert await locks_left(nodes) == []
        leave()
        # The undo and the next mint leave in one write.
        await eventually(
            lambda: all(
                proxy.requests.taken_bytes > before
                for proxy, before in zip(server.proxies, minted, strict=True)
            )
        )
        for proxy in server.proxies:
            await proxy.heal()
        assert (await following.lease()).fencing_token == held.fencing_token + 2
    await following.release()
    await until_no_locks(nodes)


async def test_a_waiter_at_another_server_is_woken_when_what_was_minted_for_one_that_is_gone_is_undone(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The undo of a hold tells those that were refused by it, as a release does."""
    nodes = await formed_nodes(3)
    server, elsewhere = await serve(nodes, proxied=True, node_timeout_ms=10_000), await serve(nodes)
    await all_ready(server)
    for proxy in server.proxies:
        proxy.hold(requests=False)
    gone = Waiter(server, NAME, holder="gone")
    await until_held_by(server, b"gone")
    [waiter] = await line_up(elsewhere, NAME, 1)
    gone.give_up()
    assert (await waiter.lease()).fencing_token == 2


@pytest.mark.slow
async def test_a_client_that_is_stopped_keeps_its_place_and_is_served_when_its_turn_comes(
    commands: CommandProcesses, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Its call lives, so it waits; whether it comes to act in time is the fencing token's affair."""
    server = await serve(await formed_nodes(3))
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    process = commands.start(sys.executable, "-c", _CLIENT, server.target, NAME)
    await server.until_waiting(NAME, timeout_s=20)
    process.send_signal(signal.SIGSTOP)
    await server.release(NAME, held.lease_id)
    await server.until_waiting(NAME, count=0)
    assert (await server.look(NAME)).current.fencing_token == held.fencing_token + 1
    process.send_signal(signal.SIGCONT)
    await process.wait_for_line("^granted$")
