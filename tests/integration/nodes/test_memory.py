"""Nodes that are short of memory."""

from __future__ import annotations

import asyncio

from harness.processes.servers import FormedNodes, Serve


async def test_a_new_counter_lives_for_a_shorter_time_where_memory_is_short(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """One node decides for all. The next token of a resource is greater all the same."""
    nodes = await formed_nodes(3)
    server = await serve(nodes, heartbeat_interval_ms=100)

    async def life_ms() -> int:
        await server.acquire("orders/42", ttl_ms=100)
        lives = [await node.call("PTTL", "redfence:counter:orders/42") for node in nodes]
        return max(life for life in lives if isinstance(life, int))

    assert await life_ms() > 3_600_000
    token = (await server.acquire("orders/43", ttl_ms=100)).lease.fencing_token
    info = await nodes[0].call("INFO", "memory")
    assert isinstance(info, bytes)
    used = next(int(line[12:]) for line in info.decode().splitlines() if line.startswith("used_memory:"))
    # Enough for the commands of the test.
    await nodes[0].call("CONFIG", "SET", "maxmemory", used * 5 // 4)
    async with asyncio.timeout(10):
        while await life_ms() > 600_000:  # noqa: ASYNC110  (a node sets no event)
            await asyncio.sleep(0.1)
    assert (await server.acquire("orders/43", ttl_ms=100)).lease.fencing_token > token
