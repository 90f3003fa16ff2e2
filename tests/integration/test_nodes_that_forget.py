"""Nodes that crash, forget and come back under load: tokens stay unique and ordered, holders alone, and no operator is needed.

Every load is of sixteen callers over two servers. What they were told is judged by the history, what the nodes did by looking at them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from harness.fixture_types import FreshNodes
from harness.loaded_cluster import TTL_MS, loaded_cluster
from harness.node_data import Transaction, log_file, lose_last, repair_log, transactions, with_settings
from harness.redis_nodes import RedisNode
from harness.servers import LockServer, Serve, form, until, until_all_ready
from harness.vote_watch import VoteWatch
from redfence_proto.v1.lock_pb2 import NODE_ANSWER_ANSWERED, NODE_STATE_QUARANTINED, NODE_STATE_READY
from redfence_server.redis_binary import RedisBinary
from redfence_server.redis_process import NodeStartError

pytestmark = pytest.mark.slow

StartNode = Callable[[str], Awaitable[RedisNode]]


@pytest.fixture
def start_node(fresh_nodes: FreshNodes, redis_binary: RedisBinary, tmp_path: Path) -> StartNode:
    """Starts a node that logs its writes with an fsync "always" or "everysec", or that has "no log"."""

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
    """With an fsync for every write it votes again at once; otherwise after its quarantine, whatever it has kept."""
    nodes = [await start_node(log) for log in logs]
    spared = (len(nodes) - 1) // 2 - 1  # so many may still be in quarantine when the next one dies
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


@pytest.mark.parametrize("count", [3, 5])
async def test_as_many_nodes_as_can_be_spared_are_wiped_at_once_and_come_back_by_themselves(
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


async def until_answered(server: LockServer, place: int) -> None:
    """The server has heard all that the node has answered until now, for answers come in order."""

    async def answered() -> bool:
        return (await server.look("orders/42")).nodes[place].answer == NODE_ANSWER_ANSWERED

    await until(answered)


def is_change(each: Transaction) -> bool:
    """Tell whether a node has minted, committed or renewed here."""
    return any(command[:3] == (b"HINCRBY", b"redfence:node", b"changes") for command in each.commands)


@pytest.mark.parametrize(
    ("count", "rounds"),
    [(3, [{0: 50}, {1: 200}]), (5, [{0: 50, 1: 200}])],
    ids=["n3 one after the other", "n5 two at once"],
)
async def test_a_node_whose_log_has_lost_its_end_is_noticed_whatever_its_settings_say(
    count: int, rounds: list[dict[int, int]], fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """It was cut between two commands, so the node itself sees nothing wrong; the servers remember what it had answered."""
    async with loaded_cluster(await fresh_nodes(count), serve) as cluster:
        for lost in rounds:
            # More than can have been under way when it was killed, which nobody was told of.
            await cluster.load.until_granted(max(lost.values()))
            for place in lost:
                cluster.nodes[place].kill()
            for place, changes in lost.items():
                assert len(lose_last(cluster.nodes[place], changes, is_change)) >= changes
                await cluster.nodes[place].start()
            await cluster.until_quarantined(*lost)
            await until_all_ready(*cluster.servers)
    seen = [len(quarantines) for quarantines in cluster.watch.quarantines]
    assert seen == [1, 1, *[0] * (count - 2)]


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("cut", ["before a command", "within a command"])
async def test_the_loss_of_a_single_change_is_noticed(
    count: int, cut: str, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """It may be the one that a token stands on. A log that is cut within a command does not even start before it is repaired."""
    nodes = await fresh_nodes(count)
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes)
    await until_all_ready(server)
    lease = (await server.acquire("orders/42", ttl_ms=TTL_MS)).lease
    await until_answered(server, 0)
    nodes[0].kill()
    if cut == "before a command":
        lose_last(nodes[0], 1, is_change)
    else:
        log = log_file(nodes[0])
        *_, change = filter(is_change, transactions(log.read_bytes()))
        os.truncate(log, change.ends_at - 3)
        with pytest.raises(NodeStartError):
            await nodes[0].start()
        repair_log(nodes[0])
    async with VoteWatch(nodes) as watch:
        await nodes[0].start()
        await server.until_states(NODE_STATE_QUARANTINED, *[NODE_STATE_READY] * (count - 1))
        await until_all_ready(server)
    assert [len(quarantines) for quarantines in watch.quarantines] == [1, *[0] * (count - 1)]
    again = (await server.acquire("orders/42", ttl_ms=TTL_MS)).lease
    assert again.fencing_token > lease.fencing_token


async def test_a_node_that_restarts_and_has_forgotten_nothing_is_never_told_to_be_in_quarantine(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """Several servers see it at once; one notes its new run, and the others look again."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    servers = [await serve(nodes) for _ in range(5)]
    await until_all_ready(*servers)
    with capture_logs() as logs:
        for _ in range(3):
            await nodes[0].restart()
            await until_all_ready(*servers)
    lost = [log["state"] for log in logs if log["event"] == "node_lost"]
    assert set(lost) == {"unreachable"}
