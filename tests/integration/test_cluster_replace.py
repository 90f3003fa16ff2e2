"""`redfence cluster replace` on real nodes, while servers with the old list and with the new one go on granting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import redfence
from harness.history.token_history import TokenHistory
from harness.load.lock_load import LockLoad
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.ports import HOST, free_port
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import (
    LockServer,
    Serve,
    call_counts,
    form,
    memories,
    memory,
    new_lease_id,
    now_ms,
    serving,
    until,
)
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_UNREACHABLE
from redfence_server.api.messages import duration

pytestmark = pytest.mark.slow

TTL_MS = 2_000
NOWHERE = "redis://127.0.0.1:1"
READY = [NODE_STATE_READY] * 3


def replace(
    commands: CommandProcesses, place: int, url: str, nodes: Sequence[RedisNode | str], *flags: str
) -> CommandProcess:
    """Start the command; an empty `url` is left out."""
    urls = [node if isinstance(node, str) else node.url for node in nodes]
    named = [flag for each in urls for flag in ("--node", each)]
    # No node of these tests is silent: those that are away refuse.
    patience = ("--dial-timeout-ms", "5000")
    given = (url,) if url else ()
    return commands.start_redfence("cluster", "replace", str(place), *given, *named, *patience, *flags)


async def ended(process: CommandProcess, *, status: int = 0) -> str:
    """Return what it wrote, once it has ended with this status."""
    assert await process.wait(timeout_s=30) == status, process.stdout + process.stderr
    assert "Traceback" not in process.stderr
    return process.stdout + process.stderr


async def field(node: RedisNode, name: str) -> bytes | None:
    """Return a field of the node's identity."""
    value = await node.call("HGET", "redfence:node", name)
    return value if isinstance(value, bytes) else None


def check(*loads: LockLoad) -> None:
    """Check what all of them were granted, as one history."""
    history = TokenHistory()
    for load in loads:
        history.grants += load.history.grants
    history.check()


async def all_ready(server: LockServer) -> None:
    """Return once the server has every node; a quarantine lies between."""

    async def reached() -> bool:
        return [node.state for node in (await server.status()).nodes] == READY

    await until(reached, timeout_s=20)


class Callers:
    """Callers of the SDK that go on through any server, within `async with`; what they were granted is written down."""

    def __init__(self, *addresses: str, count: int = 8) -> None:
        self._addresses = addresses
        self._count = count
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.history = TokenHistory()

    async def until_granted(self, count: int) -> None:
        """Return once so many more were granted; fail if a caller has failed for good."""
        goal = len(self.history.grants) + count

        def reached() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return len(self.history.grants) >= goal

        await eventually(reached, timeout_s=20, interval_s=0.002)

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[Callers]:
        """Let them call until the exit."""
        async with redfence.AsyncClient(*self._addresses) as client:
            self._tasks = [asyncio.create_task(self._call(client, number)) for number in range(self._count)]
            try:
                yield self
            finally:
                self._stopping = True
                outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome

    async def _call(self, client: redfence.AsyncClient, number: int) -> None:
        name = f"orders/{number % 3}"
        while not self._stopping:
            began_at_ms = now_ms()
            try:
                lease = await client.acquire(name, ttl=TTL_MS / 1000, wait=TTL_MS / 1000)
            except (redfence.UnavailableError, redfence.OutcomeUnknownError, redfence.NotAcquiredError):
                await asyncio.sleep(0.01)
                continue
            granted = lock_pb2.Lease(resource=name, lease_id=new_lease_id(), fencing_token=lease.token)
            granted.validity.CopyFrom(duration(lease.remaining() * 1000))
            self.history.note(granted, began_at_ms=began_at_ms)
            try:
                await lease.release()
            except (redfence.UnavailableError, redfence.OutcomeUnknownError, redfence.LeaseLostError):
                continue


# --- the way it is meant ------------------------------------------------------------------------------------------------


async def test_a_dead_node_is_replaced_while_callers_go_on_and_servers_are_restarted(
    commands: CommandProcesses, fresh_nodes: FreshNodes
) -> None:
    """From the command's output to a node that votes; then one of the old ones may die as well."""
    *old, new = await fresh_nodes(4)
    await form(old, ttl_ms_max=TTL_MS)
    listens = [f"{HOST}:{free_port()}" for _ in range(2)]
    async with AsyncExitStack() as first, AsyncExitStack() as second, Callers(*listens).calling() as callers:
        stacks = (first, second)
        for stack, listen in zip(stacks, listens, strict=True):
            await all_ready(await stack.enter_async_context(serving(old, listen=listen)))
        await callers.until_granted(100)
        old[2].kill()
        await callers.until_granted(100)
        told = await ended(replace(commands, 2, new.url, old))
        assert f"node 2 (127.0.0.1:{new.port}) is prepared" in told
        assert "votes about 2.0 s after a lock server has seen it" in told
        assert f"put 127.0.0.1:{new.port} in the place of 127.0.0.1:{old[2].port}" in told
        assert f"node 2 (127.0.0.1:{old[2].port}) votes no more" in told
        nodes = [*old[:2], new]
        for stack, listen in zip(stacks, listens, strict=True):
            await stack.aclose()
            await callers.until_granted(20)
            server = await stack.enter_async_context(serving(nodes, listen=listen))
            await callers.until_granted(20)
            await all_ready(server)
        await callers.until_granted(100)
        nodes[0].kill()
        await callers.until_granted(200)
        assert await field(new, "state") == b"ready"
        assert int(await field(new, "floor") or 0) > 2**20
    callers.history.check()


async def test_a_node_that_votes_is_replaced_if_the_operator_confirms_it(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """It is told what it costs. The old node votes no more at once, wherever it is still in a list; tokens stay in order."""
    *old, new = await flushed_nodes(4)
    await form(old, ttl_ms_max=TTL_MS)
    with_old = await serve(old)
    await all_ready(with_old)
    async with LockLoad(with_old) as before_it:
        await before_it.until_granted(100)
        admission = await field(old[2], "admission")
        told = await ended(replace(commands, 2, new.url, old), status=2)
        assert f"node 2 (127.0.0.1:{old[2].port}) votes now and would lose its vote at once" in told
        assert "until the new node votes, no other node may be lost; nothing was changed; add --yes" in told
        assert (await field(old[2], "admission"), await memory(new)) == (admission, {})
        told = await ended(replace(commands, 2, new.url, old, "--yes"))
        assert f"node 2 (127.0.0.1:{old[2].port}) votes no more" in told
        await with_old.until_detail(2, "another process was given its index")
        await before_it.until_granted(100)
    before = await memory(new)
    assert "is prepared" in await ended(replace(commands, 2, new.url, old))
    assert await memory(new) == before  # a quarantine that runs does not begin anew

    scripts_run = await call_counts(old[2:], "evalsha")
    with_new = await serve([*old[:2], new])
    async with LockLoad(with_old, with_new) as load:
        await load.until_granted(100)
        await all_ready(with_new)
        await load.until_granted(300)
        await with_old.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_QUARANTINED)
    check(before_it, load)
    assert await call_counts(old[2:], "evalsha") == scripts_run
    assert "has its place already" in await ended(replace(commands, 2, new.url, old))
    assert "has its place already" in await ended(replace(commands, 2, "", [*old[:2], new]))


async def test_an_old_node_that_the_operator_cannot_reach_counts_no_more(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """It is as healthy as ever. The nodes on which the fence was raised tell the server that still uses it."""
    *old, new = await flushed_nodes(4)
    await form(old, ttl_ms_max=TTL_MS)
    with_old = await serve(old)
    await all_ready(with_old)
    async with LockLoad(with_old) as before_it:
        await before_it.until_granted(100)
        await ended(replace(commands, 2, new.url, [*old[:2], NOWHERE]))
        await before_it.until_granted(100)
    with_new = await serve([*old[:2], new])
    async with LockLoad(with_old, with_new) as load:
        await all_ready(with_new)
        await with_old.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_QUARANTINED)
        await with_old.until_detail(2, "was given its index since")
        at_rest = await call_counts(old[2:], "evalsha")
        await load.until_granted(300)
    check(before_it, load)
    assert await call_counts(old[2:], "evalsha") == at_rest
    assert await field(old[2], "state") == b"ready"
    await old[2].call("FLUSHALL")
    await with_old.until_detail(2, "this server has not seen it before")
    assert await old[2].call("DBSIZE") == 0


async def test_a_wiped_node_that_no_server_has_seen_before_takes_its_own_place_again(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """A server that was started after the loss cannot know it; once it is prepared, the server brings it in without a restart."""
    nodes = await flushed_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    async with serving(nodes) as server:
        await all_ready(server)
        before = (await server.acquire("orders/1", ttl_ms=TTL_MS)).lease
    await nodes[1].call("FLUSHALL")
    server = await serve(nodes)
    await server.until_states(NODE_STATE_READY, NODE_STATE_QUARANTINED, NODE_STATE_READY)
    await server.until_detail(1, "run `redfence cluster replace 1 URL`")
    assert await memory(nodes[1]) == {}
    told = await ended(replace(commands, 1, "", nodes))
    assert "is prepared" in told
    assert "left to do" not in told
    await all_ready(server)
    response = await server.acquire("orders/1", ttl_ms=TTL_MS, wait_ms=2 * TTL_MS)
    assert response.lease.fencing_token > before.fencing_token


async def test_a_node_that_was_in_quarantine_when_it_was_replaced_is_not_brought_back(
    commands: CommandProcesses, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """It was down and could not be told. Whoever still has it in the list finds out that the others know of a greater floor."""
    *old, new = await fresh_nodes(4, appendfsync="everysec")
    await form(old, ttl_ms_max=TTL_MS)
    with_old = await serve(old)
    await all_ready(with_old)
    await old[2].restart()
    await with_old.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_QUARANTINED)
    await old[2].call("BGREWRITEAOF")  # so it stands in quarantine on its disk as well

    async def written() -> bool:
        info = await old[2].call("INFO", "persistence")
        assert isinstance(info, bytes)
        return b"aof_rewrite_in_progress:0" in info and b"aof_rewrite_scheduled:0" in info

    await until(written)
    old[2].kill()
    assert "votes no more, whether it could be reached or not" in await ended(
        replace(commands, 2, new.url, old)
    )
    with_new = await serve([*old[:2], new])
    await all_ready(with_new)
    await old[2].start()
    await with_old.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_QUARANTINED)
    await with_old.until_detail(2, "was given its index since")
    assert await field(old[2], "state") == b"quarantined"
    async with LockLoad(with_old, with_new, ttl_ms=TTL_MS) as load:
        await load.until_granted_by_each(100)
    check(load)
    assert [node.state for node in (await with_new.status()).nodes] == READY


async def test_an_old_node_does_not_take_its_index_back_at_a_server_that_starts(
    commands: CommandProcesses, fresh_nodes: FreshNodes, start_proxy: StartProxy
) -> None:
    """It proves that it forgot nothing, and the server learns of the new node while it looks at the old one."""
    *old, new = await fresh_nodes(4)
    await form(old, ttl_ms_max=TTL_MS)
    await ended(replace(commands, 2, new.url, [*old[:2], NOWHERE]))
    async with serving([*old[:2], new]) as with_new:
        await all_ready(with_new)
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
        await with_old.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_QUARANTINED)
        await with_old.until_detail(2, "was given its index since")
    assert await field(old[0], "floor:2") == await field(new, "floor")


# --- what it refuses ------------------------------------------------------------------------------------------------------


async def test_what_cannot_take_the_place_is_refused_and_nothing_is_changed(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """Another cluster's node, another place's, one with somebody's keys, one that is not there; and a place that is none."""
    nodes = await flushed_nodes(7)
    mine, others, used = nodes[:3], nodes[3:6], nodes[6]
    await form(mine, ttl_ms_max=TTL_MS)
    await form(others, ttl_ms_max=TTL_MS)
    await used.call("SET", "somebody's", "data")
    before = await memories(nodes)
    cases = [
        (2, others[2].url, f"the new node 2 (127.0.0.1:{others[2].port}): it belongs to cluster "),
        (2, mine[1].url, f"127.0.0.1:{mine[1].port} is node 1 of the cluster"),
        (2, mine[1].url.replace("127.0.0.1", "localhost"), "it is the same process as node 1"),
        (2, used.url, "it has no cluster identity and yet holds 1 keys"),
        (2, NOWHERE, "the new node 2 (127.0.0.1:1): "),
        (3, used.url, "there is no node 3; they are 0 to 2"),
        (-1, used.url, "there is no node -1; they are 0 to 2"),
        (2, "http://a:1", "URL: a URL starts with redis://"),
    ]
    started = [replace(commands, place, url, mine, "--yes") for place, url, _ in cases]
    for process, (_, _, told) in zip(started, cases, strict=True):
        assert told in await ended(process, status=2)
    assert await memories(nodes) == before
    await used.call("FLUSHALL")
    wrong_list = replace(commands, 2, used.url, [mine[0], others[1], mine[2]], "--yes")
    too_few = replace(commands, 2, used.url, [mine[0], NOWHERE, mine[2]], "--yes")
    assert f"node 1 (127.0.0.1:{others[1].port}): it belongs to cluster " in await ended(wrong_list, status=2)
    told = await ended(too_few, status=2)
    assert "fewer than a quorum of 2 other nodes votes" in told
    assert "node 1 (127.0.0.1:1): " in told
    assert await memories(nodes) == [*before[:6], {}]
    await mine[1].call("HSET", "redfence:node", "run_id", "an earlier one")
    told = await ended(replace(commands, 2, used.url, mine, "--yes"), status=2)
    assert (
        f"node 1 (127.0.0.1:{mine[1].port}): it restarted, and a lock server has not given it its vote"
        in told
    )


async def test_a_replica_cannot_take_a_place(commands: CommandProcesses, fresh_nodes: FreshNodes) -> None:
    """It follows its primary, identity included; as a dead node's replica it would seem to be that node."""
    *nodes, replica = await fresh_nodes(4)
    await form(nodes, ttl_ms_max=TTL_MS)
    await replica.call("CONFIG", "SET", "masterauth", nodes[2].url.split(":")[2].split("@")[0])
    await replica.call("REPLICAOF", "127.0.0.1", nodes[2].port)
    nodes[2].kill()
    told = await ended(replace(commands, 2, replica.url, nodes), status=2)
    assert f"the new node 2 (127.0.0.1:{replica.port}): it is a replica" in told


async def test_a_replica_that_was_promoted_takes_the_place_as_one_that_forgot(
    commands: CommandProcesses, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """It shows the identity of the node that it followed, with every sign of health, and lacks what came last."""
    *nodes, replica = await fresh_nodes(4)
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes)
    await all_ready(server)
    await replica.call("CONFIG", "SET", "masterauth", nodes[2].url.split(":")[2].split("@")[0])
    await replica.call("REPLICAOF", "127.0.0.1", nodes[2].port)

    async def copied() -> bool:
        return await field(replica, "state") == b"ready"

    await until(copied, timeout_s=20)
    nodes[2].kill()
    await server.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
    before = (await server.acquire("orders/1", ttl_ms=TTL_MS)).lease
    await replica.call("REPLICAOF", "NO", "ONE")
    assert "is prepared" in await ended(replace(commands, 2, replica.url, nodes))
    assert await field(replica, "state") == b"quarantined"
    with_new = await serve([*nodes[:2], replica])
    await all_ready(with_new)
    nodes[0].kill()
    response = await with_new.acquire("orders/1", ttl_ms=TTL_MS, wait_ms=2 * TTL_MS)
    assert response.lease.fencing_token > before.fencing_token + 2**20


# --- broken off, and two at once ------------------------------------------------------------------------------------------


async def test_two_replacements_of_one_node_at_once_leave_one_new_node_with_a_vote(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, start_proxy: StartProxy
) -> None:
    """Both operators read the same tokens, so both reserve the same floor; the fence of one is not the other's."""
    *old, first, second = await flushed_nodes(5)
    await form(old, ttl_ms_max=TTL_MS)
    proxies = [await start_proxy(node) for node in old[:2]]
    slow = [proxy.url(node.url) for proxy, node in zip(proxies, old, strict=False)]
    raising = [proxy.hold_before(b"-- raise_floor: ") for proxy in proxies]
    overtaken = replace(commands, 2, second.url, [*slow, NOWHERE], "--dial-timeout-ms", "60000")
    async with asyncio.timeout(30):
        await asyncio.gather(*(each.wait() for each in raising))
    assert "is prepared" in await ended(replace(commands, 2, first.url, [*old[:2], NOWHERE]))
    assert await field(first, "reserved") == await field(second, "reserved")
    for proxy in proxies:
        await proxy.heal()
    assert "and 0 took it; run the command again" in await ended(overtaken, status=2)
    assert "is prepared" in await ended(replace(commands, 2, second.url, [*old[:2], NOWHERE]))
    with_first, with_second = await serve([*old[:2], first]), await serve([*old[:2], second])
    await all_ready(with_second)
    await with_first.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_QUARANTINED)
    await with_first.until_detail(2, "was given its index since")


async def test_a_replacement_broken_off_at_each_step_is_finished_by_repeating_it(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, start_proxy: StartProxy
) -> None:
    """Each run is killed one step later than the run before; all the while the others are granted, and tokens stay in order."""
    *old, new = await flushed_nodes(4)
    await form(old, ttl_ms_max=TTL_MS)
    with_old = await serve(old)
    await all_ready(with_old)
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
            reached = [proxies[node.url].hold_after(mark) for node in done]
            reached += [proxies[node.url].hold_before(mark) for node in not_done]
            urls = [proxy.url(url) for url, proxy in proxies.items()]
            process = replace(commands, 2, urls[3], urls[:3], "--yes")
            async with asyncio.timeout(30):
                await asyncio.gather(*(each.wait() for each in reached))
            process.kill()
            await load.until_granted(20)
        told = await ended(replace(commands, 2, new.url, old))
        assert "is prepared" in told
        with_new = await serve([*old[:2], new])
        await all_ready(with_new)
        await load.until_granted(20)
    async with LockLoad(with_old, with_new) as both:
        await both.until_granted_by_each(50)
    check(load, both)
