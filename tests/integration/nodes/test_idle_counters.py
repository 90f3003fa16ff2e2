"""Nodes drop the counters of idle resources. `make bench ARGS=idle_counters` does it with a million."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from harness.load.session_caller import SessionCaller
from harness.processes.fixture_types import FreshNodes
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import LockServer, Serve, form, new_lease_id, until, until_all_ready
from redfence_proto.v1.lock_pb2 import RELEASE_OUTCOME_RELEASED

RESOURCES = 5_000
# Commands under way at once.
BATCH = 500
# The most memory afterwards, beside that before.
GROWTH_MAX = 1.2
# Longer than a machine stalls between the last release and the test's look at its counter.
IDLE_MS = 2_500
pytestmark = pytest.mark.slow


async def hold_each_once(server: LockServer, numbers: Sequence[int]) -> list[int]:
    """Lock and release a resource for each number; return the tokens."""
    tokens = []
    async with SessionCaller(server) as session:
        for first in range(0, len(numbers), BATCH):
            leases = {f"once/{number}": new_lease_id() for number in numbers[first : first + BATCH]}
            # No stall of the machine may end a hold.
            acquired = [
                session.acquire(name, lease_id=lease_id, ttl_ms=60_000) for name, lease_id in leases.items()
            ]
            tokens += [(await each).acquire.lease.fencing_token for each in acquired]
            released = [session.release(name, lease_id) for name, lease_id in leases.items()]
            for each in released:
                assert (await each).release.outcome == RELEASE_OUTCOME_RELEASED
    return tokens


async def used_bytes(nodes: Sequence[RedisNode]) -> list[int]:
    """Return how much memory each node uses."""
    infos = await asyncio.gather(*(node.call("INFO", "memory") for node in nodes))
    return [int(str(info).partition("used_memory:")[2].partition("\\r")[0]) for info in infos]


async def counters(nodes: Sequence[RedisNode]) -> list[int]:
    """Return how many keys each node has besides its identity and its greatest number."""
    sizes = await asyncio.gather(*(node.call("DBSIZE") for node in nodes))
    return [int(str(size)) - 2 for size in sizes]


async def until_dropped(nodes: Sequence[RedisNode]) -> None:
    """Return once no counter is left."""

    async def gone() -> bool:
        return await counters(nodes) == [0] * len(nodes)

    await until(gone, timeout_s=20)


async def test_nodes_drop_idle_counters_and_tokens_go_on_rising(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """Only resources in use take memory."""
    nodes = await fresh_nodes(3)
    await form(nodes)
    server = await serve(nodes, counter_idle_ms=IDLE_MS)
    await until_all_ready(server)
    # The first commands also make scripts and buffers.
    first = await hold_each_once(server, range(BATCH))
    await until_dropped(nodes)
    before = await used_bytes(nodes)
    await hold_each_once(server, range(BATCH, RESOURCES))
    assert min(await counters(nodes)) > 0
    await until_dropped(nodes)

    async def shrunk() -> bool:
        return all(
            now <= GROWTH_MAX * then for now, then in zip(await used_bytes(nodes), before, strict=True)
        )

    await until(shrunk, timeout_s=20)
    again = await hold_each_once(server, range(BATCH))
    assert all(later > earlier for earlier, later in zip(first, again, strict=True))
