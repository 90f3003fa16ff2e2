"""`redfence cluster recover` on real nodes: what it does when more than a minority have forgotten, and what it leaves alone."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Sequence

import pytest

from harness.history.token_history import TokenHistory
from harness.load.failures import failure_of
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import (
    LockServer,
    Serve,
    form,
    memories,
    new_lease_id,
    now_ms,
    serving,
    until,
)
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ERROR_REASON_QUORUM_UNAVAILABLE,
    NODE_STATE_QUARANTINED,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
)
from redfence_server.errors import StartupError
from redfence_server.membership.fence import wait_ms

pytestmark = pytest.mark.slow

TTL_MS = 1_000
NAMES = ("orders/42", "orders/43")
IDENTITY = "redfence:node"
COUNTERS = [f"redfence:counter:{name}" for name in NAMES]
NOWHERE = "redis://127.0.0.1:1"
# Where a test steps in between the two passes: so long they are apart.
LONG_TTL_MS = 3_000
WAITING = r"^taken out; waiting 3\.0 s"


def recover(
    commands: CommandProcesses, nodes: Sequence[RedisNode | str], *flags: str, floor: str = "auto"
) -> CommandProcess:
    """Start the command."""
    urls = [node if isinstance(node, str) else node.url for node in nodes]
    named = [flag for url in urls for flag in ("--node", url)]
    # No node of these tests is silent for good: those that are away refuse.
    patience = ("--dial-timeout-ms", "5000")
    return commands.start_redfence("cluster", "recover", *named, *patience, "--floor", floor, *flags)


async def ended(process: CommandProcess, *, status: int) -> str:
    """Return what it wrote, once it has ended with this status."""
    assert await process.wait(timeout_s=30) == status, process.stdout + process.stderr
    assert "Traceback" not in process.stderr
    return process.stdout + process.stderr


async def states(nodes: Sequence[RedisNode]) -> list[bytes | None]:
    """Return the states that the nodes say they are in."""
    told = [await node.call("HGET", IDENTITY, "state") for node in nodes]
    return [each if isinstance(each, bytes) else None for each in told]


async def grant_some(server: LockServer, history: TokenHistory, *, count: int = 5) -> None:
    """Acquire and release in turn, and write down what was granted."""
    for turn in range(count):
        name, began_at_ms = NAMES[turn % len(NAMES)], now_ms()
        response = await server.acquire(name, ttl_ms=TTL_MS, lease_id=new_lease_id(), wait_ms=2 * TTL_MS)
        assert response.outcome == ACQUIRE_OUTCOME_GRANTED
        history.note(response.lease, began_at_ms=began_at_ms)
        await server.release(name, response.lease.lease_id)


async def nothing_is_granted(server: LockServer) -> None:
    """Check that whoever asks is told that there is no quorum, and does not wait out its time."""
    for name in NAMES:
        failure = await failure_of(server.acquire(name, ttl_ms=TTL_MS, wait_ms=5_000))
        assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE


async def all_in(server: LockServer, *others: lock_pb2.NodeState.ValueType) -> None:
    """Return once every node is ready but the last ones, which are in the states given; a quarantine may lie between."""
    expected = [*[NODE_STATE_READY] * (len(server.nodes) - len(others)), *others]

    async def reached() -> bool:
        return [node.state for node in (await server.status()).nodes] == expected

    await until(reached, timeout_s=20)


async def forget(server: LockServer, nodes: Sequence[RedisNode]) -> None:
    """Wipe nodes, and return once the server knows."""
    for node in nodes:
        await node.call("FLUSHALL")
    await until_noticed(nodes)


async def until_noticed(nodes: Sequence[RedisNode]) -> None:
    """Return once a server has put it down on these nodes, which were wiped; those that can come back by themselves may have done so."""

    async def noticed() -> bool:
        return None not in await states(nodes)

    await until(noticed)


# --- the way it is meant ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 5])
async def test_after_a_majority_forgot_nothing_is_granted_until_a_recovery(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, count: int
) -> None:
    """A server runs all the while. What was granted before has ended when it grants again; without --yes nothing is done."""
    nodes, history = await flushed_nodes(count), TokenHistory()
    cluster_id = await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes)
    await all_in(server)
    await grant_some(server, history)
    began_at_ms = now_ms()
    held = history.note((await server.acquire("held", ttl_ms=TTL_MS)).lease, began_at_ms=began_at_ms)
    await forget(server, nodes[: count // 2 + 1])
    await nothing_is_granted(server)
    before = await memories(nodes)
    told = await ended(recover(commands, nodes), status=2)
    assert f"cluster {cluster_id}: {count - count // 2 - 1} of {count} nodes can vote" in told
    assert "nothing was changed; add --yes" in told
    assert set(before[0]) == {IDENTITY.encode()}
    assert (await memories(nodes))[0] == before[0]

    began_us = time.time_ns() // 1000
    process = recover(commands, nodes, "--yes")
    not_out_at_ms = now_ms()

    async def out() -> bool:
        nonlocal not_out_at_ms
        asked_at_ms = now_ms()
        if await states(nodes) == [b"quarantined"] * count:
            return True
        not_out_at_ms = asked_at_ms
        return False

    await until(out, timeout_s=20)
    await nothing_is_granted(server)
    await ended(process, status=0)
    # Whatever was granted before the last of them was taken out has ended.
    assert now_ms() - not_out_at_ms >= wait_ms(TTL_MS)
    await all_in(server)
    await grant_some(server, history)
    began_at_ms = now_ms()
    again = history.note((await server.acquire("held", ttl_ms=TTL_MS)).lease, began_at_ms=began_at_ms)
    assert again.answered_at_ms > held.began_at_ms + held.validity_ms
    history.check()
    greatest = max(grant.token for grant in history.grants if grant.answered_at_ms < held.answered_at_ms + 1)
    least = min(grant.token for grant in history.grants if grant.answered_at_ms > held.answered_at_ms + 1)
    assert least > max(greatest, began_us + 2**20)
    assert least < began_us + 60_000_000


async def test_tokens_go_on_right_above_a_floor_that_is_given(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """One that is not above what can still be read is refused, and the least is told."""
    nodes = await flushed_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes)
    await all_in(server)
    await forget(server, nodes[:1])
    await all_in(server)  # it has rejoined, which leaves a floor
    numbers = [await node.call("GET", "redfence:high") for node in nodes]
    known = max(int(each) for each in numbers if isinstance(each, bytes))
    assert known >= 2**20
    await forget(server, nodes[1:])
    before = await memories(nodes[1:])
    for floor in ("0", str(known)):
        told = await ended(recover(commands, nodes, "--yes", floor=floor), status=2)
        assert f"floor: {floor} is not above {known}" in told
        assert f"give {known + 1} at the least" in told
    assert await memories(nodes[1:]) == before
    await ended(recover(commands, nodes, "--yes", floor=str(known + 1)), status=0)
    await all_in(server)
    assert (await server.acquire("new", ttl_ms=TTL_MS)).lease.fencing_token == known + 2


async def test_a_server_that_remembers_what_all_nodes_have_forgotten_lets_them_in_again(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """Two nodes had come back before, each with a floor that only this server still knows of when all are wiped."""
    nodes, history = await flushed_nodes(3), TokenHistory()
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes)
    await all_in(server)
    for node in nodes[:2]:
        await forget(server, [node])
        await all_in(server)
    await grant_some(server, history)
    await forget(server, nodes)
    await ended(recover(commands, nodes, "--yes"), status=0)
    await all_in(server)
    await grant_some(server, history)
    history.check()


async def test_a_cluster_that_no_node_remembers_begins_anew_above_everything(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """It takes a new id, and needs to be told the greatest ttl; the servers have to be restarted, which is said."""
    nodes = await flushed_nodes(3)
    told = await ended(recover(commands, nodes, "--yes"), status=2)
    assert "max_ttl: no node remembers the cluster's greatest ttl" in told
    assert await memories(nodes) == [{}, {}, {}]
    began_us = time.time_ns() // 1000
    told = await ended(recover(commands, nodes, "--max-ttl", "1s", "--yes"), status=0)
    found = re.search(r"it becomes ([0-9a-f]{32}), and every lock server must be restarted", told)
    assert found
    server = await serve(nodes)
    await all_in(server)
    status = await server.status()
    assert (status.cluster_id, status.max_ttl.ToMilliseconds()) == (found[1], 1_000)
    assert (await server.acquire("new", ttl_ms=TTL_MS)).lease.fencing_token > began_us + 2**20
    told = await ended(recover(commands, nodes, "--yes"), status=2)
    assert "nothing to recover: a quorum votes" in told


async def test_a_node_that_was_away_during_a_recovery_comes_back_by_a_replacement(
    commands: CommandProcesses, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """It has its data and its proof of durability, and knows nothing of the recovery; a server names it and says what to do."""
    nodes, history = await fresh_nodes(3), TokenHistory()
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes)
    await all_in(server)
    await grant_some(server, history)
    nodes[2].kill()
    await all_in(server, NODE_STATE_UNREACHABLE)
    await forget(server, nodes[:2])
    told = await ended(recover(commands, nodes, "--yes"), status=0)
    assert f"node 2 (127.0.0.1:{nodes[2].port}) cannot be reached: it will not vote when it is back" in told
    assert "`redfence cluster replace 2 URL`" in told
    # One votes of three, and this one would make two.
    assert "comes back and has forgotten nothing, none of this is needed" not in told
    await all_in(server, NODE_STATE_UNREACHABLE)
    await nodes[2].start()
    await all_in(server, NODE_STATE_QUARANTINED)
    await server.until_detail(2, "`redfence cluster replace 2 URL`")
    await grant_some(server, history)
    # It keeps no server from starting, for the others are a quorum.
    async with serving(nodes) as another:
        await all_in(another, NODE_STATE_QUARANTINED)
        await another.until_detail(2, "was given its index since")
    urls = [flag for node in nodes for flag in ("--node", node.url)]
    process = commands.start_redfence("cluster", "replace", "2", *urls)
    assert "node 2" in await ended(process, status=0)
    await all_in(server)
    await nodes[0].restart()
    await grant_some(server, history)
    history.check()


# --- what it refuses ------------------------------------------------------------------------------------------------------


async def test_what_is_not_lost_or_not_there_is_not_recovered_and_nothing_is_changed(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """A quorum that votes, fewer than a quorum that can be reached, nodes of another cluster or order, replicas: each is named."""
    nodes = await flushed_nodes(6)
    mine, others = nodes[:3], nodes[3:]
    await form(mine, ttl_ms_max=TTL_MS)
    await form(others, ttl_ms_max=TTL_MS)
    before = await memories(nodes)
    nowhere = ["redis://127.0.0.1:1", "redis://127.0.0.1:2"]
    by_another_name = mine[0].url.replace("127.0.0.1", "localhost")
    cases: list[tuple[list[RedisNode | str], list[str]]] = [
        ([*mine], [f"nothing to recover: a quorum votes (node 0 (127.0.0.1:{mine[0].port}), node 1"]),
        (
            [mine[0], *nowhere],
            [
                "fewer than a quorum of 2 nodes can be reached: node 1 (127.0.0.1:1): ",
                "; node 2 (127.0.0.1:2)",
            ],
        ),
        ([*mine[:2], others[2]], [f"node 2 (127.0.0.1:{others[2].port}): it belongs to cluster "]),
        ([mine[1], mine[0], mine[2]], [f"node 0 (127.0.0.1:{mine[1].port}): it was formed as node 1"]),
        ([mine[0], by_another_name, mine[2]], ["node 1 (localhost:", "it is the same process as node 0"]),
        ([*mine[:2]], ["2 nodes are configured"]),
    ]
    started = [recover(commands, named, "--yes") for named, _ in cases]
    wrong = [recover(commands, mine, "--yes", floor=floor) for floor in ("-1", "soon", "1e9")]
    for process, (_, parts) in zip(started, cases, strict=True):
        told = await ended(process, status=2)
        assert all(part in told for part in parts), told
    for process in wrong:
        assert "argument --floor" in await ended(process, status=2)
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
    told = await ended(recover(commands, nodes), status=2)
    assert "if what cannot be reached comes back and has forgotten nothing, none of this is needed" in told


# --- broken off -----------------------------------------------------------------------------------------------------------


async def test_ctrl_c_tells_that_the_nodes_are_out(
    commands: CommandProcesses, flushed_nodes: FlushedNodes
) -> None:
    """And that it has to be repeated."""
    nodes = await flushed_nodes(3)
    process = recover(commands, nodes, "--max-ttl", "1h", "--yes")
    await process.wait_for_line(r"^taken out; waiting 3636\.0 s")
    assert await process.stop(number=signal.SIGINT) == 130
    assert process.stderr == (
        "redfence cluster recover: broken off: nodes that it has taken out stay out until it is carried out to the end; repeat it\n"
    )
    assert await states(nodes) == [b"quarantined"] * 3


async def test_a_node_that_dies_between_the_passes_is_brought_back_by_a_server(
    commands: CommandProcesses, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The others begin, and vote for it. Repeating the command finds nothing to recover."""
    nodes, history = await fresh_nodes(3), TokenHistory()
    await form(nodes, ttl_ms_max=LONG_TTL_MS)
    server = await serve(nodes)
    await all_in(server)
    await grant_some(server, history)
    await forget(server, nodes[:2])
    process = recover(commands, nodes, "--yes")
    await process.wait_for_line(WAITING)
    nodes[2].kill()
    told = await ended(process, status=1)
    assert f"node 2 (127.0.0.1:{nodes[2].port}) is still out: " in told
    await all_in(server, NODE_STATE_UNREACHABLE)
    await grant_some(server, history)
    await nodes[2].start()
    told = await ended(recover(commands, nodes), status=2)
    assert "nothing to recover: a quorum votes" in told
    await all_in(server)
    await nodes[0].restart()
    await grant_some(server, history)
    history.check()


async def test_with_fewer_than_a_quorum_left_after_the_wait_no_node_gets_its_vote_back(
    commands: CommandProcesses, fresh_nodes: FreshNodes
) -> None:
    """Two died between the passes: the third alone is of no use, and is left out with them until all is repeated."""
    nodes = await fresh_nodes(3)
    process = recover(commands, nodes, "--max-ttl", "3s", "--yes")
    await process.wait_for_line(WAITING)
    for node in nodes[1:]:
        node.kill()
    told = await ended(process, status=2)
    assert "fewer than a quorum of nodes is left: node 1 (" in told
    assert "broken off" in told
    assert await states(nodes[:1]) == [b"quarantined"]
    for node in nodes[1:]:
        await node.start()
    await ended(recover(commands, nodes, "--yes"), status=0)
    assert await states(nodes) == [b"ready"] * 3


async def test_of_two_operators_the_first_is_stopped_by_the_second(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve
) -> None:
    """The second has taken the nodes out under ids of its own; the first finds that out and gives no node its vote."""
    nodes, history = await flushed_nodes(3), TokenHistory()
    await form(nodes, ttl_ms_max=LONG_TTL_MS)
    server = await serve(nodes)
    await all_in(server)
    await grant_some(server, history)
    await forget(server, nodes[1:])
    first = recover(commands, nodes, "--yes")
    await first.wait_for_line(WAITING)
    first.send_signal(signal.SIGSTOP)
    second = recover(commands, nodes, "--yes")
    await second.wait_for_line(WAITING)
    first.send_signal(signal.SIGCONT)
    told = await ended(first, status=2)
    assert "a server or another operator changed it after it was taken out" in told
    assert "broken off" in told
    await ended(second, status=0)
    await all_in(server)
    await grant_some(server, history)
    history.check()


async def test_what_was_granted_until_the_nodes_were_taken_out_is_below_the_floor_as_well(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, start_proxy: StartProxy
) -> None:
    """An operator who cannot reach one node recovers a cluster that goes on; the floor that was asked for is overtaken meanwhile."""
    nodes = await flushed_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    # Idle counters start again at `high`, so it must not be lowered either.
    server = await serve(nodes, proxied=True, counter_idle_ms=TTL_MS)
    await all_in(server)
    history = TokenHistory()
    await grant_some(server, history)
    await forget(server, nodes[1:2])
    # Or it would bring the node back, sooner or later than the operator looks.
    server.proxies[1].refuse()
    proxy = await start_proxy(nodes[0])
    reached = [proxy.url(nodes[0].url), nodes[1].url, NOWHERE]
    known = await nodes[0].call("GET", "redfence:high")
    assert isinstance(known, bytes)
    taking_out = proxy.hold_before(b"-- quarantine: ")
    process = recover(commands, reached, "--yes", floor=str(int(known) + 1))
    async with asyncio.timeout(10):
        await taking_out.wait()
    await grant_some(server, history, count=8)
    await proxy.heal()
    last = max(grant.token for grant in history.grants)
    assert f"tokens go on above {last + 1};" in await ended(process, status=0)
    await server.proxies[1].heal()
    await all_in(server, NODE_STATE_QUARANTINED)

    async def idle() -> bool:
        return not any([await node.call("EXISTS", *COUNTERS) for node in nodes[:2]])

    await until(idle, timeout_s=20)
    await grant_some(server, history, count=2)
    history.check()


async def test_a_recovery_broken_off_at_each_step_is_finished_by_the_same_command(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, serve: Serve, start_proxy: StartProxy
) -> None:
    """Each run is killed one step later than the run before, and nothing is granted; also the same floor is accepted again."""
    nodes, history = await flushed_nodes(3), TokenHistory()
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes)
    await all_in(server)
    await grant_some(server, history)
    await forget(server, nodes[1:])
    floor = str(max(grant.token for grant in history.grants) + 10)

    async def told_to_repeat() -> bool:
        details = [node.detail for node in (await server.status()).nodes]
        return all("run `redfence cluster recover`" in detail for detail in details)

    for step in ("quarantine", "reserve_floor", "restore_vote"):
        proxies = [await start_proxy(node) for node in nodes]
        mark = f"-- {step}: ".encode()
        reached = [proxies[0].hold_after(mark), *(proxy.hold_before(mark) for proxy in proxies[1:])]
        urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]
        process = recover(commands, urls, "--yes", floor=floor)
        async with asyncio.timeout(30):
            await asyncio.gather(*(each.wait() for each in reached))
        process.kill()
        await nothing_is_granted(server)
        if step == "reserve_floor":
            assert await states(nodes) == [b"quarantined"] * 3
            await until(told_to_repeat)
            with pytest.raises(StartupError, match="no quorum of nodes is ready"):
                async with serving(nodes, start_timeout_ms=500):
                    pass
    assert await states(nodes) == [b"ready", b"quarantined", b"quarantined"]
    await ended(recover(commands, nodes, "--yes", floor=floor), status=0)
    await all_in(server)
    await grant_some(server, history)
    history.check()


async def test_an_operator_who_is_overtaken_between_take_out_and_floor_stops(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, start_proxy: StartProxy
) -> None:
    """It reserves nothing in the quarantines of the later operator, who carries the recovery out to the end."""
    nodes = await flushed_nodes(3)
    proxies = [await start_proxy(node) for node in nodes]
    taken_out = [proxy.hold_after(b"-- quarantine: ") for proxy in proxies]
    urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]
    flags = ("--max-ttl", "3s", "--yes")
    first = recover(commands, urls, *flags, "--dial-timeout-ms", "60000")
    async with asyncio.timeout(30):
        await asyncio.gather(*(each.wait() for each in taken_out))
    second = recover(commands, nodes, *flags)
    await second.wait_for_line(WAITING)
    for proxy in proxies:
        await proxy.heal()
    assert "a server or another operator changed it after it was taken out" in await ended(first, status=2)
    await ended(second, status=0)
    assert await states(nodes) == [b"ready"] * 3
