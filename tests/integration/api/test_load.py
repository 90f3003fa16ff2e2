"""The lock server under load."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import pytest

from harness.history.token_history import TokenHistory
from harness.load.lock_load import LockLoad
from harness.load.session_caller import SessionCaller
from harness.processes.fixture_types import FlushedNodes
from harness.processes.leftovers import open_files, running_tasks
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    form,
    memories,
    now_ms,
    serving,
    until,
    until_no_locks,
)
from harness.time.eventually import eventually
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ACQUIRE_OUTCOME_HELD,
    RELEASE_OUTCOME_RELEASED,
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


async def acquire_and_release(
    session: SessionCaller, *, names: list[str], pair_count: int, history: TokenHistory
) -> None:
    """Acquire and release resources that others want as well."""
    for turn in range(pair_count):
        began_at_ms = now_ms()
        result = await session.acquire(names[turn % len(names)], ttl_ms=30_000, wait_ms=60_000)
        assert result.acquire.outcome == ACQUIRE_OUTCOME_GRANTED, result
        grant = history.note(result.acquire.lease, began_at_ms=began_at_ms)
        result = await session.release(grant.resource, grant.lease_id)
        assert result.release.outcome == RELEASE_OUTCOME_RELEASED, result


async def test_10000_pairs_by_64_callers_have_no_error_rising_tokens_and_leave_no_lock(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """At the end each of five nodes keeps its identity, its greatest token and its counters, and no more."""
    nodes = await formed_nodes(5)
    server = await serve(nodes, node_timeout_ms=10_000)
    history = TokenHistory()
    # Two callers want each resource.
    async with SessionCaller(server) as session:
        await asyncio.gather(
            *(
                acquire_and_release(
                    session,
                    names=[f"orders/{caller // 2}/{number}" for number in range(5)],
                    pair_count=10_000 // 64 + (caller < 10_000 % 64),
                    history=history,
                )
                for caller in range(64)
            )
        )
    assert len(history.grants) == 10_000
    history.check()
    by_resource: dict[str, list[int]] = {}
    for grant in history.grants:
        by_resource.setdefault(grant.resource, []).append(grant.token)
    # Holds do not overlap, so the order of answers is the order of grants.
    for tokens in by_resource.values():
        assert tokens == sorted(set(tokens))
    kept = {"redfence:node", "redfence:high", *(f"redfence:counter:{name}" for name in by_resource)}

    async def clean() -> bool:
        return all({key.decode() for key in each} <= kept for each in await memories(nodes))

    await until(clean)
    for node, each in zip(nodes, await memories(nodes), strict=True):
        high = await node.call("GET", "redfence:high")
        assert isinstance(high, bytes)
        assert int(high) >= max(grant.token for grant in history.grants)
        assert {"redfence:node", "redfence:high"} <= {key.decode() for key in each}


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


async def test_a_load_over_nodes_of_each_engine_has_no_failure_and_leaves_no_lock(
    engine: RedisBinary, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    nodes = await flushed_nodes(3, binary=engine)
    await form(nodes)
    server = await serve(nodes)
    async with LockLoad(server) as load:
        await load.until_granted(300)
    assert not load.failures
    load.history.check()
    await until_no_locks(nodes)
