"""What wakes a waiter, what waiting costs the nodes, and how late it is served when notices are lost: over real nodes, by counts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from harness.load.session_caller import SessionCaller
from harness.load.waiters import TTL_MS, Waiter, line_up
from harness.processes.commands import CommandProcesses
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    call_counts,
    now_ms,
    until,
    until_idle,
    until_no_locks,
)
from harness.time.eventually import eventually
from harness.time.loop_lag import LateLoop
from redfence_proto.v1.lock_pb2 import LEASE_STATE_ACTIVE, NODE_STATE_READY, RELEASE_OUTCOME_RELEASED

NAME = "orders/42"
# The bound: how long after the end of a hold its next holder has the lock at the latest, unless the servers stood still.
LATE_MS_MAX = 300
# For how long a test looks whether nothing happens.
QUIET_S = 0.5
# Holds locks by the SDK, which keeps them alive, until it is killed.
_HOLDER = """
import contextlib, sys, threading, redfence
with contextlib.ExitStack() as stack:
    client = stack.enter_context(redfence.Client(sys.argv[1]))
    for name in sys.argv[3:]:
        stack.enter_context(client.lock(name, ttl=float(sys.argv[2])))
    print("holding", flush=True)
    threading.Event().wait()
"""


async def two_servers(nodes: Sequence[RedisNode], serve: Serve) -> tuple[LockServer, LockServer]:
    """Serve twice over the same nodes, the second one through proxies; every node votes, and no heartbeat comes between."""
    here = await serve(nodes, heartbeat_interval_ms=60_000)
    elsewhere = await serve(nodes, proxied=True, heartbeat_interval_ms=60_000)
    for server in (here, elsewhere):
        await server.until_states(*[NODE_STATE_READY] * len(nodes))
    return here, elsewhere


def difference(after: list[int], before: list[int]) -> list[int]:
    """Return by how much each node's count has grown."""
    return [new - old for new, old in zip(after, before, strict=True)]


def traffic(server: LockServer) -> list[int]:
    """Return how many bytes each node and this server have told each other."""
    return [
        direction.taken_bytes for proxy in server.proxies for direction in (proxy.requests, proxy.replies)
    ]


# --- notices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 5])
async def test_a_release_wakes_a_waiter_at_another_server_by_one_notice_and_one_mint_on_each_node(
    count: int, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The lease would last for a minute, so nothing else explains the grant."""
    nodes = await formed_nodes(count)
    here, elsewhere = await two_servers(nodes, serve)
    held = (await here.acquire(NAME, ttl_ms=TTL_MS)).lease
    [waiter] = await line_up(elsewhere, NAME, 1)
    await until_idle(nodes)
    evalsha, publish = await call_counts(nodes, "evalsha"), await call_counts(nodes, "publish")
    assert await here.release(NAME, held.lease_id) == RELEASE_OUTCOME_RELEASED
    assert (await waiter.lease()).fencing_token == held.fencing_token + 1

    async def all_done() -> bool:
        # A slow node may carry out the mint after the grant.
        return difference(await call_counts(nodes, "evalsha"), evalsha) == [2] * count

    await until(all_done)
    assert difference(await call_counts(nodes, "publish"), publish) == [1] * count


@pytest.mark.slow
async def test_only_the_head_of_fifty_waiters_is_woken(formed_nodes: FormedNodes, serve: Serve) -> None:
    """One release through another server: one mint for the head and one at most to find out about the next end."""
    nodes = await formed_nodes(3)
    here, elsewhere = await two_servers(nodes, serve)
    held = (await here.acquire(NAME, ttl_ms=TTL_MS)).lease
    async with SessionCaller(elsewhere) as session:
        waiters = await line_up(elsewhere, NAME, 50, session=session)
        await until_idle(nodes)
        before = await call_counts(nodes, "evalsha")
        await here.release(NAME, held.lease_id)
        await waiters[0].lease()
        await asyncio.sleep(QUIET_S)
        scripts = difference(await call_counts(nodes, "evalsha"), before)
        assert max(scripts) <= 1 + 2, scripts
        assert (await elsewhere.look(NAME)).waiters == 49
        assert not any(waiter.done for waiter in waiters[1:])


async def test_a_waiter_that_comes_after_a_grant_is_woken_by_the_release_elsewhere_of_what_was_granted_here(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Its server granted the hold itself and alone, without asking for a notice: it asks when somebody comes to wait."""
    nodes = await formed_nodes(3)
    here, elsewhere = await two_servers(nodes, serve)
    first = await Waiter(elsewhere, NAME).lease()
    [second] = await line_up(elsewhere, NAME, 1)
    await here.release(NAME, first.lease_id)
    second_lease = await second.lease()
    [third, fourth] = await line_up(elsewhere, NAME, 2)
    await here.release(NAME, second_lease.lease_id)
    third_lease = await third.lease()
    await here.release(NAME, third_lease.lease_id)
    assert (await fourth.lease()).fencing_token > third_lease.fencing_token


async def test_waiters_at_three_servers_are_served_in_turn_however_the_lock_is_released(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Whoever loses the race for a freed lock is woken by the next release, wherever that comes."""
    nodes = await formed_nodes(3)
    servers = [await serve(nodes) for _ in range(3)]
    held = (await servers[0].acquire(NAME, ttl_ms=TTL_MS)).lease
    waiting = [waiter for server in servers for waiter in await line_up(server, NAME, 4)]
    tokens = [held.fencing_token]
    await servers[1].release(NAME, held.lease_id)
    for turn in range(12):
        await eventually(lambda: any(waiter.done for waiter in waiting), interval_s=0.001)
        [granted] = [waiter for waiter in waiting if waiter.done]
        tokens.append((await granted.lease()).fencing_token)
        waiting.remove(granted)
        assert await servers[turn % 3].release(NAME, granted.lease_id) == RELEASE_OUTCOME_RELEASED
    assert tokens == sorted(set(tokens))
    await until_no_locks(nodes)


# --- what waiting costs -----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_waiters_of_held_locks_cost_the_nodes_nothing(formed_nodes: FormedNodes, serve: Serve) -> None:
    """While nothing happens, not a byte passes between their server and the nodes."""
    nodes = await formed_nodes(3)
    here, elsewhere = await two_servers(nodes, serve)
    for number in range(20):
        await here.acquire(f"orders/{number}", ttl_ms=TTL_MS)
    async with SessionCaller(elsewhere) as session:
        for number in range(20):
            await line_up(elsewhere, f"orders/{number}", 3, session=session)
        await until_idle(nodes)
        before, commands = traffic(elsewhere), await call_counts(nodes, "evalsha")
        await asyncio.sleep(2 * QUIET_S)
        assert traffic(elsewhere) == before
        assert await call_counts(nodes, "evalsha") == commands


@pytest.mark.slow
async def test_a_server_hears_of_no_release_of_what_nobody_waits_for_there(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Not of locks that others wait for at another server, nor of any while somebody waits here for something else."""
    nodes = await formed_nodes(3)
    here, elsewhere = await two_servers(nodes, serve)
    another = await serve(nodes, heartbeat_interval_ms=60_000)
    await here.acquire("other", ttl_ms=TTL_MS)
    await line_up(elsewhere, "other", 1)
    await until_idle(nodes)
    before = traffic(elsewhere)
    published = await call_counts(nodes, "publish")
    for _ in range(20):
        lease = (await here.acquire(NAME, ttl_ms=TTL_MS)).lease
        await here.release(NAME, lease.lease_id)
    # Nobody waits for it anywhere: nothing is published at all.
    assert await call_counts(nodes, "publish") == published
    for _ in range(20):
        lease = (await here.acquire(NAME, ttl_ms=TTL_MS)).lease
        [waiter] = await line_up(another, NAME, 1)
        await here.release(NAME, lease.lease_id)
        await waiter.lease()
        await here.release(NAME, waiter.lease_id)
    assert sum(difference(await call_counts(nodes, "publish"), published)) >= 20
    assert traffic(elsewhere) == before


@pytest.mark.slow
async def test_a_waiter_behind_a_lease_that_is_kept_alive_asks_once_for_each_time_that_was_left(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """No more often than the lease is renewed, whatever the number of waiters."""
    nodes = await formed_nodes(3)
    here, elsewhere = await two_servers(nodes, serve)
    # Long enough to live from one renewal to the next on a machine that stands still for a while.
    held = (await here.acquire(NAME, ttl_ms=1_500)).lease
    async with SessionCaller(here) as holder, SessionCaller(elsewhere) as session:
        await line_up(elsewhere, NAME, 20, session=session)
        before = await call_counts(nodes, "evalsha")
        renewals = 0
        while renewals < 12:
            renewed = (await holder.renew(NAME, held.lease_id)).renew
            assert renewed.state == LEASE_STATE_ACTIVE
            renewals += 1
            await asyncio.sleep(0.3)
        scripts = difference(await call_counts(nodes, "evalsha"), before)
        tries = [count - renewals for count in scripts]
        assert 1 <= min(tries) <= max(tries) <= renewals + 1, tries
        assert (await elsewhere.look(NAME)).waiters == 20


# --- without notices --------------------------------------------------------------------------------------------------


async def silence_notices(nodes: Sequence[RedisNode]) -> None:
    """Take the right to publish from the scripts; releases go on."""
    for node in nodes:
        assert await node.call("ACL", "SETUSER", "default", "-publish") == b"OK"


def report(title: str, late_ms: Sequence[float]) -> None:
    """Print how late the lock was had, for a reader with -s."""
    ordered = sorted(late_ms)
    print(
        f"\n{title}: {ordered[0]:.0f} to {ordered[-1]:.0f} ms, {ordered[len(ordered) // 2]:.0f} in the middle"
    )


@pytest.mark.slow
async def test_without_notices_a_waiter_elsewhere_has_a_released_lock_by_the_end_of_its_ttl(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A lost notice costs no more than the rest of the holder's ttl, and 300 ms."""
    nodes = await fresh_formed_nodes(3)
    here, elsewhere = await two_servers(nodes, serve)
    await silence_notices(nodes)
    ttl_ms = 2_000
    late_ms: list[float] = []
    published = await call_counts(nodes, "publish")

    async def hold_and_release(name: str) -> None:
        lease = (await here.acquire(name, ttl_ms=ttl_ms)).lease
        granted_at_ms = now_ms()
        [waiter] = await line_up(elsewhere, name, 1)
        await here.release(name, lease.lease_id)
        assert not waiter.done, "it was woken"
        assert (await waiter.lease()).fencing_token > lease.fencing_token
        cost_ms = loop.cost_ms(since_ms=granted_at_ms)
        late_ms.append(waiter.answered_at_ms - granted_at_ms - ttl_ms - cost_ms)

    async with LateLoop() as loop:
        for turn in range(2):
            await asyncio.gather(*(hold_and_release(f"orders/{turn}/{number}") for number in range(8)))
    report("late after a release without notices", late_ms)
    assert await call_counts(nodes, "publish") == published, "there were notices"
    assert max(late_ms) <= LATE_MS_MAX


@pytest.mark.slow
@pytest.mark.parametrize("notices", ["notices", "no notices"])
@pytest.mark.parametrize("nodes_left", ["all nodes", "one node frozen"])
async def test_the_lock_of_a_holder_that_is_killed_is_the_next_waiters_by_ttl_and_300_ms(
    nodes_left: str,
    notices: str,
    commands: CommandProcesses,
    fresh_formed_nodes: FormedNodes,
    serve: Serve,
) -> None:
    """A process that keeps its leases alive is killed -9: those who wait, here and elsewhere, are woken by the timer."""
    nodes = await fresh_formed_nodes(3)
    here, elsewhere = await two_servers(nodes, serve)
    if notices == "no notices":
        await silence_notices(nodes)
    ttl_ms, names = 1_000, [f"orders/{number}" for number in range(16)]
    process = commands.start(sys.executable, "-c", _HOLDER, here.target, str(ttl_ms / 1000), *names)
    await process.wait_for_line("^holding$")
    async with LateLoop() as loop, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(SessionCaller(server)) for server in (here, elsewhere)]
        waiters: list[Waiter] = []
        for number, name in enumerate(names):
            server = (here, elsewhere)[number % 2]
            waiters += await line_up(server, name, 1, session=sessions[number % 2])
        process.kill()
        killed_at_ms = now_ms()
        if nodes_left == "one node frozen":
            nodes[1].pause()
        await asyncio.gather(*(waiter.lease() for waiter in waiters))
        cost_ms = loop.cost_ms(since_ms=killed_at_ms)
        late_ms = [waiter.answered_at_ms - killed_at_ms - ttl_ms - cost_ms for waiter in waiters]
    if nodes_left == "one node frozen":
        nodes[1].resume()
    report(f"late after a kill -9, {notices}, {nodes_left}", late_ms)
    assert max(late_ms) <= LATE_MS_MAX


@pytest.mark.slow
async def test_a_frozen_node_and_two_that_end_a_hold_some_ms_apart_cost_no_node_timeout(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A try in between would be granted by one, refused by the other, and wait for the third until its timeout."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes)
    await server.until_states(*[NODE_STATE_READY] * 3)
    await server.acquire(NAME, ttl_ms=1_000)
    for node, left_ms in zip(nodes, (1_000, 1_000, 1_020), strict=True):
        await node.call("PEXPIRE", f"redfence:lock:{NAME}", left_ms)
    ends_at_ms = now_ms() + 1_020
    async with LateLoop() as loop:
        [waiter] = await line_up(server, NAME, 1)
        nodes[1].pause()
        await waiter.lease()
        nodes[1].resume()
        late_ms = waiter.answered_at_ms - ends_at_ms - loop.cost_ms(since_ms=ends_at_ms - 1_020)
    assert late_ms <= LATE_MS_MAX


async def test_a_waiter_elsewhere_is_served_in_time_when_a_lock_was_handed_over_to_a_lease_that_ends_sooner(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """What it knew was the end of the longer lease before; the one who had the lock after it has died."""
    nodes = await formed_nodes(3)
    here, elsewhere = await serve(nodes), await serve(nodes)
    held = (await here.acquire(NAME, ttl_ms=TTL_MS)).lease
    [mortal] = await line_up(here, NAME, 1, ttl_ms=300)
    [waiter] = await line_up(elsewhere, NAME, 1, wait_ms=5_000)
    await here.release(NAME, held.lease_id)
    await mortal.lease()
    async with LateLoop() as loop:
        await waiter.lease()
        cost_ms = loop.cost_ms(since_ms=mortal.answered_at_ms)
    assert waiter.answered_at_ms - mortal.answered_at_ms - cost_ms <= 300 + LATE_MS_MAX
