"""`redfence cluster recover` on real nodes, after a majority of them forgot."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence

import pytest

from harness.history.token_history import TokenHistory
from harness.load.failures import failure_of
from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import (
    LockServer,
    Serve,
    form,
    memories,
    new_lease_id,
    node_phases,
    now_ms,
    serving,
    until,
)
from harness.time.eventually import all_set
from redfence_proto.v1 import lock_pb2
from redfence_server.errors import StartupError
from redfence_server.membership.fence import wait_ms

pytestmark = pytest.mark.slow

TTL_MS = 1_000
NAMES = ("orders/42", "orders/43")
COUNTERS = [f"redfence:counter:{name}" for name in NAMES]
NOWHERE = "redis://127.0.0.1:1"
OUT = [b"quarantined"] * 3
# The two passes are so far apart that a test can step in.
LONG_TTL_MS = 3_000
WAITING = r"^taken out; waiting 3\.0 s"


def recover(
    commands: CommandProcesses, nodes: Sequence[RedisNode | str], *flags: str, floor: str = "auto"
) -> CommandProcess:
    """Start the command. No node of these tests is silent for good: those that are away refuse."""
    given = ("--dial-timeout-ms", "5000", "--floor", floor, *flags)
    return commands.start_redfence("cluster", "recover", *node_flags(nodes), *given)


async def grant_some(server: LockServer, history: TokenHistory, *, count: int = 5) -> None:
    """Acquire and release in turn, and record the grants."""
    for turn in range(count):
        name, began_at_ms = NAMES[turn % len(NAMES)], now_ms()
        response = await server.acquire(name, ttl_ms=TTL_MS, lease_id=new_lease_id(), wait_ms=2 * TTL_MS)
        assert response.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
        history.note(response.lease, began_at_ms=began_at_ms)
        await server.release(name, response.lease.lease_id)


async def served(
    nodes: Sequence[RedisNode], serve: Serve, *, ttl_ms_max: int = TTL_MS
) -> tuple[LockServer, TokenHistory]:
    """Form the nodes, serve over them, and record some grants."""
    history = TokenHistory()
    await form(nodes, ttl_ms_max=ttl_ms_max)
    server = await serve(nodes)
    await go_on(server, history)
    return server, history


async def go_on(server: LockServer, history: TokenHistory, *others: lock_pb2.NodeState.ValueType) -> None:
    """Record some more grants once all nodes are in; check that tokens are in order."""
    await all_in(server, *others)
    await grant_some(server, history)
    history.check()


async def all_in(server: LockServer, *others: lock_pb2.NodeState.ValueType) -> None:
    """Return once every node is ready but the last ones, which are in the states given."""
    ready = [lock_pb2.NODE_STATE_READY] * (len(server.nodes) - len(others))
    await server.until_states(*ready, *others, timeout_s=20)


async def nothing_is_granted(server: LockServer) -> None:
    """Check that each caller is told of the missing quorum, and does not wait out its time."""
    for name in NAMES:
        failure = await failure_of(server.acquire(name, ttl_ms=TTL_MS, wait_ms=5_000))
        assert failure.reason == lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE


async def forget(nodes: Sequence[RedisNode]) -> None:
    """Wipe nodes, and return once a server has noticed; a node may have come back by itself since."""
    for node in nodes:
        await node.call("FLUSHALL")

    async def noticed() -> bool:
        return None not in await node_phases(nodes)

    await until(noticed)


# --- the way it is meant --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
async def test_after_a_majority_forgot_nothing_is_granted_until_a_recovery(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, count: int
) -> None:
    """Leases from before have ended when the server grants again. Without --yes nothing changes."""
    nodes = await flushed_nodes(count)
    server, history = await served(nodes, serve)
    began_at_ms = now_ms()
    held = history.note((await server.acquire("held", ttl_ms=TTL_MS)).lease, began_at_ms=began_at_ms)
    await forget(nodes[: count // 2 + 1])
    await nothing_is_granted(server)
    before = await memories(nodes)
    told = await recover(commands, nodes).ended(status=2)
    cluster_id = (await server.status()).cluster_id
    assert f"cluster {cluster_id}: {count - count // 2 - 1} of {count} nodes can vote" in told
    assert "nothing was changed; add --yes" in told
    assert set(before[0]) == {b"redfence:node"}
    assert (await memories(nodes))[0] == before[0]

    began_us = time.time_ns() // 1000
    process = recover(commands, nodes, "--yes")
    not_out_at_ms = now_ms()

    async def out() -> bool:
        nonlocal not_out_at_ms
        asked_at_ms = now_ms()
        if await node_phases(nodes) == OUT[:count]:
            return True
        not_out_at_ms = asked_at_ms
        return False

    await until(out, timeout_s=20)
    await nothing_is_granted(server)
    await process.ended()
    # Each lease that was granted before the last of them was taken out has ended.
    assert now_ms() - not_out_at_ms >= wait_ms(TTL_MS)
    await go_on(server, history)
    began_at_ms = now_ms()
    again = history.note((await server.acquire("held", ttl_ms=TTL_MS)).lease, began_at_ms=began_at_ms)
    assert again.answered_at_ms > held.began_at_ms + held.validity_ms
    history.check()
    greatest = max(grant.token for grant in history.grants if grant.answered_at_ms < held.answered_at_ms + 1)
    least = min(grant.token for grant in history.grants if grant.answered_at_ms > held.answered_at_ms + 1)
    assert max(greatest, began_us + 2**20) < least < began_us + 60_000_000


async def test_a_server_that_remembers_what_all_nodes_have_forgotten_lets_them_in_again(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """Two nodes had come back before; when all are wiped, only this server knows their floors."""
    nodes = await flushed_nodes(3)
    server, history = await served(nodes, serve)
    for node in nodes[:2]:
        await forget([node])
        await go_on(server, history)
    await forget(nodes)
    await recover(commands, nodes, "--yes").ended()
    await go_on(server, history)


async def test_a_cluster_that_no_node_remembers_begins_anew_above_everything(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """It takes a new id and needs a greatest ttl; the command says that servers must be restarted."""
    nodes = await flushed_nodes(3)
    told = await recover(commands, nodes, "--yes").ended(status=2)
    assert "max_ttl: no node remembers the cluster's greatest ttl" in told
    assert await memories(nodes) == [{}, {}, {}]
    began_us = time.time_ns() // 1000
    told = await recover(commands, nodes, "--max-ttl", "1s", "--yes").ended()
    found = re.search(r"it becomes ([0-9a-f]{32}), and every lock server must be restarted", told)
    assert found
    server = await serve(nodes)
    await all_in(server)
    status = await server.status()
    assert (status.cluster_id, status.max_ttl.ToMilliseconds()) == (found[1], 1_000)
    assert (await server.acquire("new", ttl_ms=TTL_MS)).lease.fencing_token > began_us + 2**20


async def test_a_node_that_was_away_during_a_recovery_comes_back_by_a_replacement(
    commands: CommandProcesses, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """It has its data and does not know of the recovery; a server names it and says what to do."""
    nodes = await fresh_nodes(3)
    server, history = await served(nodes, serve)
    nodes[2].kill()
    await all_in(server, lock_pb2.NODE_STATE_UNREACHABLE)
    await forget(nodes[:2])
    told = await recover(commands, nodes, "--yes").ended()
    assert f"node 2 (127.0.0.1:{nodes[2].port}) cannot be reached: it will not vote when it is back" in told
    assert "`redfence cluster replace 2 URL`" in told
    # One votes of three, and this one would make two.
    assert "comes back and has forgotten nothing, none of this is needed" not in told
    await all_in(server, lock_pb2.NODE_STATE_UNREACHABLE)
    await nodes[2].start()
    await go_on(server, history, lock_pb2.NODE_STATE_QUARANTINED)
    await server.until_detail(2, "`redfence cluster replace 2 URL`")
    # It keeps no server from starting, for the others are a quorum.
    async with serving(nodes) as another:
        await all_in(another, lock_pb2.NODE_STATE_QUARANTINED)
        await another.until_detail(2, "was given its index since")
    replace = commands.start_redfence("cluster", "replace", "2", *node_flags(nodes))
    assert "node 2" in await replace.ended()
    await all_in(server)
    await nodes[0].restart()
    await grant_some(server, history)
    history.check()


# --- what it refuses ------------------------------------------------------------------------------


async def test_nodes_that_need_no_recovery_or_cannot_have_one_are_named_and_not_changed(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """A quorum votes, or too few nodes can be reached."""
    nodes = await flushed_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    before = await memories(nodes)
    away: list[RedisNode | str] = [nodes[0], NOWHERE, "redis://127.0.0.1:2"]
    cases = [
        (recover(commands, nodes, "--yes"), f"a quorum votes (node 0 (127.0.0.1:{nodes[0].port}), node 1"),
        (recover(commands, away, "--yes"), "fewer than a quorum of 2 nodes can be reached: node 1 ("),
        (recover(commands, nodes[:2], "--yes"), "2 nodes are configured"),
        *((recover(commands, nodes, floor=floor), "argument --floor") for floor in ("-1", "soon", "1e9")),
    ]
    for process, told in cases:
        assert told in await process.ended(status=2)
    assert await memories(nodes) == before


async def test_a_recovery_that_the_start_of_a_node_would_spare_says_so(
    commands: CommandProcesses, fresh_nodes: FreshNodes
) -> None:
    """Two of three restarted and forgot nothing; they wait for the third, which is only down."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    for node in nodes[:2]:
        await node.restart()
    nodes[2].kill()
    told = await recover(commands, nodes).ended(status=2)
    assert "if what cannot be reached comes back and has forgotten nothing, none of this is needed" in told


# --- broken off -----------------------------------------------------------------------------------


async def test_ctrl_c_tells_that_the_nodes_are_out_and_that_it_has_to_be_repeated(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    nodes = await flushed_nodes(3)
    process = recover(commands, nodes, "--max-ttl", "1h", "--yes")
    await process.wait_for_line(r"^taken out; waiting 3636\.0 s")
    assert await process.stop(number=signal.SIGINT) == 130
    out = "nodes that it has taken out stay out until it is carried out to the end; repeat it"
    assert process.stderr == f"redfence cluster recover: broken off: {out}\n"
    assert await node_phases(nodes) == OUT


async def test_a_node_that_dies_between_the_passes_is_brought_back_by_a_server(
    commands: CommandProcesses, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The others begin, and vote for it. Repeating the command finds nothing to recover."""
    nodes = await fresh_nodes(3)
    server, history = await served(nodes, serve, ttl_ms_max=LONG_TTL_MS)
    await forget(nodes[:2])
    process = recover(commands, nodes, "--yes")
    await process.wait_for_line(WAITING)
    nodes[2].kill()
    told = await process.ended(status=1)
    assert f"node 2 (127.0.0.1:{nodes[2].port}) is still out: " in told
    await go_on(server, history, lock_pb2.NODE_STATE_UNREACHABLE)
    await nodes[2].start()
    assert "nothing to recover: a quorum votes" in await recover(commands, nodes).ended(status=2)
    await all_in(server)
    await nodes[0].restart()
    await grant_some(server, history)
    history.check()


async def test_grants_until_the_nodes_were_taken_out_are_below_the_floor_as_well(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, start_proxy: StartProxy
) -> None:
    """The operator cannot reach one node of a cluster that goes on, and grants overtake the floor."""
    nodes, history = await flushed_nodes(3), TokenHistory()
    await form(nodes, ttl_ms_max=TTL_MS)
    # Idle counters start again at `high`, so it must not be lowered either.
    server = await serve(nodes, proxied=True, counter_idle_ms=TTL_MS)
    await go_on(server, history)
    await forget(nodes[1:2])
    # Or it would bring the node back, sooner or later than the operator looks.
    server.proxies[1].refuse()
    proxy = await start_proxy(nodes[0])
    known = await nodes[0].call("GET", "redfence:high")
    assert isinstance(known, bytes)
    taking_out = proxy.hold_before(b"-- quarantine: ")
    through = [proxy.url(nodes[0].url), nodes[1].url, NOWHERE]
    process = recover(commands, through, "--yes", floor=str(int(known) + 1))
    await all_set(taking_out)
    await grant_some(server, history, count=8)
    await proxy.heal()
    last = max(grant.token for grant in history.grants)
    assert f"tokens go on above {last + 1};" in await process.ended()
    await server.proxies[1].heal()
    await all_in(server, lock_pb2.NODE_STATE_QUARANTINED)

    async def idle() -> bool:
        return not any([await node.call("EXISTS", *COUNTERS) for node in nodes[:2]])

    await until(idle, timeout_s=20)
    await grant_some(server, history, count=2)
    history.check()


async def test_a_recovery_broken_off_at_each_step_is_finished_by_the_same_command(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, start_proxy: StartProxy
) -> None:
    """Each run is killed one step later than the run before, and nothing is granted.

    The same floor is accepted again, and tokens go on right above it; a lower floor is refused.
    """
    nodes = await flushed_nodes(3)
    server, history = await served(nodes, serve)
    await forget(nodes[1:])
    known = max(grant.token for grant in history.grants)
    told = await recover(commands, nodes, "--yes", floor=str(known)).ended(status=2)
    assert f"floor: {known} is not above {known}" in told
    assert f"give {known + 1} at the least" in told

    async def told_to_repeat() -> bool:
        details = [node.detail for node in (await server.status()).nodes]
        return all("run `redfence cluster recover`" in detail for detail in details)

    for step in ("quarantine", "reserve_floor", "restore_vote"):
        proxies = [await start_proxy(node) for node in nodes]
        mark = f"-- {step}: ".encode()
        steps = [proxies[0].hold_after(mark), *(proxy.hold_before(mark) for proxy in proxies[1:])]
        urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]
        process = recover(commands, urls, "--yes", floor=str(known + 10))
        await all_set(*steps)
        process.kill()
        await nothing_is_granted(server)
        if step == "reserve_floor":
            assert await node_phases(nodes) == OUT
            await until(told_to_repeat)
            with pytest.raises(StartupError, match="no quorum of nodes is ready"):
                async with serving(nodes, start_timeout_ms=500):
                    pass
    assert await node_phases(nodes) == [b"ready", b"quarantined", b"quarantined"]
    await recover(commands, nodes, "--yes", floor=str(known + 10)).ended()
    await all_in(server)
    # The node that votes already has minted for callers that were refused.
    assert known + 10 < (await server.acquire("new", ttl_ms=TTL_MS)).lease.fencing_token < known + 20
    await go_on(server, history)


async def test_an_operator_who_is_overtaken_between_take_out_and_floor_stops(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, start_proxy: StartProxy
) -> None:
    """It reserves nothing in the quarantines of the later operator, who finishes the recovery."""
    nodes = await flushed_nodes(3)
    proxies = [await start_proxy(node) for node in nodes]
    taken_out = [proxy.hold_after(b"-- quarantine: ") for proxy in proxies]
    urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]
    flags = ("--max-ttl", "3s", "--yes")
    first = recover(commands, urls, *flags, "--dial-timeout-ms", "60000")
    await all_set(*taken_out)
    second = recover(commands, nodes, *flags)
    await second.wait_for_line(WAITING)
    for proxy in proxies:
        await proxy.heal()
    told = await first.ended(status=2)
    assert "a server or another operator changed it after it was taken out" in told
    await second.ended()
    assert await node_phases(nodes) == [b"ready"] * 3
