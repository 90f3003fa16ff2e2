"""The SDK on a real server that allows few commands on one stream: everything is answered, and what saves leases goes first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import redfence
from harness.processes import CommandProcesses
from harness.servers import FormedNodes, until

_WAITS = 80
_WAIT_S = 2.0

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
        held = await acquire("held", ttl=1)
        contended = await other.acquire("contended", ttl=60)
        started = time.monotonic()
        waits = [asyncio.ensure_future(acquire("contended", ttl=10, wait=_WAIT_S)) for _ in range(_WAITS)]

        async def full() -> bool:
            return (await other.get_lock("contended")).waiters >= 36

        await until(full)
        assert (await asyncio.wait_for(acquire("free", ttl=10, wait=0), 1)).remaining() > 5
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {redfence.AcquireTimeoutError}
        assert _WAIT_S <= time.monotonic() - started < _WAIT_S + 2
        held.raise_if_lost()
        assert (await other.check_token("held", held.token)).live
        assert (await other.get_lock("contended")).waiters == 0
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
