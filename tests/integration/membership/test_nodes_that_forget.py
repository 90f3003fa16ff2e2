"""Nodes crash, forget and come back under the load of sixteen callers over two servers.

A history judges what callers heard, and a watch judges the nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from harness.processes.fixture_types import FreshNodes
from harness.processes.loaded_cluster import loaded_cluster
from harness.processes.node_data import lose_last, raises_greatest_token, with_settings
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import Serve, until, until_all_ready
from redfence_server.embedded.binary import RedisBinary

pytestmark = pytest.mark.slow

# Callers have fewer acquires under way. No server has seen those tokens.
_LOST = 20

StartNode = Callable[[str], Awaitable[RedisNode]]


@pytest.fixture
def start_node(fresh_nodes: FreshNodes, redis_binary: RedisBinary, tmp_path: Path) -> StartNode:
    """Starts a node that logs with an fsync "always" or "everysec", or that has "no log"."""

    async def start(log: str) -> RedisNode:
        match log:
            case "no log":
                settings = ("--appendonly", "no")
                binary = with_settings(redis_binary, *settings, wrapper=tmp_path / "without-log")
                [node] = await fresh_nodes(1, binary=binary)
            case "everysec":
                [node] = await fresh_nodes(1, appendfsync="everysec")
            case _:
                [node] = await fresh_nodes(1)
        return node

    return start


@pytest.mark.parametrize(
    "logs",
    [
        ["always"] * 3,
        ["everysec"] * 3,
        ["no log"] * 3,
        ["always", "everysec", "no log", "everysec", "no log"],
    ],
    ids=["n3 always", "n3 everysec", "n3 no log", "n5 of every kind"],
)
async def test_each_node_in_turn_is_killed_and_comes_back_by_itself(
    logs: list[str], start_node: StartNode, serve: Serve
) -> None:
    """Only nodes without an fsync for every write go into quarantine."""
    nodes = [await start_node(log) for log in logs]
    spared = (len(nodes) - 1) // 2 - 1  # as many may be in quarantine when the next node dies
    async with loaded_cluster(nodes, serve) as cluster:
        for place, (node, log) in enumerate(zip(nodes, logs, strict=True)):
            await cluster.until_ready(len(nodes) - spared)
            if log == "no log" and place % 2:
                # Without a snapshot the node comes back empty.
                await node.call("SAVE")
            await cluster.until_served()
            node.kill()
            await cluster.until_served()
            await node.start()
            if log != "always":
                await cluster.until_quarantined(place)
    seen = [len(quarantines) for quarantines in cluster.watch.quarantines]
    assert seen == [int(log != "always") for log in logs]


async def test_a_minority_of_nodes_is_wiped_and_comes_back_by_itself(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """They restart on an empty disk, and later forget by FLUSHALL."""
    lost = (0, 1)
    async with loaded_cluster(await fresh_nodes(5), serve) as cluster:
        for place in lost:
            cluster.nodes[place].kill()
        await cluster.until_served()
        await asyncio.gather(*(cluster.nodes[place].restart(with_data=False) for place in lost))
        await cluster.until_quarantined(*lost)
        await cluster.until_served()
        await until_all_ready(*cluster.servers)
        await cluster.until_served()
        await asyncio.gather(*(cluster.nodes[place].call("FLUSHALL") for place in lost))
        await cluster.until_quarantined(*lost, times=2)
    assert [len(quarantines) for quarantines in cluster.watch.quarantines] == [2, 2, 0, 0, 0]


async def test_nodes_whose_logs_have_lost_their_end_are_quarantined(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The node notices nothing, because the cut is clean. Servers have seen a greater token."""
    async with loaded_cluster(await fresh_nodes(5), serve) as cluster:
        for node in cluster.nodes[:2]:
            await until_greatest_token(node, _LOST)
        for node in cluster.nodes[:2]:
            node.kill()
            assert len(lose_last(node, _LOST, raises_greatest_token)) >= _LOST
            await node.start()
        await cluster.until_quarantined(0, 1)
    assert [len(quarantines) for quarantines in cluster.watch.quarantines] == [1, 1, 0, 0, 0]


async def until_greatest_token(node: RedisNode, least: int) -> None:
    """Return once the greatest token on the node is at least `least`."""

    async def reached() -> bool:
        high = await node.call("GET", "redfence:high")
        assert isinstance(high, bytes)
        return int(high) >= least

    await until(reached, timeout_s=20)
