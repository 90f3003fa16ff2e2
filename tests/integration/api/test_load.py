"""The lock server under load."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import pytest

from harness.load.lock_load import LockLoad
from harness.load.session_caller import SessionCaller
from harness.processes.fixture_types import FlushedNodes
from harness.processes.leftovers import open_files, running_tasks
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    form,
    serving,
    until_no_locks,
)
from harness.time.eventually import eventually
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ACQUIRE_OUTCOME_HELD,
    KeepAliveRequest,
)
from redfence_server.embedded.binary import RedisBinary

pytestmark = pytest.mark.slow


async def test_a_burst_of_3000_concurrent_calls_on_one_channel_is_answered_to_the_last(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The transport cancels none. Each of a thousand resources is granted once and reported HELD twice."""
    # On a busy machine no node may time out.
    server = await serve(await formed_nodes(3), node_timeout_ms=10_000)
    responses = await asyncio.gather(
        *(server.acquire(f"orders/{number % 1_000}", ttl_ms=60_000) for number in range(3_000))
    )
    outcomes = Counter(response.outcome for response in responses)
    assert outcomes == {ACQUIRE_OUTCOME_GRANTED: 1_000, ACQUIRE_OUTCOME_HELD: 2_000}


async def use(server: LockServer, name: str) -> None:
    """Make calls of every kind, and leave while some are under way."""
    async with SessionCaller(server) as session:
        lease = (await session.acquire(name)).acquire.lease
        for _ in range(5):
            session.acquire(name, wait_ms=30_000)
        keep_alive = server.locks.KeepAlive()
        await keep_alive.write(KeepAliveRequest(resource=name, lease_id=lease.lease_id))
        await keep_alive.read()
        await server.until_waiting(name, count=5)
        await server.release(name, lease.lease_id)


async def sockets_at_rest() -> int:
    """Return the number of open sockets, once it stays the same for 200 ms."""
    seen, now = -1, open_files()["socket"]
    while seen != now:
        await asyncio.sleep(0.2)
        seen, now = now, open_files()["socket"]
    return now


async def test_a_server_that_has_ended_leaves_no_task_no_connection_and_no_file(
    formed_nodes: FormedNodes,
) -> None:
    nodes = await formed_nodes(3)
    kept = 0
    for turn in range(4):
        async with serving(nodes) as server:
            await use(server, f"orders/{turn}")
        # The threads of gRPC close their sockets a moment later.
        await eventually(lambda: not running_tasks(), interval_s=0.01)
        gc.collect()
        if turn < 2:
            # The first run also opens what gRPC keeps for the life of the process.
            kept = await sockets_at_rest()
    await eventually(lambda: open_files()["socket"] <= kept, interval_s=0.01)


async def test_callers_of_two_servers_exclude_each_other_over_nodes_of_each_engine(
    engine: RedisBinary, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """Calls and sessions have no failure, and their tokens rise."""
    nodes = await flushed_nodes(5, binary=engine)
    await form(nodes)
    # On a busy machine no node may time out.
    servers = [await serve(nodes, node_timeout_ms=10_000) for _ in range(2)]
    async with LockLoad(*servers) as load:
        await load.until_granted_by_each(1_000, timeout_s=60)
    assert not load.failures
    load.check()
    await until_no_locks(nodes)
    greatest = max(grant.token for grant in load.history.grants)
    highs = [await node.call("GET", "redfence:high") for node in nodes]
    assert sum(isinstance(high, bytes) and int(high) >= greatest for high in highs) >= 3
