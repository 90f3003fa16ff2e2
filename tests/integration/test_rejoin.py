"""How nodes come back under the eyes of several servers, some of which die at it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc
import pytest

from harness.eventually import eventually
from harness.fixture_types import FreshNodes, StartProxy
from harness.loaded_cluster import TTL_MS
from harness.lock_load import LockLoad
from harness.ports import HOST
from harness.processes import CommandProcess, CommandProcesses
from harness.redis_nodes import RedisNode
from harness.servers import LockServer, Serve, form, until_all_ready, until_no_locks
from harness.tcp_proxy import TcpProxy
from harness.vote_watch import VoteWatch
from redfence_proto.v1.lock_pb2 import NODE_STATE_QUARANTINED, NODE_STATE_READY
from redfence_server import quorum, scripts

NAME = "orders/42"
# How requests begin, or what stands in them.
VOUCH: Final = hashlib.sha1(scripts.load("vouch")).hexdigest().encode()
QUARANTINE: Final = b"-- quarantine: "
CLAIM: Final = b"-- claim: "
READMIT: Final = b"-- readmit: "
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
    # Time enough for what comes before the others vouch, however slow the machine is.
    ttl_ms = 3 * TTL_MS
    await form(nodes, ttl_ms_max=ttl_ms)
    # Its pulses are out of the way: no answer but to what is sent here.
    server = await serve(nodes, proxied=True, node_timeout_ms=5_000, pulse_interval_ms=60_000)
    others = server.proxies[1:]
    await until_all_ready(server)
    vouching = [proxy.hold_after(VOUCH) for proxy in others]
    await nodes[0].call("FLUSHALL")
    lease = (await server.acquire(NAME, ttl_ms=ttl_ms)).lease
    await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
    for node in nodes[1:]:
        # It will not end by itself.
        assert await node.call("PERSIST", f"redfence:lock:{NAME}") == 1
    await all_set(*vouching)
    await eventually(lambda: all(proxy.replies.kept_bytes for proxy in others))
    vouched = [proxy.replies.taken_bytes for proxy in others]
    releasing = asyncio.create_task(server.release(NAME, lease.lease_id))
    await eventually(
        lambda: all(proxy.replies.taken_bytes > before for proxy, before in zip(others, vouched, strict=True))
    )
    for proxy in others:
        await proxy.heal()
    # Whatever its caller was told, for it could not be decided at once.
    await asyncio.gather(releasing, return_exceptions=True)
    await until_no_locks(nodes)
    await until_all_ready(server)


async def test_a_node_that_is_lost_again_just_before_its_readmission_does_not_get_its_vote(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """What the others vouched for was for the quarantine that it was in, of which it knows nothing any more."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes, proxied=True, node_timeout_ms=5_000)
    await until_all_ready(server)
    async with VoteWatch(nodes) as watch:
        readmitting = server.proxies[0].hold_before(READMIT)
        await nodes[0].call("FLUSHALL")
        first = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
        await all_set(readmitting)
        await nodes[0].call("FLUSHALL")
        await server.proxies[0].heal()
        await until_all_ready(server)
    assert [len(quarantines) for quarantines in watch.quarantines] == [2, 0, 0]
    assert (await server.acquire(NAME, ttl_ms=TTL_MS)).lease.fencing_token > first.fencing_token


# --- a server that dies at it ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Death:
    """Where the first server stops, and is killed.

    Attributes:
        name: of the test.
        stop: what stops between it and these nodes: the one that is to come back, and those that have to vouch for it.
        first_to_see: it is alone with the node from the beginning; otherwise the second server has seen the quarantine as well.
        counts: of the nodes of the clusters in which it makes a difference.
    """

    name: str
    stop: Callable[[Sequence[TcpProxy]], list[asyncio.Event]]
    first_to_see: bool = False
    counts: tuple[int, ...] = (3, 5)


DEATHS = (
    Death("before the quarantine", lambda to: [to[0].hold_before(QUARANTINE)], first_to_see=True),
    Death("after the quarantine", lambda to: [to[0].hold_after(QUARANTINE)], first_to_see=True),
    Death("before the claim", lambda to: [to[0].hold_before(CLAIM)]),
    Death("after the claim", lambda to: [to[0].hold_after(CLAIM)]),
    Death("before any has vouched", lambda to: [proxy.hold_before(VOUCH) for proxy in to[1:]]),
    Death(
        "after one has vouched",
        lambda to: [to[1].hold_after(VOUCH), *(proxy.hold_before(VOUCH) for proxy in to[2:])],
    ),
    Death(
        "after all but one have vouched",
        lambda to: [*(proxy.hold_after(VOUCH) for proxy in to[1:-1]), to[-1].hold_before(VOUCH)],
        counts=(5,),
    ),
    Death("after all have vouched", lambda to: [proxy.hold_after(VOUCH) for proxy in to[1:]]),
    Death("before the readmission", lambda to: [to[0].hold_before(READMIT)]),
    Death("after the readmission", lambda to: [to[0].hold_after(READMIT)]),
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
async def test_whenever_a_server_dies_that_brings_a_node_back_another_one_goes_on(
    *,
    count: int,
    death: Death,
    fresh_nodes: FreshNodes,
    serve: Serve,
    commands: CommandProcesses,
    start_proxy: StartProxy,
) -> None:
    """Under load; until then the node does not vote, and it needs no second quarantine.

    Of five nodes the one that dies can reach but four, so that also there no other can vouch than those that are stopped.
    """
    nodes = await fresh_nodes(count)
    await form(nodes, ttl_ms_max=TTL_MS)
    proxies = [await start_proxy(node) for node in nodes]
    urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]
    process = commands.start_redfence(
        "serve", "--listen", f"{HOST}:0", environment={"REDFENCE_NODES": ",".join(urls)}
    )
    survivor = await serve(nodes, proxied=True, dial_timeout_ms=10_000)
    async with served_by(process) as mortal:
        await until_all_ready(mortal, survivor)
        load = LockLoad(mortal, survivor, ttl_ms=TTL_MS, mortal=[mortal])
        async with VoteWatch(nodes) as watch, load:
            await load.until_granted_by_each(10)
            vouchers = proxies[1 : quorum.majority(count) + 1]
            for proxy in proxies[len(vouchers) + 1 :]:
                proxy.hold()
            stopped = death.stop([proxies[0], *vouchers])
            if death.first_to_see:
                survivor.proxies[0].hold()
            await nodes[0].call("FLUSHALL")
            if not death.first_to_see:
                await survivor.until_states(NODE_STATE_QUARANTINED, *[NODE_STATE_READY] * (count - 1))
                survivor.proxies[0].hold()
            await all_set(*stopped)
            process.kill()
            # Or whoever goes on could come to a lesser floor than some know of.
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


@asynccontextmanager
async def served_by(process: CommandProcess) -> AsyncIterator[LockServer]:
    """Yield the server once it has said that it is ready."""
    address = (await process.wait_for_line(r"^redfence serving on (\S+) ", timeout_s=20))[1]
    async with grpc.aio.insecure_channel(address) as channel:
        yield LockServer(channel)
