"""A majority of nodes has forgotten, so no server grants anything before a recovery."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import pytest

from harness.history.vote_watch import VoteWatch
from harness.load.failures import Failure, failure_of
from harness.load.lock_load import LockLoad
from harness.load.session_caller import SessionCaller
from harness.processes.commands import CommandProcesses
from harness.processes.fixture_types import FreshNodes
from harness.processes.loaded_cluster import TTL_MS
from harness.processes.servers import LockServer, Serve, form, now_ms, until, until_all_ready
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import (
    ERROR_REASON_QUORUM_UNAVAILABLE,
    LEASE_STATE_AT_RISK,
    LEASE_STATE_REASON_QUORUM_UNAVAILABLE,
)

NAME = "orders/42"
# The promise is one second. The report has the times, because a busy machine must not fail the test.
DEADLINE_S = 10.0
pytestmark = pytest.mark.slow


class Clocked:
    """Calls that must fail for want of a quorum, and the longest time of each kind, in ms."""

    def __init__(self) -> None:
        self.slowest_ms: dict[str, float] = {}

    async def refused(self, kind: str, call: Awaitable[Any]) -> None:
        """Make a call; fail unless it reports that there is no quorum now."""
        sent_at_ms = now_ms()
        async with asyncio.timeout(DEADLINE_S):
            if kind == "session acquire":
                failure = Failure.of_message((await call).error)
            elif kind == "keep alive":
                renewed = (await call).renew
                assert renewed.state == LEASE_STATE_AT_RISK
                assert renewed.reason == LEASE_STATE_REASON_QUORUM_UNAVAILABLE
                failure = None
            else:
                failure = await failure_of(call)
        if failure is not None:
            assert failure.code is grpc.StatusCode.UNAVAILABLE
            assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
            assert failure.is_retryable
        self.slowest_ms[kind] = max(self.slowest_ms.get(kind, 0.0), now_ms() - sent_at_ms)


async def every_call(server: LockServer, held: lock_pb2.Lease, clocked: Clocked) -> None:
    """Make every kind of call, all at once."""
    async with SessionCaller(server) as session:
        calls: Mapping[str, Awaitable[Any]] = {
            "acquire": server.acquire("free", ttl_ms=TTL_MS),
            "acquire, and wait": server.acquire("free as well", ttl_ms=TTL_MS, wait_ms=60_000),
            "acquire what is held, and wait": server.acquire(NAME, ttl_ms=TTL_MS, wait_ms=60_000),
            "session acquire": session.acquire("also free", ttl_ms=TTL_MS, wait_ms=60_000),
            "keep alive": session.renew(NAME, held.lease_id),
            "get lock": server.look(NAME),
            "check token": server.check(NAME, held.fencing_token),
            "release": server.release(NAME, held.lease_id),
        }
        await asyncio.gather(*(clocked.refused(kind, call) for kind, call in calls.items()))


async def until_stuck(server: LockServer, places: Sequence[int]) -> None:
    """Return once the server has tried in vain to bring these nodes back."""

    async def told() -> bool:
        nodes = (await server.status()).nodes
        return all("other nodes that vote, and found" in nodes[place].detail for place in places)

    await until(told, timeout_s=10)


@pytest.mark.parametrize("count", [3, 5])
async def test_every_call_is_refused_at_once_until_an_operator_recovers_the_cluster(
    count: int,
    fresh_nodes: FreshNodes,
    serve: Serve,
    commands: CommandProcesses,
    record_property: Callable[[str, object], None],
) -> None:
    """The end of the quarantines changes nothing. After the recovery tokens are above all before."""
    nodes = await fresh_nodes(count)
    await form(nodes, ttl_ms_max=TTL_MS)
    servers = [await serve(nodes), await serve(nodes)]
    await until_all_ready(*servers)
    lost = range(count // 2 + 1)
    clocked = Clocked()
    async with VoteWatch(nodes) as watch:
        async with LockLoad(*servers, ttl_ms=TTL_MS) as load:
            await load.until_granted_by_each(50)
            held = (await servers[0].acquire(NAME, ttl_ms=TTL_MS)).lease
            if count == 3:
                await asyncio.gather(*(nodes[place].call("FLUSHALL") for place in lost))
            else:
                await asyncio.gather(*(nodes[place].restart(with_data=False) for place in lost))
            lost_at_ms = now_ms()
            await asyncio.gather(*(every_call(server, held, clocked) for server in servers))
            await asyncio.gather(*(until_stuck(server, lost) for server in servers))
            await asyncio.gather(*(every_call(server, held, clocked) for server in servers))
        assert max(grant.began_at_ms for grant in load.history.grants) < lost_at_ms
        nodes_given = {"REDFENCE_NODES": ",".join(node.url for node in nodes)}
        how = ("--floor", "auto", "--yes")
        recover = commands.start_redfence("cluster", "recover", *how, environment=nodes_given)
        assert await recover.wait(timeout_s=20) == 0, recover.stderr
        async with LockLoad(*servers, ttl_ms=TTL_MS, history=load.history) as later:
            await until_all_ready(*servers)
            await later.until_granted_by_each(20)
    later.check()
    # The recovery took every node out once more.
    assert [len(quarantines) for quarantines in watch.quarantines] == [1 + (p in lost) for p in range(count)]
    for kind, ms in clocked.slowest_ms.items():
        record_property(f"slowest {kind}, in ms", round(ms))
