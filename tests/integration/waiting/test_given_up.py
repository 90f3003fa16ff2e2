"""A waiter is in the queue exactly as long as its call, and the server undoes a mint for it."""

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
    until,
    until_all_ready,
    until_idle,
    until_no_locks,
)
from harness.processes.tcp_proxy import TcpProxy
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import RELEASE_OUTCOME_RELEASED

NAME = "orders/42"
# Only calls of the test may pass between the server and the nodes.
NO_HEARTBEAT_MS = 60_000
# Everything else of a test happens before.
DEADLINE_S = 3.0
_CLIENT = """
import sys, redfence
with redfence.Client(sys.argv[1]) as client, client.lock(sys.argv[2], ttl=60):
    print("granted", flush=True)
    sys.stdin.read()
"""
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
    """Let a first waiter come, and yield what makes it go in this way. A deadline comes by itself."""
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


async def holders_on(server: LockServer) -> list[object]:
    """Return the label of the hold on each node."""
    holds = [await node.call("GET", f"redfence:lock:{NAME}") for node in server.nodes]
    return [hold.partition(b"\n")[2] if isinstance(hold, bytes) else None for hold in holds]


async def until_held_by(server: LockServer, holder: bytes) -> None:
    """Return once every node holds the lock with this label."""

    async def held() -> bool:
        return await holders_on(server) == [holder] * len(server.nodes)

    await until(held)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_a_waiter_that_is_gone_leaves_the_queue_and_the_next_one_is_served(
    way: str, commands: CommandProcesses, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The nodes mint nothing for it: the next waiter gets the next token."""
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
@pytest.mark.parametrize("way", WAYS)
async def test_a_handover_to_a_waiter_that_is_gone_is_undone_and_the_next_one_is_served(
    way: str, commands: CommandProcesses, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The nodes have minted and their answers are late. The undo and the next mint do not wait for these."""
    server = await serve(
        await formed_nodes(3), proxied=True, node_timeout_ms=10_000, heartbeat_interval_ms=NO_HEARTBEAT_MS
    )
    await until_all_ready(server)
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    async with first_in_line(server, way, commands) as leave:
        [following] = await line_up(server, NAME, 1, holder="next")
        # The server asks the nodes once after an arrival. The test must not count that.
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
        # The undone mint has used up a token.
        assert lease.fencing_token == held.fencing_token + 2
    await following.release()
    await until_no_locks(server.nodes)


@pytest.mark.slow
async def test_a_stopped_client_keeps_its_place_and_is_served_in_its_turn(
    commands: CommandProcesses, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Its call lives, so it waits. Only the fencing token protects storage if it acts too late."""
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
