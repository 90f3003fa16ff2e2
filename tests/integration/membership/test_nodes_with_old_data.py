"""Nodes come back with older data, or another node answers at their address."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from harness.history.token_history import TokenHistory
from harness.history.vote_watch import VoteWatch
from harness.load import tries
from harness.load.lock_load import LockLoad
from harness.load.tries import NAME
from harness.processes.fixture_types import FreshNodes, StartProxy
from harness.processes.loaded_cluster import TTL_MS, loaded_cluster
from harness.processes.node_data import copy_data, lose_last, put_back, raises_greatest_token
from harness.processes.ports import HOST
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import Serve, form, serving, until, until_all_ready
from harness.processes.stand_ins import follow, lead_to
from redfence_proto.v1.lock_pb2 import (
    NODE_STATE_QUARANTINED,
    NODE_STATE_READY,
)
from redfence_server import composition, config
from redfence_server.errors import NodeRejectedError

pytestmark = pytest.mark.slow

granted = partial(tries.granted, ttl_ms=TTL_MS)


@pytest.fixture
async def nodes(fresh_nodes: FreshNodes) -> list[RedisNode]:
    """Three nodes that fsync every write, formed with short quarantines."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    return nodes


async def test_a_node_put_back_into_an_earlier_quarantine_sits_it_out_anew(
    nodes: list[RedisNode], serve: Serve, tmp_path: Path
) -> None:
    """The other server has waited for the first quarantine, and not for this one."""
    driver, other = await serve(nodes), await serve(nodes, proxied=True)
    await until_all_ready(driver, other)
    await nodes[0].call("FLUSHALL")
    for server in (driver, other):
        await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
    old = copy_data(nodes[0], tmp_path / "old")
    other.proxies[0].refuse()
    await until_all_ready(driver)
    history = TokenHistory()
    await granted(driver, history)
    # As if the mint had never reached it: the lease stands on the first two nodes alone.
    await nodes[2].call("DEL", f"redfence:lock:{NAME}")
    nodes[0].kill()
    put_back(nodes[0], old)
    await nodes[0].start()
    await other.proxies[0].heal()
    await granted(other, history)
    history.check()
    history.check_exclusion()
    await until_all_ready(driver, other)


async def test_an_old_snapshot_is_noticed_by_its_tokens_and_by_its_floor(
    fresh_nodes: FreshNodes, serve: Serve, tmp_path: Path
) -> None:
    """The second time it is older than the node's last return."""
    async with loaded_cluster(await fresh_nodes(3), serve) as cluster:
        node = cluster.nodes[0]
        old = copy_data(node, tmp_path / "old")
        for times in (1, 2):
            # Callers have fewer acquires under way. No server has seen those tokens.
            await cluster.load.until_granted(100)
            node.kill()
            put_back(node, old)
            await node.start()
            await cluster.until_quarantined(0, times=times)
            await until_all_ready(*cluster.servers)


@pytest.mark.parametrize("how", ["snapshot", "cut log"])
async def test_older_data_that_no_server_recognises_repeats_no_token(
    how: str, nodes: list[RedisNode], start_proxy: StartProxy, tmp_path: Path
) -> None:
    """The only node that remembers dies after the fence has read it."""
    history = TokenHistory()
    proxies = [await start_proxy(node) for node in nodes]
    async with serving(nodes, proxies=proxies) as server:
        await until_all_ready(server)
        old = copy_data(nodes[0], tmp_path / "old")
        proxies[2].drop()
        await granted(server, history)
        await server.release(NAME, history.grants[-1].lease_id)
    nodes[0].kill()
    if how == "snapshot":
        put_back(nodes[0], old)
    else:
        lose_last(nodes[0], 1, raises_greatest_token)
    await nodes[0].start()
    async with VoteWatch(nodes) as watch, serving(nodes) as server:
        await until_all_ready(server)
        nodes[1].kill()
        await granted(server, history)
    assert watch.quarantines == [set(), set(), set()]
    history.check()


async def test_a_copy_of_a_nodes_data_puts_the_original_out(
    nodes: list[RedisNode], fresh_nodes: FreshNodes, start_proxy: StartProxy, tmp_path: Path
) -> None:
    """Two servers reach two processes for one index; tokens stay unique and ordered."""
    [copy] = await fresh_nodes(1)
    copy.kill()
    async with serving(nodes) as server, LockLoad(server, ttl_ms=TTL_MS) as load:
        await load.until_granted(50)
        put_back(copy, copy_data(nodes[0], tmp_path / "copy"))
        await copy.start()
        proxies = [await start_proxy(node) for node in nodes]
        await lead_to(copy, proxies[:1], instead_of=nodes[0])
        async with serving(nodes, proxies=proxies) as other:
            async with LockLoad(other, ttl_ms=TTL_MS, history=load.history) as other_load:
                await until_all_ready(other)
                await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
                assert "another process was given its index since" in (await server.status()).nodes[0].detail
                await load.until_granted_by_each(50)
                await other_load.until_granted_by_each(50)
            # The original takes the index again, after a quarantine.
            proxies[0].forward_to(nodes[0].port)
            await until_all_ready(other, server)
            await load.until_granted(50)
    load.history.check()


async def test_a_failover_to_a_replica_and_back_is_noticed(fresh_nodes: FreshNodes, serve: Serve) -> None:
    """Either may lack the last writes of the other."""
    *nodes, replica = await fresh_nodes(4)
    async with loaded_cluster(nodes, serve, proxied=True) as cluster:
        await follow(replica, nodes[0])
        await cluster.until_served()
        await replica.call("REPLICAOF", "NO", "ONE")
        # It lags by what comes from now on.
        await cluster.load.until_granted(50)
        async with VoteWatch([replica]) as watch:
            await lead_to(replica, cluster.proxies(0), instead_of=nodes[0])

            async def quarantined() -> bool:
                return bool(watch.quarantines[0])

            await until(quarantined)
            await until_all_ready(*cluster.servers)
            await cluster.until_served()
        for proxy in cluster.proxies(0):
            proxy.forward_to(nodes[0].port)
        await cluster.until_quarantined(0)


async def test_a_node_at_the_address_of_another_node_gets_no_second_vote(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """Once the address is right again, the node votes at once."""
    async with loaded_cluster(await fresh_nodes(3), serve, proxied=True) as cluster:
        await lead_to(cluster.nodes[1], cluster.proxies(0), instead_of=cluster.nodes[0])
        for server in cluster.servers:
            await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
            assert "same process as node 1" in (await server.status()).nodes[0].detail
        await cluster.until_served()
        for proxy in cluster.proxies(0):
            proxy.forward_to(cluster.nodes[0].port)
    assert cluster.watch.quarantines == [set(), set(), set()]


@pytest.mark.parametrize("what", ["swapped", "named twice", "another database of one server", "evicts"])
async def test_a_server_does_not_start_with_a_node_in_the_wrong_place_or_one_that_evicts(
    what: str, nodes: list[RedisNode], start_proxy: StartProxy
) -> None:
    proxies = [await start_proxy(node) for node in nodes]
    match what:
        case "swapped":
            await lead_to(nodes[1], proxies[2:], instead_of=nodes[2])
            await lead_to(nodes[2], proxies[1:2], instead_of=nodes[1])
            told = "was formed as node 2, but is configured as node 1"
        case "named twice":
            await lead_to(nodes[0], proxies[1:2], instead_of=nodes[1])
            # Either may come first.
            told = "(was formed as node 0, .* is named twice|the same process as node 0)"
        case "another database of one server":
            await move_to_database(nodes[1], nodes[0], 1)
            await lead_to(nodes[0], proxies[1:2], instead_of=nodes[1])
            told = "the same process as node 0"
        case _:
            await nodes[1].call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru", "maxmemory", "100mb")
            told = "would drop keys when its memory is full .* set maxmemory-policy noeviction"
    urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]
    if what == "another database of one server":
        urls[1] += "/1"
    settings = config.load({"nodes": urls, "listen": f"{HOST}:0"})
    with pytest.raises(NodeRejectedError, match=rf"^node 1 \({HOST}:{proxies[1].port}\): .*{told}"):
        async with composition.LockServer(settings) as running:
            await running.until_quorum()


async def move_to_database(node: RedisNode, other: RedisNode, database: int) -> None:
    """Copy the identity and the greatest token of a node into another database of another node."""
    for key in (b"redfence:node", b"redfence:high"):
        script = "redis.call('SELECT', ARGV[1]); return redis.call('RESTORE', KEYS[1], 0, ARGV[2])"
        dump = await node.call("DUMP", key)
        assert isinstance(dump, bytes)
        await other.call("EVAL", script, 1, key, database, dump)


async def test_a_node_that_dropped_keys_is_quarantined(fresh_nodes: FreshNodes, serve: Serve) -> None:
    """A heartbeat notices it."""

    async def set_memory(policy: str, limit: str) -> None:
        await cluster.nodes[0].call("CONFIG", "SET", "maxmemory-policy", policy, "maxmemory", limit)

    async def dropped() -> bool:
        info = await cluster.nodes[0].call("INFO", "stats")
        return isinstance(info, bytes) and b"evicted_keys:0\r" not in info

    async with loaded_cluster(await fresh_nodes(3), serve) as cluster:
        # Only what expires is dropped: holds and counters.
        await set_memory("volatile-lru", "1")
        await until(dropped)
        await set_memory("noeviction", "0")
        await cluster.until_quarantined(0)
        await cluster.until_served()
    assert [len(quarantines) for quarantines in cluster.watch.quarantines] == [1, 0, 0]
