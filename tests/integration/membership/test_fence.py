"""A node comes back under load, and servers die between the steps of the fence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
import pytest

from harness.history.vote_watch import VoteWatch
from harness.load.lock_load import LockLoad
from harness.processes.commands import CommandProcesses
from harness.processes.fixture_types import FreshNodes, StartProxy
from harness.processes.loaded_cluster import TTL_MS
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import LockServer, Serve, form, until_all_ready, until_no_locks
from harness.processes.tcp_proxy import TcpProxy
from harness.time.eventually import all_set, eventually
from redfence_proto.v1.lock_pb2 import NODE_STATE_QUARANTINED, NODE_STATE_READY
from redfence_server.membership import fence

NAME = "orders/42"
# The first bytes of the scripts.
QUARANTINE: Final = b"-- quarantine: "
RESERVE: Final = b"-- reserve_floor: "
RAISE: Final = b"-- raise_floor: "
RESTORE: Final = b"-- restore_vote: "
pytestmark = pytest.mark.slow


async def test_a_release_that_meets_nodes_as_they_are_fenced_reaches_them(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """Both peers have new admission ids. The replies that say so are late."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes, proxied=True, node_timeout_ms=5_000, heartbeat_interval_ms=60_000)
    peers = server.proxies[1:]
    await until_all_ready(server)
    lease = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    for node in nodes[1:]:
        # Without that the hold would end by itself.
        assert await node.call("PERSIST", f"redfence:lock:{NAME}") == 1
    raised = [proxy.hold_after(RAISE) for proxy in peers]
    await nodes[0].call("FLUSHALL")
    noticing = asyncio.create_task(server.acquire("other", ttl_ms=TTL_MS))
    await all_set(*raised)
    before = [proxy.requests.passed_bytes for proxy in peers]
    releasing = asyncio.create_task(server.release(NAME, lease.lease_id))
    await eventually(
        lambda: all(proxy.requests.passed_bytes > each for proxy, each in zip(peers, before, strict=True))
    )
    for proxy in peers:
        await proxy.heal()
    # Either call may fail for want of a quorum, if the replies were too late.
    await asyncio.gather(noticing, releasing, return_exceptions=True)
    await until_no_locks(nodes)
    await until_all_ready(server)


async def test_a_node_that_is_lost_again_just_before_its_return_does_not_get_its_vote(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The fence was raised for a quarantine that the node has forgotten."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes, proxied=True, node_timeout_ms=5_000)
    await until_all_ready(server)
    async with VoteWatch(nodes) as watch:
        restoring = server.proxies[0].hold_before(RESTORE)
        await nodes[0].call("FLUSHALL")
        first = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
        await all_set(restoring)
        await nodes[0].call("FLUSHALL")
        await server.proxies[0].heal()
        await until_all_ready(server)
    assert [len(quarantines) for quarantines in watch.quarantines] == [2, 0, 0]
    assert (await server.acquire(NAME, ttl_ms=TTL_MS)).lease.fencing_token > first.fencing_token


@dataclass(frozen=True, slots=True)
class Death:
    """Where the first server stops, and is killed.

    Attributes:
        name: of the test.
        stop: stops the first server's traffic with the node and its peers, in this order.
        is_alone: whether the second server reaches the node only after that. Otherwise it has seen the
            quarantine as well.
        counts: sizes of the clusters.
    """

    name: str
    stop: Callable[[Sequence[TcpProxy]], list[asyncio.Event]]
    is_alone: bool = True
    counts: tuple[int, ...] = (3,)


DEATHS = (
    Death("before the quarantine", lambda to: [to[0].hold_before(QUARANTINE)]),
    Death("after the quarantine", lambda to: [to[0].hold_after(QUARANTINE)]),
    Death("before the reservation", lambda to: [to[0].hold_before(RESERVE)]),
    Death("after the reservation", lambda to: [to[0].hold_after(RESERVE)]),
    Death("before any floor is raised", lambda to: [proxy.hold_before(RAISE) for proxy in to[1:]]),
    Death(
        "after one floor is raised",
        lambda to: [to[1].hold_after(RAISE), *(proxy.hold_before(RAISE) for proxy in to[2:])],
        counts=(3, 5),
    ),
    Death(
        "after all floors but one are raised",
        lambda to: [*(proxy.hold_after(RAISE) for proxy in to[1:-1]), to[-1].hold_before(RAISE)],
        counts=(5,),
    ),
    Death("after all floors are raised", lambda to: [proxy.hold_after(RAISE) for proxy in to[1:]]),
    Death("before the vote", lambda to: [to[0].hold_before(RESTORE)], is_alone=False),
    Death("after the vote", lambda to: [to[0].hold_after(RESTORE)], is_alone=False),
)


@pytest.mark.parametrize(
    ("count", "death"),
    [
        pytest.param(n, death, id=f"n{n} {death.name}")
        for n in (3, 5)
        for death in DEATHS
        if n in death.counts
    ],
)
async def test_when_a_server_dies_while_it_brings_a_node_back_another_one_goes_on(
    *,
    count: int,
    death: Death,
    fresh_nodes: FreshNodes,
    serve: Serve,
    commands: CommandProcesses,
    start_proxy: StartProxy,
) -> None:
    """The node does not vote before, and needs no second quarantine.

    The first server reaches four of five nodes, so it needs every peer that is stopped.
    """
    nodes = await fresh_nodes(count)
    await form(nodes, ttl_ms_max=TTL_MS)
    proxies = [await start_proxy(node) for node in nodes]
    urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]
    process, address = await commands.start_serve(urls)
    survivor = await serve(nodes, proxied=True, dial_timeout_ms=10_000)
    async with grpc.aio.insecure_channel(address) as channel:
        mortal = LockServer(channel)
        await until_all_ready(mortal, survivor)
        load = LockLoad(mortal, survivor, ttl_ms=TTL_MS, mortal=[mortal])
        async with VoteWatch(nodes) as watch, load:
            await load.until_granted_by_each(10)
            reached = 1 + fence.fence_size(count)
            for proxy in proxies[reached:]:
                proxy.refuse()
            stopped = death.stop(proxies[:reached])
            if death.is_alone:
                survivor.proxies[0].hold()
            await nodes[0].call("FLUSHALL")
            if not death.is_alone:
                await survivor.until_states(NODE_STATE_QUARANTINED, *[NODE_STATE_READY] * (count - 1))
                survivor.proxies[0].hold()
            await all_set(*stopped)
            process.kill()
            # Otherwise the next driver could reserve a lesser floor than some peers know.
            assert await number(nodes[0], "floor") >= max(
                [await number(each, "floor:0") for each in nodes[1:]]
            )
            await survivor.proxies[0].heal()
            await load.until_granted(30)
            await until_all_ready(survivor)
            await load.until_granted(30)
    load.check()
    assert [len(quarantines) for quarantines in watch.quarantines] == [1, *[0] * (count - 1)]
    await until_no_locks(nodes)


async def number(node: RedisNode, name: str) -> int:
    """Return a field of the node's identity; 0 if it has none."""
    value = await node.call("HGET", "redfence:node", name)
    return int(value) if isinstance(value, bytes) else 0
