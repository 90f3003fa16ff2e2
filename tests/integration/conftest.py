"""Fixtures of the integration tests: nodes formed into clusters, and lock servers over them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from harness.doubles.grpc_fake import GrpcFake
from harness.doubles.grpc_fake import serving as serving_fake
from harness.load.session_caller import SessionCaller
from harness.processes.fixture_types import FlushedNodes, FreshNodes
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import FormedNodes, LockServer, Serve, form, serving
from harness.processes.tcp_proxy import TcpProxy


@pytest.fixture
def formed_nodes(flushed_nodes: FlushedNodes) -> FormedNodes:
    """Lends nodes formed into a cluster; send them commands, but leave their processes alone."""

    async def lend(count: int) -> list[RedisNode]:
        nodes = await flushed_nodes(count)
        await form(nodes)
        return nodes

    return lend


@pytest.fixture
def fresh_formed_nodes(fresh_nodes: FreshNodes) -> FormedNodes:
    """Starts nodes and forms them into a cluster, to kill and restart."""

    async def start(count: int) -> list[RedisNode]:
        nodes = await fresh_nodes(count)
        await form(nodes)
        return nodes

    return start


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts lock servers over formed nodes.

    `await serve(nodes, proxied=True, node_timeout_ms=100)`.
    """
    async with AsyncExitStack() as stack:

        async def start(
            nodes: Sequence[RedisNode | str], *, proxied: bool = False, **settings: Any
        ) -> LockServer:
            proxies: list[TcpProxy] = []
            if proxied:
                known = [node for node in nodes if isinstance(node, RedisNode)]
                proxies = [await stack.enter_async_context(TcpProxy(node.port)) for node in known]
            return await stack.enter_async_context(serving(nodes, proxies=proxies, **settings))

        yield start


@pytest.fixture
async def server(formed_nodes: FormedNodes, serve: Serve) -> LockServer:
    """A lock server over three nodes.

    No heartbeat comes between, because tests count what nodes are asked.
    """
    return await serve(await formed_nodes(3), heartbeat_interval_ms=60_000)


@pytest.fixture
async def session(server: LockServer) -> AsyncIterator[SessionCaller]:
    """A Session with that server."""
    async with SessionCaller(server) as session:
        yield session


@pytest.fixture
def fake() -> Iterator[GrpcFake]:
    """A server behind real gRPC; the test sees its leases and switches its faults."""
    with serving_fake() as grpc_fake:
        yield grpc_fake
