"""`redfence cluster init` on real nodes: it forms empty nodes once, and leaves all others alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import pytest

from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import (
    FormedNodes,
    Serve,
    form,
    memories,
    memory,
    node_phases,
    until,
)
from harness.processes.tcp_proxy import TcpProxy
from redfence_server.clock import Clock
from redfence_server.errors import NodeRejectedError
from redfence_server.membership import examination
from redfence_server.membership.examination import Findings
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations import forming as cluster_forming
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.dial import DialledNode
from redfence_server.redis_io.scripts import Keyspace

NOWHERE = "redis://127.0.0.1:1"
pytestmark = pytest.mark.slow


def start_init(commands: CommandProcesses, nodes: Sequence[RedisNode | str], *flags: str) -> CommandProcess:
    return commands.start_redfence("cluster", "init", *node_flags(nodes), *flags)


async def check_refusal(process: CommandProcess, told: str) -> None:
    """Check that the command ends with one line that tells this."""
    line = await process.ended(status=2)
    assert line.startswith("redfence cluster init: ")
    assert told in line
    assert line.count("\n") == 1


async def form_through(proxies: Sequence[TcpProxy], nodes: Sequence[RedisNode], *, floor: int = 0) -> str:
    """Form a cluster through proxies, and return its id."""
    urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]
    return await cluster_forming.form(
        check_urls(urls), keys=Keyspace(), ttl_ms_max=300_000, randomness=SystemRandomness(), floor=floor
    )


async def test_a_cluster_is_formed_once_and_forming_it_again_changes_nothing(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """The same id is told each time; the nodes then serve with the greatest ttl that was given."""
    nodes = await flushed_nodes(3)
    line = await start_init(commands, nodes, "--max-ttl", "1m").ended()
    assert line.startswith("cluster ")
    assert line.endswith(": formed, 3 nodes\n")
    before = await memories(nodes)
    again, another_ttl = start_init(commands, nodes, "--max-ttl", "60000ms"), start_init(commands, nodes)
    assert await again.ended() == line
    await check_refusal(another_ttl, "max_ttl: ")
    assert await memories(nodes) == before
    status = await (await serve(nodes)).status()
    assert status.max_ttl.ToMilliseconds() == 60_000
    assert status.cluster_id == line.split()[1].rstrip(":")


async def test_the_first_token_of_a_cluster_with_a_floor_is_above_it(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, start_proxy: StartProxy, serve: Serve
) -> None:
    """A repeated command raises it until the cluster is formed, and refuses a greater one afterwards."""
    nodes = await flushed_nodes(3)
    proxies = [await start_proxy(node) for node in nodes]
    broken_off = proxies[2].hold_before(b"\r\nassembled\r\n")
    forming = asyncio.create_task(form_through(proxies, nodes, floor=1_000))
    async with asyncio.timeout(10):
        await broken_off.wait()
    forming.cancel()
    await asyncio.wait([forming])
    line = await start_init(commands, nodes, "--floor", "5000").ended()
    assert (await (await serve(nodes)).acquire("a")).lease.fencing_token == 5_001
    assert await start_init(commands, nodes, "--floor", "5000").ended() == line
    await check_refusal(start_init(commands, nodes, "--floor", "6000"), "floor: node ")
    # Nodes that were formed without the clock are no nodes above the clock.
    await check_refusal(start_init(commands, nodes, "--floor", "auto"), "floor: node ")


async def test_a_floor_from_the_clock_may_be_given_again(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """So a script may repeat the command, although the clock has gone on."""
    nodes = await flushed_nodes(1)
    began_us = time.time_ns() // 1000
    line = await start_init(commands, nodes, "--floor", "auto").ended()
    assert await start_init(commands, nodes, "--floor", "auto").ended() == line
    assert (await (await serve(nodes)).acquire("a")).lease.fencing_token > began_us + 2**20


async def test_a_cluster_is_formed_also_while_nodes_of_it_are_out(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """The command changes nothing, and tells which node is out and what brings it back."""
    nodes = await formed_nodes(3)
    await nodes[1].call("HSET", "redfence:node", "state", "quarantined")
    before = await memories(nodes)
    process = start_init(commands, nodes)
    await process.ended()
    assert process.stdout.endswith(": formed, 3 nodes\n")
    [entry] = [json.loads(line) for line in process.stderr.splitlines()]
    assert (entry["event"], entry["node_index"], entry["state"]) == ("node_not_ready", 1, "quarantined")
    assert "comes back by itself" in entry["consequence"]
    assert await memories(nodes) == before


@pytest.mark.parametrize(
    ("count", "consequence"),
    [(1, "`redfence cluster recover`"), (3, "quarantined for 2.5 s, the greatest ttl")],
)
async def test_forming_nodes_that_are_not_durable_tells_what_is_missing_and_what_follows(
    commands: CommandProcesses, fresh_nodes: FreshNodes, count: int, consequence: str
) -> None:
    process = start_init(commands, await fresh_nodes(count, appendfsync="everysec"), "--max-ttl", "2.5")
    await process.ended()
    told = [json.loads(line) for line in process.stderr.splitlines()]
    assert [entry["node_index"] for entry in told] == list(range(count))
    for entry in told:
        assert entry["gap"] == "appendfsync is everysec, not always"
        assert consequence in entry["consequence"]


@pytest.mark.parametrize(
    ("state", "place", "reached", "wiped", "refused"),
    [
        ("forming", 2, [b"forming", b"forming", None], [0], False),
        ("assembled", 0, [b"forming"] * 3, [0, 1], False),
        ("assembled", 2, [b"assembled", b"assembled", b"forming"], [0, 1], False),
        ("assembled", 2, [b"assembled", b"assembled", b"forming"], [2], True),
        ("ready", 0, [b"assembled"] * 3, [0], True),
        ("ready", 2, [b"ready", b"ready", b"assembled"], [0, 1], True),
    ],
)
async def test_nodes_wiped_after_forming_broke_off_are_formed_only_if_none_can_have_voted(
    *,
    state: str,
    place: int,
    reached: list[bytes | None],
    wiped: list[int],
    refused: bool,
    flushed_nodes: FlushedNodes,
    start_proxy: StartProxy,
) -> None:
    """A quorum that was ready may have granted leases that it has forgotten."""
    nodes = await flushed_nodes(3)
    proxies = [await start_proxy(node) for node in nodes]
    broken_off = proxies[place].hold_before(f"\r\n{state}\r\n".encode())
    forming = asyncio.create_task(form_through(proxies, nodes))
    async with asyncio.timeout(10):
        await broken_off.wait()
    forming.cancel()
    await asyncio.wait([forming])
    assert await node_phases(nodes) == reached
    for index in wiped:
        await nodes[index].call("FLUSHALL")
    before = await memories(nodes)
    if refused:
        told = rf"node {wiped[0]} .* `redfence cluster recover` if fewer than a quorum of the others votes"
        with pytest.raises(NodeRejectedError, match=told):
            await form(nodes)
        assert await memories(nodes) == before
    else:
        await form(nodes)
        assert await node_phases(nodes) == [b"ready"] * 3


async def test_nodes_that_cannot_form_a_cluster_are_named_and_not_changed(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """A fresh identity lets a node vote as if it had never forgotten, so only empty nodes get one."""
    used, extra, other = await flushed_nodes(3)
    await used.call("SET", "somebody's", "data")
    before = await memories([used, extra, other])
    twin = extra.url.replace("127.0.0.1", "localhost") + "/1"
    same = f"node 2 (localhost:{extra.port}): it is the same process as node 0; every node must be a server"
    holds_keys = f"node 1 (127.0.0.1:{used.port}): it has no cluster identity and yet holds 1 keys"
    cases: list[tuple[CommandProcess, str]] = [
        (start_init(commands, [extra, used, other]), holds_keys),
        (start_init(commands, [extra, NOWHERE, other]), "node 1 (127.0.0.1:1): "),
        # Two databases of one server would fail together; here they have two names of this machine.
        (start_init(commands, [extra, other, twin]), same),
        (start_init(commands, [used, extra]), "node: 2 nodes are configured"),
        (start_init(commands, [extra], "--max-ttl", "99ms"), "max_ttl: it must be from 100 ms"),
    ]
    for process, told in cases:
        await check_refusal(process, told)
    assert await memories([used, extra, other]) == before


async def test_two_operators_who_form_the_same_nodes_at_once_leave_one_cluster(
    flushed_nodes: FlushedNodes, start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found the nodes empty; the first at node 0 gets them all, and the other changes nothing."""
    nodes = await flushed_nodes(3)
    slow, fast = [[await start_proxy(node) for node in nodes] for _ in range(2)]
    both_have_looked = asyncio.Barrier(2 * len(nodes))
    examine = examination.examine

    async def examine_together(node: DialledNode, keys: Keyspace, clock: Clock) -> Findings:
        found = await examine(node, keys, clock)
        await both_have_looked.wait()
        # The slow one is the first at node 0, and then late at node 1.
        slow[1].hold(replies=False)
        fast[0].hold(replies=False)
        return found

    monkeypatch.setattr(examination, "examine", examine_together)

    first, second = [asyncio.create_task(form_through(proxies, nodes)) for proxies in (slow, fast)]

    async def begun() -> bool:
        return bool(await memory(nodes[0]))

    await until(begun)
    await fast[0].heal()
    with pytest.raises(NodeRejectedError, match=r"node 0 .* somebody else"):
        await second
    assert await memories(nodes[1:]) == [{}, {}]
    await slow[1].heal()
    cluster_id = await first
    monkeypatch.undo()
    assert await form(nodes) == cluster_id
