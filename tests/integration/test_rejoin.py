"""How nodes come back under the eyes of several servers, some of which die at it."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

import pytest

from harness.eventually import eventually
from harness.fixture_types import FreshNodes
from harness.servers import Serve, form, until_all_ready, until_no_locks
from redfence_proto.v1.lock_pb2 import NODE_STATE_QUARANTINED, NODE_STATE_READY
from redfence_server import scripts

NAME = "orders/42"
# The greatest that the cluster allows, and so about how long a quarantine lasts.
TTL_MS = 1_000
# How requests begin, or what stands in them.
VOUCH: Final = hashlib.sha1(scripts.load("vouch")).hexdigest().encode()
pytestmark = pytest.mark.slow


async def all_set(*events: asyncio.Event) -> None:
    """Everything that was waited for has happened."""
    async with asyncio.timeout(10):
        for event in events:
            await event.wait()


async def test_a_release_that_met_nodes_just_as_they_vouched_reaches_them_all_the_same(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The server that gave them their new admission ids has no new connection to send it on, and does not wait for one."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes, proxied=True, node_timeout_ms=5_000)
    await until_all_ready(server)
    await nodes[0].call("FLUSHALL")
    lease = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
    for node in nodes[1:]:
        # It will not end by itself.
        assert await node.call("PERSIST", f"redfence:lock:{NAME}") == 1
    await all_set(*(proxy.hold_after(VOUCH) for proxy in server.proxies[1:]))
    releasing = asyncio.create_task(server.release(NAME, lease.lease_id))
    kept_bytes = [proxy.replies.kept_bytes for proxy in server.proxies[1:]]
    await eventually(
        lambda: all(
            proxy.replies.kept_bytes > before
            for proxy, before in zip(server.proxies[1:], kept_bytes, strict=True)
        )
    )
    for proxy in server.proxies[1:]:
        await proxy.heal()
    # Whatever its caller was told, for it could not be decided at once.
    await asyncio.gather(releasing, return_exceptions=True)
    await until_no_locks(nodes)
    await until_all_ready(server)
