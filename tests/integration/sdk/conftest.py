"""Fixtures of the SDK's tests: servers, and both clients behind one face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import redfence
from harness.load.threaded import Threaded
from harness.processes.servers import FormedNodes, LockServer, Serve

# As many calls of one test may block at a time.
_THREADS_MAX = 100


@pytest.fixture
async def server(formed_nodes: FormedNodes, serve: Serve) -> LockServer:
    """A lock server over three nodes."""
    return await serve(await formed_nodes(3))


@pytest.fixture(params=["asyncio", "threads"])
async def make_client(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Any]]:
    """Makes clients of each kind in turn; they are closed with the test."""
    made: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS_MAX))

    def make(*addresses: str, options: redfence.ClientOptions | None = None) -> Any:
        if request.param == "asyncio":
            made.append(redfence.AsyncClient(*addresses, options=options))
        else:
            made.append(Threaded(redfence.Client(*addresses, options=options)))
        return made[-1]

    yield make
    for client in made:
        await client.close()
