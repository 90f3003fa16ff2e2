"""`redfence cluster resize` on real nodes: another list of nodes, and tokens that go on rising."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.history.token_history import TokenHistory
from harness.load.failures import failure_of
from harness.load.lock_load import LockLoad
from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import (
    LockServer,
    Serve,
    form,
    memories,
    memory,
    node_phases,
    now_ms,
    serving,
    until_all_ready,
    urls_of,
)
from harness.time.eventually import all_set
from redfence_proto.v1 import lock_pb2
from redfence_server.errors import StartupError

pytestmark = pytest.mark.slow

TTL_MS = 1_000
WAITING = r"^taken out; waiting "
RESIZED = "was resized and goes on as cluster"
# A test can step in while the command waits.
LONG_TTL_MS = 3_000


def resize(
    commands: CommandProcesses, old: Sequence[RedisNode | str], new: Sequence[RedisNode | str], *flags: str
) -> CommandProcess:
    to = [flag for url in urls_of(new) for flag in ("--to", url)]
    given = ("--dial-timeout-ms", "5000", *flags)
    return commands.start_redfence("cluster", "resize", *node_flags(old), *to, *given)


async def token(server: LockServer) -> int:
    """Return the token of a grant for one resource."""
    grant = await server.acquire("one", ttl_ms=TTL_MS, wait_ms=2 * TTL_MS)
    assert grant.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
    await server.release("one", grant.lease.lease_id)
    return grant.lease.fencing_token


async def nothing_is_granted(server: LockServer) -> None:
    failure = await failure_of(server.acquire("one", ttl_ms=TTL_MS, wait_ms=2 * TTL_MS))
    assert failure.reason == lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE


# --- the way it is meant


@pytest.mark.parametrize(
    ("old_places", "new_places"),
    [
        (range(3), range(5)),
        (range(5), range(3)),
        (range(1), range(3)),
        # Two of the three that go are a quorum of the old cluster.
        (range(3), range(1)),
        # Every node is another one.
        (range(3), range(3, 6)),
        # The nodes that stay get other indices.
        (range(3), (4, 2, 3, 0, 1)),
    ],
)
async def test_under_load_tokens_rise_and_no_lock_has_two_holders(
    commands: CommandProcesses,
    flushed_nodes: FlushedNodes,
    serve: Serve,
    old_places: Sequence[int],
    new_places: Sequence[int],
) -> None:
    """A lease from before ends, and no server with the old list grants again."""
    nodes = await flushed_nodes(max(*old_places, *new_places) + 1)
    old, new = [nodes[place] for place in old_places], [nodes[place] for place in new_places]
    await form(old, ttl_ms_max=TTL_MS)
    before, history = await serve(old), TokenHistory()
    async with LockLoad(before, ttl_ms=TTL_MS, history=history) as load:
        await load.until_granted(50)
        process = resize(commands, old, new, "--yes")
        await process.wait_for_line(WAITING)
        await nothing_is_granted(before)
        told = await process.ended()
    assert f"has {len(new)} nodes, and its tokens go on above" in told
    granted_before = len(history.grants)
    greatest = max(grant.token for grant in history.grants)
    after = await serve(new)
    async with LockLoad(before, after, mortal=[before], ttl_ms=TTL_MS, history=history) as load:
        await load.until_granted(50)
        await before.until_detail(0, RESIZED)
    assert min(grant.token for grant in history.grants[granted_before:]) > greatest
    load.check()
    await until_all_ready(after)
    with pytest.raises(StartupError, match=RESIZED):
        async with serving(old, start_timeout_ms=500):
            pass


async def test_a_cluster_that_grew_can_shrink_again_onto_its_first_nodes(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """Its id is another one each time, so what a node knows of an earlier size does not count."""
    nodes = await flushed_nodes(5)
    ids, tokens = [await form(nodes[:3], ttl_ms_max=TTL_MS)], [0]
    for old, new in ((3, 5), (5, 3), (3, 5)):
        await resize(commands, nodes[:old], nodes[:new], "--yes").ended()
        async with serving(nodes[:new]) as server:
            await until_all_ready(server)
            ids.append((await server.status()).cluster_id)
            tokens.append(await token(server))
        # A removed node has to be empty before it comes back. A server with the old list would take it for a
        # wiped one, and mark it.
        for node in nodes[new:]:
            await node.call("FLUSHALL")
        done = await resize(commands, nodes[:old], nodes[:new], "--yes").ended()
        assert f"cluster {ids[-1]}: it has these {new} nodes already" in done
    assert len(set(ids)) == len(ids)
    assert tokens == sorted(set(tokens))


async def renew(server: LockServer, lease: lock_pb2.Lease) -> lock_pb2.KeepAliveResponse:
    """Renew once, on a stream of its own."""
    stream = server.locks.KeepAlive()
    await stream.write(lock_pb2.KeepAliveRequest(resource=lease.resource, lease_id=lease.lease_id))
    answer = await stream.read()
    stream.cancel()
    assert isinstance(answer, lock_pb2.KeepAliveResponse)
    return answer


async def test_a_lease_that_is_renewed_to_the_last_ends_before_the_next_grant(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """While the command waits no server renews it; a server with the new list says that it is lost."""
    nodes = await flushed_nodes(5)
    await form(nodes[:3], ttl_ms_max=TTL_MS)
    before, history = await serve(nodes[:3]), TokenHistory()
    assert "nothing was changed; add --yes" in await resize(commands, nodes[:3], nodes).ended(status=2)
    began_at_ms = now_ms()
    lease = (await before.acquire("held", ttl_ms=TTL_MS)).lease
    grant = history.note(lease, began_at_ms=began_at_ms)
    process = resize(commands, nodes[:3], nodes, "--yes")
    while True:
        sent_at_ms = now_ms()
        answer = await renew(before, lease)
        if answer.state != lock_pb2.LEASE_STATE_ACTIVE:
            break
        history.renewed(grant, sent_at_ms=sent_at_ms, validity_ms=answer.validity.ToMilliseconds())
    assert answer.state == lock_pb2.LEASE_STATE_AT_RISK
    assert history.succeeded["renew"]
    await process.ended()
    after = await serve(nodes)
    began_at_ms = now_ms()
    history.note((await after.acquire("held", ttl_ms=TTL_MS)).lease, began_at_ms=began_at_ms)
    assert (await renew(after, lease)).state == lock_pb2.LEASE_STATE_LOST
    history.check()
    history.check_exclusion()


async def test_a_server_with_the_new_list_may_start_while_the_command_waits(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """The command waits once, for the greatest ttl and its drift. Then that server grants the first call."""
    nodes = await flushed_nodes(5)
    await form(nodes[:3], ttl_ms_max=LONG_TTL_MS)
    process = resize(commands, nodes[:3], nodes, "--yes")
    await process.wait_for_line(WAITING)
    async with serving(nodes, until_quorum=False) as server:
        serves = asyncio.create_task(server.until_quorum())
        told = await process.ended()
        await serves
        await token(server)
    drift_ms = LONG_TTL_MS / 100 + 2
    assert re.findall(r"waiting ([\d.]+) s", told) == [f"{(LONG_TTL_MS + drift_ms) / 1000:.1f}"]


async def test_the_new_list_may_come_from_a_settings_file(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, tmp_path: Path
) -> None:
    nodes = await flushed_nodes(3)
    await form(nodes[:1], ttl_ms_max=TTL_MS)
    (tmp_path / "new.toml").write_text(f"listen = '127.0.0.1:0'\nnodes = {urls_of(nodes)}\n")
    command = ("cluster", "resize", *node_flags(nodes[:1]), "--to-config", str(tmp_path / "new.toml"))
    await commands.start_redfence(*command, "--yes").ended()
    await until_all_ready(await serve(nodes))


# --- nodes that are away


async def test_a_dead_minority_neither_stops_a_resize_nor_votes_afterwards(
    commands: CommandProcesses, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The new list names another node in the place of the dead one, which comes back too late."""
    nodes = await fresh_nodes(6)
    old, new = nodes[:3], [*nodes[:2], *nodes[3:]]
    await form(old, ttl_ms_max=TTL_MS)
    before = await serve(old)
    first = await token(before)
    nodes[2].kill()
    await resize(commands, old, new, "--yes").ended()
    await nodes[2].start()
    # It still believes in the old cluster, and so does this server. One of three is no quorum.
    await nothing_is_granted(before)
    assert first < await token(await serve(new))
    # Named in the new list, it is refused.
    with pytest.raises(StartupError, match=r"belongs to cluster|one of 3 nodes, but 5"):
        async with serving([*new[:4], nodes[2]], start_timeout_ms=2_000):
            pass


async def test_lists_that_cannot_be_resized_are_refused_and_nothing_is_changed(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """A new node is used or away, too few old ones vote, or the lists are wrong."""
    nodes = await flushed_nodes(8)
    a, b, c, d, e, used, strange, empty = nodes
    await form([a, b, c], ttl_ms_max=TTL_MS)
    await form([strange], ttl_ms_max=TTL_MS)
    await used.call("SET", "somebody's", "data")
    before = await memories(nodes)
    nowhere = "redis://127.0.0.1:1"
    cases = [
        (resize(commands, [a, b, c], [a, b, c, d, used], "--yes"), "yet holds 1 keys"),
        (resize(commands, [a, b, c], [a, b, c, d, strange], "--yes"), "is none of the old nodes: name it"),
        (resize(commands, [a, b, c], [a, b, c, d, nowhere], "--yes"), "the new node 4 (127.0.0.1:1): "),
        (resize(commands, [a, b, c], [a, b, c, d], "--yes"), "4 nodes are configured"),
        (resize(commands, [a, b, c], [a, b, c], "--yes"), "to: the new list of nodes is the same"),
        (
            resize(commands, [a, nowhere, empty], [a, b, c, d, e], "--yes"),
            "fewer than a quorum of 2 old nodes",
        ),
        # A node in another order is no node of that list.
        (
            resize(commands, [c, a, b], [a, b, c, d, e], "--yes"),
            "of 2 old nodes votes (node 0",
        ),
    ]
    for process, told in cases:
        assert told in await process.ended(status=2)
    assert await memories(nodes) == before


# --- broken off, and two at once


async def test_a_resize_broken_off_at_each_step_is_finished_by_the_same_command(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, start_proxy: StartProxy
) -> None:
    """Once a quorum has retired, nothing is granted until the end."""
    nodes = await flushed_nodes(5)
    await form(nodes[:3], ttl_ms_max=TTL_MS)
    before = await serve(nodes[:3])
    tokens = [await token(before)]
    proxies = [await start_proxy(node) for node in nodes]
    urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]

    async def broken_off(proxy: int, mark: str) -> None:
        held = proxies[proxy].hold_before(mark.encode())
        process = resize(commands, urls[:3], urls, "--yes")
        await all_set(held)
        process.kill()
        for each in proxies:
            each.reset()
            await each.heal()

    await broken_off(1, "\r\nretired\r\n")
    assert await node_phases(nodes) == [b"retired", b"ready", b"ready", None, None]
    # A minority has retired: the others go on.
    tokens.append(await token(before))
    await broken_off(2, "\r\nretired\r\n")
    assert await node_phases(nodes) == [b"retired", b"retired", b"ready", None, None]
    await nothing_is_granted(before)
    for mark, last in (("\r\nquarantined\r\n", None), ("-- reserve_floor: ", b"quarantined")):
        await broken_off(4, mark)
        assert await node_phases(nodes) == [*[b"quarantined"] * 4, last]
        await nothing_is_granted(before)
    await resize(commands, urls[:3], urls, "--yes").ended()
    tokens.append(await token(await serve(nodes)))
    assert tokens == sorted(set(tokens))


async def test_no_other_command_brings_a_retired_node_back(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, start_proxy: StartProxy
) -> None:
    """Not with the old list and not with the new one, until the resize is repeated."""
    nodes = await flushed_nodes(5)
    old, new = nodes[:3], [nodes[0], *nodes[3:]]
    await form(old, ttl_ms_max=TTL_MS)
    proxies = [await start_proxy(node) for node in old]
    retired = [proxy.hold_after(b"\r\nretired\r\n") for proxy in proxies[:1]]
    urls = [proxy.url(node.url) for proxy, node in zip(proxies, old, strict=True)]
    process = resize(commands, urls, new, "--yes")
    await all_set(*retired)
    process.kill()
    before = await memories(nodes)
    assert await node_phases(nodes) == [b"retired", b"ready", b"ready", None, None]
    for command in (
        ("init", *node_flags(new), "--max-ttl", "1s"),
        ("init", *node_flags(old), "--max-ttl", "1s"),
        ("recover", "--floor", "auto", "--yes", *node_flags(new)),
        ("recover", "--floor", "auto", "--yes", *node_flags(old)),
        ("replace", "0", *node_flags(old), "--yes"),
    ):
        told = await commands.start_redfence("cluster", *command).ended(status=2)
        assert "resize" in told or "nothing to recover" in told
    assert await memories(nodes) == before


async def test_a_node_that_forgets_that_it_retired_does_not_count_for_the_quorum(
    commands: CommandProcesses, fresh_nodes: FreshNodes, start_proxy: StartProxy
) -> None:
    """Servers may have given it its vote back before the next node retired."""
    nodes = await fresh_nodes(6)
    await form(nodes[:3], ttl_ms_max=TTL_MS)
    nodes[2].kill()
    proxy = await start_proxy(nodes[1])
    held = proxy.hold_before(b"\r\nretired\r\n")
    process = resize(commands, [nodes[0], proxy.url(nodes[1].url), nodes[2]], nodes[3:], "--yes")
    await all_set(held)
    assert (await node_phases(nodes[:2])) == [b"retired", b"ready"]
    await nodes[0].call("FLUSHALL")
    await proxy.heal()
    assert "only 1 of 3 old nodes stayed retired" in await process.ended(status=2)
    assert await node_phases(nodes[3:]) == [None] * 3


async def test_ctrl_c_in_the_wait_tells_that_it_has_to_be_repeated(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    nodes = await flushed_nodes(3)
    await form(nodes[:1], ttl_ms_max=3_600_000)
    process = resize(commands, nodes[:1], nodes, "--yes")
    await process.wait_for_line(r"^taken out; waiting 3636\.0 s")
    assert await process.stop(number=signal.SIGINT) == 130
    assert "repeat it with the same two lists" in process.stderr
    assert await node_phases(nodes) == [b"quarantined"] * 3


async def test_of_two_operators_with_the_same_list_the_later_finishes(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    nodes = await flushed_nodes(5)
    await form(nodes[:3], ttl_ms_max=LONG_TTL_MS)
    first = resize(commands, nodes[:3], nodes, "--yes")
    await first.wait_for_line(WAITING)
    # On a busy machine it could finish before the second one has begun.
    first.send_signal(signal.SIGSTOP)
    second = resize(commands, nodes[:3], nodes, "--yes")
    await second.wait_for_line(WAITING)
    first.send_signal(signal.SIGCONT)
    assert "a server or another operator changed it" in await first.ended(status=2)
    await second.ended()
    await until_all_ready(await serve(nodes))


async def test_of_two_operators_with_other_lists_one_changes_nothing(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """Two clusters would grant the same locks."""
    nodes = await flushed_nodes(6)
    old, one, other = nodes[:3], nodes[:5], [*nodes[:4], nodes[5]]
    await form(old, ttl_ms_max=LONG_TTL_MS)
    both = [resize(commands, old, new, "--yes") for new in (one, other)]
    ended = [await process.wait(timeout_s=30) for process in both]
    assert sorted(ended) == [0, 2]
    winner, loser = (0, 1) if ended[0] == 0 else (1, 0)
    # By how far the other command was when this one looked at the new node.
    refusals = ("run the command again", "another list of nodes", "is none of the old nodes")
    assert any(refusal in both[loser].stderr for refusal in refusals), both[loser].stderr
    await until_all_ready(await serve((one, other)[winner]))
    left = (nodes[5], nodes[4])[winner]
    assert not await memory(left)
