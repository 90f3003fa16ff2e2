"""Notices and timers that wake waiters, over real nodes."""

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
    until_all_ready,
    until_idle,
)
from harness.time.loop_lag import LoopLag
from redfence_proto.v1.lock_pb2 import RELEASE_OUTCOME_RELEASED

NAME = "orders/42"
# So long after the end of a hold the next waiter has the lock, unless the servers stalled.
LATE_MS_MAX = 300
# The SDK renews these leases until it is killed.
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
    """Serve twice over the same nodes. Every node votes, and no heartbeat comes between."""
    here, elsewhere = [await serve(nodes, heartbeat_interval_ms=60_000) for _ in range(2)]
    await until_all_ready(here, elsewhere)
    return here, elsewhere


def difference(after: list[int], before: list[int]) -> list[int]:
    """Return by how much each node's count has grown."""
    return [new - old for new, old in zip(after, before, strict=True)]


@pytest.mark.parametrize("count", [1, 3])
async def test_a_release_wakes_a_waiter_elsewhere_by_one_notice_and_one_mint_a_node(
    count: int, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The lease would last for a minute, so only the notice explains the grant."""
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


async def test_waiters_do_not_poll_while_one_node_lacks_the_hold(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Each try is granted there and undone. The notice of that undo is none that the lock may be free."""
    nodes = await formed_nodes(3)
    server = await serve(nodes, heartbeat_interval_ms=60_000)
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    await server.until_carried_out()
    assert await nodes[2].call("DEL", f"redfence:lock:{NAME}") == 1
    first, _ = await line_up(server, NAME, 2)
    await until_idle(nodes)
    assert await server.release(NAME, held.lease_id) == RELEASE_OUTCOME_RELEASED
    assert (await first.lease()).fencing_token > held.fencing_token


async def silence_notices(nodes: Sequence[RedisNode]) -> None:
    """Take the right to publish from the scripts. Releases go on."""
    for node in nodes:
        assert await node.call("ACL", "SETUSER", "default", "-publish") == b"OK"


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
    """Waiters at both servers are woken by the timer."""
    nodes = await fresh_formed_nodes(3)
    here, elsewhere = await two_servers(nodes, serve)
    if notices == "no notices":
        await silence_notices(nodes)
    ttl_ms, names = 1_000, [f"orders/{number}" for number in range(16)]
    process = commands.start(sys.executable, "-c", _HOLDER, here.target, str(ttl_ms / 1000), *names)
    await process.wait_for_line("^holding$")
    async with LoopLag() as loop, AsyncExitStack() as stack:
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
    assert max(late_ms) <= LATE_MS_MAX


async def test_a_waiter_elsewhere_is_served_in_time_when_a_hand_over_shortens_the_hold(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The waiter knew the end of the longer lease. The holder of the shorter one has died."""
    nodes = await formed_nodes(3)
    here, elsewhere = await serve(nodes), await serve(nodes)
    held = (await here.acquire(NAME, ttl_ms=TTL_MS)).lease
    [mortal] = await line_up(here, NAME, 1, ttl_ms=300)
    [waiter] = await line_up(elsewhere, NAME, 1, wait_ms=5_000)
    await here.release(NAME, held.lease_id)
    await mortal.lease()
    async with LoopLag() as loop:
        await waiter.lease()
        cost_ms = loop.cost_ms(since_ms=mortal.answered_at_ms)
    assert waiter.answered_at_ms - mortal.answered_at_ms - cost_ms <= 300 + LATE_MS_MAX
