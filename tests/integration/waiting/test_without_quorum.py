"""The server tells waiters when too few nodes are left, but not if these are back at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from harness.load.session_caller import SessionCaller
from harness.load.waiters import TTL_MS, Waiter, line_up
from harness.processes.fixture_types import FreshNodes
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import FormedNodes, Serve, form, now_ms, until_all_ready
from redfence_proto.v1.lock_pb2 import (
    ERROR_REASON_QUORUM_UNAVAILABLE,
    NODE_STATE_QUARANTINED,
    NODE_STATE_READY,
)

NAME = "orders/42"
NODE_TIMEOUT_MS = 500  # the default
RETURN_TTL_MS = 2_000  # so long a node that forgot stays out


async def wiped(node: RedisNode) -> None:
    await node.call("FLUSHALL")


async def killed(node: RedisNode) -> None:
    node.kill()


async def frozen(node: RedisNode) -> None:
    node.pause()


@pytest.mark.slow
@pytest.mark.parametrize("lose", [wiped, killed, frozen], ids=lambda lose: lose.__name__)
async def test_every_waiter_is_told_when_no_quorum_is_left(
    lose: Callable[[RedisNode], Awaitable[None]],
    fresh_formed_nodes: FormedNodes,
    serve: Serve,
    record_property: Callable[[str, object], None],
) -> None:
    """The server notices long before the hold ends."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes, node_timeout_ms=NODE_TIMEOUT_MS)
    await until_all_ready(server)
    await server.acquire(NAME, ttl_ms=TTL_MS)
    async with SessionCaller(server) as session:
        waiters = [
            *await line_up(server, NAME, 2),
            Waiter(server, NAME, session=session),
        ]
        await server.until_waiting(NAME, count=3)
        # Soon after an arrival the head asks the nodes, and then not before the hold ends.
        await asyncio.sleep(0.25)
        for node in nodes[:2]:
            await lose(node)
        lost_at_ms = now_ms()
        for waiter in waiters:
            failure = await waiter.failure()
            assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
            assert failure.is_retryable
            assert {each.partition("=")[0] for each in failure.metadata["nodes"].split(",")} == {"0", "1"}
    record_property("told after, in ms", round(max(each.answered_at_ms for each in waiters) - lost_at_ms))
    for node in nodes[:2]:
        node.resume()


@pytest.mark.slow
async def test_no_waiter_is_told_when_nodes_are_examined_again_over_a_slow_network(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """A fence gave the peers new admission ids, so each server examines them again, 40 ms away."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=RETURN_TTL_MS)
    servers = [await serve(nodes, proxied=True, node_timeout_ms=5_000) for _ in range(2)]
    await until_all_ready(*servers)
    for proxy in (*servers[0].proxies, *servers[1].proxies):
        proxy.delay(requests_ms=20, replies_ms=20)
    held = (await servers[0].acquire(NAME, ttl_ms=RETURN_TTL_MS)).lease
    waiters = [Waiter(server, NAME, ttl_ms=RETURN_TTL_MS, wait_ms=60_000) for server in servers]
    async with SessionCaller(servers[0]) as session:
        keeping = asyncio.create_task(keep_alive(session, held.lease_id))
        await nodes[0].call("FLUSHALL")
        for server in servers:
            await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
        await until_all_ready(*servers)
        assert not any(waiter.done for waiter in waiters)
        keeping.cancel()
        await asyncio.wait([keeping])
        await servers[0].release(NAME, held.lease_id)
    for waiter in waiters:
        assert (await waiter.lease()).fencing_token > held.fencing_token
        await waiter.release()


async def keep_alive(session: SessionCaller, lease_id: str) -> None:
    """Renew a lease until cancelled."""
    while True:
        await session.renew(NAME, lease_id)
        await asyncio.sleep(RETURN_TTL_MS / 10_000)
