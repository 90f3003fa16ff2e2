"""Nodes crash, forget and come back under load: tokens stay ordered, and each holder is alone.

Every load is of sixteen callers over two servers. A history judges what callers were told; a watch judges the nodes.
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

# More tokens than callers have under way when a node is killed: no server has seen those.
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
    """With an fsync for every write it does not wait after the fence; otherwise it does."""
    nodes = [await start_node(log) for log in logs]
    spared = (len(nodes) - 1) // 2 - 1  # so many may be in quarantine when the next one dies
    async with loaded_cluster(nodes, serve) as cluster:
        for place, (node, log) in enumerate(zip(nodes, logs, strict=True)):
            await cluster.until_ready(len(nodes) - spared)
            if log == "no log" and place % 2:
                # The others have nothing left.
                await node.call("SAVE")
            await cluster.until_served()
            node.kill()
            await cluster.until_served()
            await node.start()
            if log != "always":
                await cluster.until_quarantined(place)
    seen = [len(quarantines) for quarantines in cluster.watch.quarantines]
    assert seen == [int(log != "always") for log in logs]


async def test_all_nodes_lose_power_and_those_with_proof_fence_each_other(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """No node votes after the restart, and none forgot anything: none waits."""
    async with loaded_cluster(await fresh_nodes(5), serve) as cluster:
        for _ in range(2):
            for node in cluster.nodes:
                node.kill()
            await asyncio.gather(*(node.start() for node in cluster.nodes))
            await until_all_ready(*cluster.servers)
            await cluster.until_served()
    assert cluster.watch.quarantines == [set()] * 5


@pytest.mark.parametrize("count", [3, 5])
async def test_as_many_nodes_as_can_be_spared_are_wiped_and_come_back_by_themselves(
    count: int, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """By a restart on an empty disk, and by FLUSHALL."""
    lost = range((count - 1) // 2)
    async with loaded_cluster(await fresh_nodes(count), serve) as cluster:
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
    assert [len(quarantines) for quarantines in cluster.watch.quarantines] == [
        2 * (p in lost) for p in range(count)
    ]


@pytest.mark.parametrize(("count", "lost"), [(3, 1), (5, 2)], ids=["n3", "n5"])
async def test_nodes_whose_logs_have_lost_their_end_are_quarantined(
    count: int, lost: int, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The cut is clean, so the node finds nothing wrong; servers have seen a greater token."""
    async with loaded_cluster(await fresh_nodes(count), serve) as cluster:
        for node in cluster.nodes[:lost]:
            await until_greatest_token(node, _LOST)
        for node in cluster.nodes[:lost]:
            node.kill()
            assert len(lose_last(node, _LOST, raises_greatest_token)) >= _LOST
            await node.start()
        await cluster.until_quarantined(*range(lost))
    seen = [len(quarantines) for quarantines in cluster.watch.quarantines]
    assert seen == [1] * lost + [0] * (count - lost)


async def until_greatest_token(node: RedisNode, least: int) -> None:
    """Return once the greatest token on the node is no less than that."""

    async def reached() -> bool:
        high = await node.call("GET", "redfence:high")
        assert isinstance(high, bytes)
        return int(high) >= least

    await until(reached, timeout_s=20)
