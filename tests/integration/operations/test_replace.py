"""`redfence cluster replace` on real nodes, while servers with the old and the new list grant."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from harness.load.lock_load import LockLoad
from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import (
    LockServer,
    Serve,
    call_counts,
    form,
    identity_field,
    memories,
    memory,
    serving,
    until,
    until_all_ready,
)
from harness.time.eventually import all_set
from redfence_proto.v1.lock_pb2 import NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_UNREACHABLE

pytestmark = pytest.mark.slow

TTL_MS = 2_000
NOWHERE = "redis://127.0.0.1:1"


def replace(
    commands: CommandProcesses, place: int, url: str, nodes: Sequence[RedisNode | str], *flags: str
) -> CommandProcess:
    """Start the command; an empty `url` is left out. No node of these tests is silent: those away refuse."""
    given = (url,) if url else ()
    patience = ("--dial-timeout-ms", "5000")
    named = node_flags(nodes)
    return commands.start_redfence("cluster", "replace", str(place), *given, *named, *patience, *flags)


async def served(nodes: Sequence[RedisNode], serve: Serve) -> LockServer:
    await form(nodes, ttl_ms_max=TTL_MS)
    return await serve_ready(nodes, serve)


async def serve_ready(nodes: Sequence[RedisNode], serve: Serve) -> LockServer:
    """Serve over the nodes, and return once all vote; a quarantine may lie between."""
    server = await serve(nodes)
    await until_all_ready(server, timeout_s=20)
    return server


async def until_superseded(server: LockServer, *, detail: str = "was given its index since") -> None:
    """Return once the server counts node 2 no more, because another process has its index."""
    await server.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_QUARANTINED)
    await server.until_detail(2, detail)


# --- the way it is meant --------------------------------------------------------------------------


async def test_a_dead_node_is_replaced_while_callers_go_on_and_servers_are_exchanged(
    commands: CommandProcesses, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The new node gets its vote; then one of the old ones may die as well."""
    *old, new = await fresh_nodes(4)
    await form(old, ttl_ms_max=TTL_MS)
    nodes = [*old[:2], new]
    process, address = await commands.start_serve(old)
    async with grpc.aio.insecure_channel(address) as channel:
        leaving = LockServer(channel)
        await until_all_ready(leaving)
        async with LockLoad(leaving) as before:
            await before.until_granted(100)
            old[2].kill()
            await before.until_granted(100)
            told = await replace(commands, 2, new.url, old).ended()
            await before.until_granted(20)
        assert f"node 2 (127.0.0.1:{new.port}) is prepared" in told
        assert "votes about 2.0 s after a lock server has seen it" in told
        assert f"put 127.0.0.1:{new.port} in the place of 127.0.0.1:{old[2].port}" in told
        assert f"node 2 (127.0.0.1:{old[2].port}) votes no more" in told
        staying = await serve(nodes)
        async with LockLoad(leaving, staying, mortal=[leaving], history=before.history) as load:
            await load.until_granted_by_each(20)
            assert await process.stop() == 0
            await load.until_granted(20)
            await until_all_ready(staying, timeout_s=20)
            nodes[0].kill()
            await load.until_granted(200)
    assert await identity_field(new, "state") == b"ready"
    assert int(await identity_field(new, "floor") or 0) > 2**20
    load.check()


async def test_a_node_that_votes_is_replaced_if_the_operator_confirms_it(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """The old node votes no more at once, wherever it is still in a list; tokens stay in order."""
    *old, new = await flushed_nodes(4)
    with_old = await served(old, serve)
    async with LockLoad(with_old) as before_it:
        await before_it.until_granted(100)
        admission = await identity_field(old[2], "admission")
        told = await replace(commands, 2, new.url, old).ended(status=2)
        assert f"node 2 (127.0.0.1:{old[2].port}) votes now and would lose its vote at once" in told
        assert "until the new node votes, no other node may be lost; nothing was changed; add --yes" in told
        assert (await identity_field(old[2], "admission"), await memory(new)) == (admission, {})
        told = await replace(commands, 2, new.url, old, "--yes").ended()
        assert f"node 2 (127.0.0.1:{old[2].port}) votes no more" in told
        await with_old.until_detail(2, "another process was given its index")
        await before_it.until_granted(100)
    before = await memory(new)
    assert "is prepared" in await replace(commands, 2, new.url, old).ended()
    assert await memory(new) == before  # a quarantine that runs does not begin anew

    scripts_run = await call_counts(old[2:], "evalsha")
    with_new = await serve([*old[:2], new])
    async with LockLoad(with_old, with_new, history=before_it.history) as load:
        await load.until_granted(100)
        await until_all_ready(with_new, timeout_s=20)
        await load.until_granted(300)
        await until_superseded(with_old, detail="")
    load.check()
    assert await call_counts(old[2:], "evalsha") == scripts_run
    assert "has its place already" in await replace(commands, 2, new.url, old).ended()
    assert "has its place already" in await replace(commands, 2, "", [*old[:2], new]).ended()


async def test_an_old_node_that_the_operator_cannot_reach_counts_no_more(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """It is as healthy as ever. The nodes with the raised fence tell the server that still uses it."""
    *old, new = await flushed_nodes(4)
    with_old = await served(old, serve)
    async with LockLoad(with_old) as before_it:
        await before_it.until_granted(100)
        await replace(commands, 2, new.url, [*old[:2], NOWHERE]).ended()
        await before_it.until_granted(100)
    with_new = await serve([*old[:2], new])
    async with LockLoad(with_old, with_new, history=before_it.history) as load:
        await until_all_ready(with_new, timeout_s=20)
        await until_superseded(with_old)
        at_rest = await call_counts(old[2:], "evalsha")
        await load.until_granted(300)
    load.check()
    assert await call_counts(old[2:], "evalsha") == at_rest
    assert await identity_field(old[2], "state") == b"ready"
    await old[2].call("FLUSHALL")
    await with_old.until_detail(2, "this server has not seen it before")
    assert await old[2].call("DBSIZE") == 0


async def test_a_wiped_node_that_no_server_has_seen_before_takes_its_own_place_again(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """A server that started after the loss cannot know the node, and brings it in once it is prepared."""
    nodes = await flushed_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    async with serving(nodes) as server:
        await until_all_ready(server)
        before = (await server.acquire("orders/1", ttl_ms=TTL_MS)).lease
    await nodes[1].call("FLUSHALL")
    server = await serve(nodes)
    await server.until_states(NODE_STATE_READY, NODE_STATE_QUARANTINED, NODE_STATE_READY)
    await server.until_detail(1, "run `redfence cluster replace 1 URL`")
    assert await memory(nodes[1]) == {}
    told = await replace(commands, 1, "", nodes).ended()
    assert "is prepared" in told
    assert "left to do" not in told
    await until_all_ready(server, timeout_s=20)
    response = await server.acquire("orders/1", ttl_ms=TTL_MS, wait_ms=2 * TTL_MS)
    assert response.lease.fencing_token > before.fencing_token


async def test_a_node_that_was_in_quarantine_when_it_was_replaced_is_not_brought_back(
    commands: CommandProcesses, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """It was down and could not be told. A server that lists it learns the greater floor from the others."""
    *old, new = await fresh_nodes(4, appendfsync="everysec")
    with_old = await served(old, serve)
    await old[2].restart()
    await until_superseded(with_old, detail="")
    await old[2].call("BGREWRITEAOF")  # so it stands in quarantine on its disk as well

    async def written() -> bool:
        info = await old[2].call("INFO", "persistence")
        assert isinstance(info, bytes)
        return b"aof_rewrite_in_progress:0" in info and b"aof_rewrite_scheduled:0" in info

    await until(written)
    old[2].kill()
    told = await replace(commands, 2, new.url, old).ended()
    assert "votes no more, whether it could be reached or not" in told
    with_new = await serve_ready([*old[:2], new], serve)
    await old[2].start()
    await until_superseded(with_old)
    assert await identity_field(old[2], "state") == b"quarantined"
    async with LockLoad(with_old, with_new, ttl_ms=TTL_MS) as load:
        await load.until_granted_by_each(100)
    load.check()
    await with_new.until_states(*[NODE_STATE_READY] * 3)


async def test_an_old_node_does_not_take_its_index_back_at_a_server_that_starts(
    commands: CommandProcesses, fresh_nodes: FreshNodes, start_proxy: StartProxy
) -> None:
    """It proves that it forgot nothing; the server learns of the new node while it examines the old one."""
    *old, new = await fresh_nodes(4)
    await form(old, ttl_ms_max=TTL_MS)
    await replace(commands, 2, new.url, [*old[:2], NOWHERE]).ended()
    async with serving([*old[:2], new]) as with_new:
        await until_all_ready(with_new, timeout_s=20)
    await old[2].restart()
    proxies = [await start_proxy(node) for node in old]
    looked = proxies[2].hold_after(b"-- read_identity: ")

    async def both_admitted() -> bool:
        return all([await node.call("CLIENT", "LIST", "TYPE", "pubsub") for node in old[:2]])

    async def answer_late() -> None:
        await looked.wait()
        await until(both_admitted, timeout_s=20)
        await proxies[2].heal()

    late = asyncio.create_task(answer_late())
    async with serving(old, proxies=proxies, dial_timeout_ms=20_000, start_timeout_ms=30_000) as with_old:
        await late
        await until_superseded(with_old)
    assert await identity_field(old[0], "floor:2") == await identity_field(new, "floor")


# --- what it refuses ------------------------------------------------------------------------------


async def test_a_node_that_cannot_take_the_place_is_refused_and_nothing_is_changed(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """It is another node, holds keys or is not there; or there is no such index."""
    *nodes, used = await flushed_nodes(4)
    await form(nodes, ttl_ms_max=TTL_MS)
    await used.call("SET", "somebody's", "data")
    before = await memories([*nodes, used])
    cases = [
        (2, nodes[1].url, f"127.0.0.1:{nodes[1].port} is node 1 of the cluster"),
        (2, nodes[1].url.replace("127.0.0.1", "localhost"), "it is the same process as node 1"),
        (2, used.url, "it has no cluster identity and yet holds 1 keys"),
        (3, used.url, "there is no node 3; they are 0 to 2"),
        (-1, used.url, "there is no node -1; they are 0 to 2"),
        (2, "http://a:1", "URL: a URL starts with redis://"),
        (2, NOWHERE, "the new node 2 (127.0.0.1:1): "),
    ]
    started = [replace(commands, place, url, nodes, "--yes") for place, url, _ in cases]
    for process, (*_, told) in zip(started, cases, strict=True):
        assert told in await process.ended(status=2)
    assert await memories([*nodes, used]) == before


async def test_a_replica_takes_no_place_until_it_is_promoted_and_then_it_has_forgotten(
    commands: CommandProcesses, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """It shows the identity of the node that it followed, healthy by every sign, without the last writes."""
    *nodes, replica = await fresh_nodes(4)
    server = await served(nodes, serve)
    await replica.follow(nodes[2])

    async def copied() -> bool:
        return await identity_field(replica, "state") == b"ready"

    await until(copied, timeout_s=20)
    nodes[2].kill()
    await server.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
    before = (await server.acquire("orders/1", ttl_ms=TTL_MS)).lease
    told = await replace(commands, 2, replica.url, nodes).ended(status=2)
    assert f"the new node 2 (127.0.0.1:{replica.port}): it is a replica" in told
    await replica.call("REPLICAOF", "NO", "ONE")
    assert "is prepared" in await replace(commands, 2, replica.url, nodes).ended()
    assert await identity_field(replica, "state") == b"quarantined"
    with_new = await serve_ready([*nodes[:2], replica], serve)
    nodes[0].kill()
    response = await with_new.acquire("orders/1", ttl_ms=TTL_MS, wait_ms=2 * TTL_MS)
    assert response.lease.fencing_token > before.fencing_token + 2**20


# --- broken off, and two at once ------------------------------------------------------------------


async def test_two_replacements_of_one_node_at_once_leave_one_new_node_with_a_vote(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, start_proxy: StartProxy
) -> None:
    """Both operators read the same tokens and reserve the same floor; the fence of one is not the other's."""
    *old, first, second = await flushed_nodes(5)
    await form(old, ttl_ms_max=TTL_MS)
    proxies = [await start_proxy(node) for node in old[:2]]
    slow = [proxy.url(node.url) for proxy, node in zip(proxies, old, strict=False)]
    raising = [proxy.hold_before(b"-- raise_floor: ") for proxy in proxies]
    overtaken = replace(commands, 2, second.url, [*slow, NOWHERE], "--dial-timeout-ms", "60000")
    await all_set(*raising)
    assert "is prepared" in await replace(commands, 2, first.url, [*old[:2], NOWHERE]).ended()
    assert await identity_field(first, "reserved") == await identity_field(second, "reserved")
    for proxy in proxies:
        await proxy.heal()
    assert "and 0 took it; run the command again" in await overtaken.ended(status=2)
    assert "is prepared" in await replace(commands, 2, second.url, [*old[:2], NOWHERE]).ended()
    with_first = await serve([*old[:2], first])
    await serve_ready([*old[:2], second], serve)
    await until_superseded(with_first)


async def test_a_replacement_broken_off_at_each_step_is_finished_by_repeating_it(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, start_proxy: StartProxy
) -> None:
    """Each run is killed one step later than the run before; the others go on, and tokens stay in order."""
    *old, new = await flushed_nodes(4)
    with_old = await served(old, serve)
    async with LockLoad(with_old) as load:
        # Each step, the nodes that carry it out before the end, and those that do not.
        for step, done, not_done in (
            ("quarantine", [new], []),
            ("reserve_floor", [new], []),
            ("raise_floor", [old[0]], [old[1]]),
            # The fence is completed: one node has it already.
            ("raise_floor", [old[1]], []),
        ):
            proxies = {node.url: await start_proxy(node) for node in (*old, new)}
            mark = f"-- {step}: ".encode()
            steps = [proxies[node.url].hold_after(mark) for node in done]
            steps += [proxies[node.url].hold_before(mark) for node in not_done]
            urls = [proxy.url(url) for url, proxy in proxies.items()]
            process = replace(commands, 2, urls[3], urls[:3], "--yes")
            await all_set(*steps)
            process.kill()
            await load.until_granted(20)
        assert "is prepared" in await replace(commands, 2, new.url, old).ended()
        with_new = await serve_ready([*old[:2], new], serve)
        await load.until_granted(20)
    async with LockLoad(with_old, with_new, history=load.history) as both:
        await both.until_granted_by_each(50)
    both.check()
