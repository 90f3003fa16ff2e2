"""The SDK on a real server that allows few commands on one stream: everything is answered, and what saves leases goes first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest

import redfence
from harness.processes.commands import CommandProcesses
from harness.processes.servers import FormedNodes, Serve, until
from harness.time.eventually import eventually

_WAITS = 80
# Longer than the ttl of what is held meanwhile, which is itself longer than a busy machine stands still.
_WAIT_S = 3.0

Acquire = Callable[..., Awaitable[Any]]


@pytest.fixture
async def narrow_server(formed_nodes: FormedNodes, commands: CommandProcesses) -> str:
    """The address of `redfence serve` with room for fifty commands on a stream."""
    flags = [flag for node in await formed_nodes(3) for flag in ("--node", node.url)]
    server = commands.start_redfence("serve", "--listen", "127.0.0.1:0", "--commands-max", "50", *flags)
    return (await server.wait_for_line(r"serving on ([\d.:]+)", timeout_s=20))[1]


@pytest.fixture(params=["asyncio", "threads"])
async def acquire(request: pytest.FixtureRequest, narrow_server: str) -> AsyncIterator[Acquire]:
    """The `acquire` of each client in turn, to be awaited."""
    if request.param == "asyncio":
        async with redfence.AsyncClient(narrow_server) as client:
            yield client.acquire
    else:
        loop = asyncio.get_running_loop()
        with redfence.Client(narrow_server) as blocking, ThreadPoolExecutor(_WAITS + 2) as threads:
            yield lambda *args, **more: loop.run_in_executor(threads, lambda: blocking.acquire(*args, **more))


@pytest.mark.slow
async def test_more_waits_than_a_server_allows_end_in_time_and_hold_nothing_else_up(
    narrow_server: str, acquire: Acquire
) -> None:
    """Eighty wait where forty-five fit: each runs out, a free lock is granted at once, and a held lease is renewed throughout."""
    async with redfence.AsyncClient(narrow_server) as other:
        held = await acquire("held", ttl=2)
        contended = await other.acquire("contended", ttl=60)
        started = time.monotonic()
        waits = [asyncio.ensure_future(acquire("contended", ttl=10, wait=_WAIT_S)) for _ in range(_WAITS)]

        async def full() -> bool:
            return (await other.get_lock("contended")).waiters >= 36

        await until(full)
        assert (await asyncio.wait_for(acquire("free", ttl=10, wait=0), _WAIT_S / 2)).remaining() > 5
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {redfence.AcquireTimeoutError}
        assert _WAIT_S <= time.monotonic() - started < _WAIT_S + 2
        held.raise_if_lost()
        assert (await other.check_token("held", held.token)).live

        async def empty() -> bool:
            # The cancel of a wait that a client has given up may still be on its way.
            return (await other.get_lock("contended")).waiters == 0

        await until(empty)
        assert await contended.release()


@pytest.mark.slow
async def test_more_waits_than_a_server_allows_are_all_granted_one_after_the_other(
    narrow_server: str, acquire: Acquire
) -> None:
    """Those that found no room at first get their turn, each with a greater token."""
    async with redfence.AsyncClient(narrow_server) as other:
        contended = await other.acquire("contended", ttl=60)
        tokens: list[int] = []

        async def take_turn() -> None:
            lease = await acquire("contended", ttl=10, wait=30)
            tokens.append(lease.token)
            released = lease.release()
            assert await released if asyncio.iscoroutine(released) else released

        turns = [asyncio.ensure_future(take_turn()) for _ in range(_WAITS)]
        await contended.release()
        await asyncio.wait_for(asyncio.gather(*turns), 30)
        assert tokens == sorted(set(tokens))
        assert len(tokens) == _WAITS


# A server that lets few wait.


@pytest.fixture(params=["asyncio", "threads"])
async def make_acquire(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Acquire]]:
    """Gives the `acquire` of a new client of each kind in turn, to be awaited, at the given addresses."""
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(10))
        loop = asyncio.get_running_loop()

        def make(*addresses: str) -> Acquire:
            if request.param == "asyncio":
                client = redfence.AsyncClient(*addresses)
                stack.push_async_callback(client.close)
                return client.acquire
            blocking = redfence.Client(*addresses)
            stack.push_async_callback(asyncio.to_thread, blocking.close)
            return lambda *args, **more: loop.run_in_executor(
                threads, lambda: blocking.acquire(*args, **more)
            )

        yield make


async def test_a_queue_that_is_full_is_told_with_what_is_full_and_when_to_come_again(
    formed_nodes: FormedNodes, serve: Serve, make_acquire: Callable[..., Acquire]
) -> None:
    """At once, also to who would wait for ever; who does not wait is told that the lock is held, as ever."""
    server = await serve(await formed_nodes(3), waiters_per_resource_max=1)
    await server.acquire("r")
    waiting = asyncio.ensure_future(make_acquire(server.target)("r", ttl=10))
    await server.until_waiting("r")
    acquire = make_acquire(server.target)
    with pytest.raises(redfence.OverloadedError, match="1 acquires are waiting for this resource") as full:
        await asyncio.wait_for(acquire("r", ttl=10), 2)
    assert (full.value.error_reason, full.value.scope) == ("TOO_MANY_WAITERS", "resource")
    assert full.value.metadata["limit"] == "1"
    assert full.value.retry_after == 1.0
    with pytest.raises(redfence.LockHeldError):
        await acquire("r", ttl=10, wait=0)
    assert (await acquire("free", ttl=10)).remaining() > 5
    waiting.cancel()


async def test_who_finds_a_full_queue_waits_at_another_server(
    formed_nodes: FormedNodes, serve: Serve, make_acquire: Callable[..., Acquire]
) -> None:
    """Two servers, the first is full: the second takes the waiter, and grants it."""
    nodes = await formed_nodes(3)
    first, second = await serve(nodes, waiters_max=1), await serve(nodes)
    held, other = await first.acquire("r"), await first.acquire("other")
    waiting = asyncio.create_task(first.acquire("other", wait_ms=60_000))
    await first.until_waiting("other")
    moved = asyncio.ensure_future(make_acquire(first.target, second.target)("r", ttl=10))
    await second.until_waiting("r")
    await first.release("r", held.lease.lease_id)
    assert (await asyncio.wait_for(moved, 5)).token > held.lease.fencing_token
    await first.release("other", other.lease.lease_id)
    await waiting


async def test_more_waits_than_a_server_allows_on_a_connection_are_all_granted(
    formed_nodes: FormedNodes, serve: Serve, make_acquire: Callable[..., Acquire]
) -> None:
    """Two may wait; the others wait in the client for their turn, and nobody is told of it."""
    server = await serve(await formed_nodes(3), waiters_per_connection_max=2)
    held = await server.acquire("r")
    acquire = make_acquire(server.target)
    tokens: list[int] = []

    async def take_turn() -> None:
        lease = await acquire("r", ttl=10)
        tokens.append(lease.token)
        # In a thread of its own, for this one runs the server.
        assert await (
            asyncio.to_thread(lease.release) if isinstance(lease, redfence.Lease) else lease.release()
        )

    turns = [asyncio.ensure_future(take_turn()) for _ in range(6)]
    await server.until_waiting("r", count=2)
    await server.release("r", held.lease.lease_id)
    await asyncio.wait_for(asyncio.gather(*turns), 10)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 6


@pytest.mark.slow
async def test_redfence_lock_waits_for_room_in_a_full_queue(
    formed_nodes: FormedNodes, serve: Serve, commands: CommandProcesses
) -> None:
    """It says so once, tries again when the server said, and runs its command in the end."""
    server = await serve(await formed_nodes(3), waiters_per_resource_max=1)
    held = await server.acquire("r")
    waiting = asyncio.create_task(server.acquire("r", wait_ms=60_000, lease_id="1" * 32))
    await server.until_waiting("r")
    run = commands.start_redfence("lock", "r", "--server", server.target, "--", "true")
    await eventually(lambda: "waiting: 1 acquires are waiting for this resource" in run.stderr, timeout_s=15)
    await server.release("r", held.lease.lease_id)
    await waiting
    await server.release("r", "1" * 32)
    assert await run.wait() == 0
    assert run.stderr.count("\n") == 1
