"""Wrong clocks of servers, clocks that a server does not know yet, and restarts of durable nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from harness.history.token_history import TokenHistory
from harness.load import tries
from harness.load.lock_load import LockLoad
from harness.load.tries import NAME
from harness.load.waiters import line_up
from harness.processes.fixture_types import FreshNodes, StartProxy
from harness.processes.servers import LockServer, Serve, form, now_ms, serving, until, until_all_ready
from harness.time.wrong_clock import WrongClock
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
)
from redfence_server import composition
from redfence_server.locking.quorum import DRIFT_FIXED_MS, DRIFT_RATIO

TTL_MS = 3_000  # the greatest that the cluster allows
DISTRUST_MS = TTL_MS * (1 + DRIFT_RATIO) + DRIFT_FIXED_MS
STEP_MS = 30_000
NODE_TIMEOUT_MS = 500
BACK_TIMEOUT_S = 10.0

pytestmark = pytest.mark.slow

try_acquire = partial(tries.try_acquire, ttl_ms=TTL_MS)


async def hold_once(server: LockServer, history: TokenHistory) -> None:
    """Acquire and release; fail unless the lock is granted at once."""
    began_at_ms = now_ms()
    answer = await server.acquire(NAME, ttl_ms=TTL_MS)
    assert answer.outcome == ACQUIRE_OUTCOME_GRANTED
    history.given_up(history.note(answer.lease, began_at_ms=began_at_ms))
    await server.release(NAME, answer.lease.lease_id)


@pytest.mark.parametrize("wrong", ["stands still for 100 ms", "1.5 % slow", "1.5 % fast"])
async def test_the_wrong_clock_of_one_server_stops_no_other_server(
    wrong: str, fresh_nodes: FreshNodes, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To that server all nodes seem to step. Running servers and a new one go on granting."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    clock = WrongClock()
    with monkeypatch.context() as patch:
        patch.setattr(composition, "SystemClock", lambda: clock)
        await until_all_ready(await serve(nodes))
    right, history = await serve(nodes), TokenHistory()
    await until_all_ready(right)
    await hold_once(right, history)
    if wrong.startswith("stands"):
        clock.stand_still(for_ms=100)
    else:
        clock.run_at(0.985 if wrong.endswith("slow") else 1.015)
    wrong_since_ms = now_ms()
    # The wrong server has time to notice and to note a step, and the right one to read the note.
    while now_ms() < wrong_since_ms + TTL_MS:
        await hold_once(right, history)
    fresh = await serve(nodes)
    for server in (fresh, right):
        await hold_once(server, history)
    history.check()
    history.check_exclusion()


async def test_no_vote_counts_before_the_clock_of_the_node_is_known(
    nodes_with_clocks: FreshNodes, serve: Serve, start_proxy: StartProxy
) -> None:
    """The first answer about the clock is late. The clock has stepped, which ended a hold early."""
    nodes = await nodes_with_clocks(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    holders = await serve(nodes, proxied=True)
    await until_all_ready(holders)
    proxies = [await start_proxy(node) for node in nodes]
    proxies[0].refuse()
    async with serving(nodes, proxies=proxies, node_timeout_ms=NODE_TIMEOUT_MS) as rivals:
        await rivals.until_states(NODE_STATE_UNREACHABLE, NODE_STATE_READY, NODE_STATE_READY)
        # The lease stands on node 0 and node 2 alone.
        holders.proxies[1].refuse()
        await holders.until_states(NODE_STATE_READY, NODE_STATE_UNREACHABLE, NODE_STATE_READY)
        history = TokenHistory()
        assert await try_acquire(holders, history)
        stepped_at_ms = now_ms()
        await nodes[0].step_clock(STEP_MS)
        await until_distrusted(holders, 0)
        proxies[2].refuse()
        await rivals.until_states(NODE_STATE_UNREACHABLE, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
        await proxies[0].heal()
        # A server subscribes once it has admitted a node, and asks for the clock right after that.
        admitted = proxies[0].hold_after(b"SUBSCRIBE")
        await admitted.wait()
        admitted_ms = now_ms()
        await until_instant(admitted_ms + 0.5 * NODE_TIMEOUT_MS)
        attempt = asyncio.create_task(try_acquire(rivals, history))
        await until_instant(admitted_ms + 1.2 * NODE_TIMEOUT_MS)
        await proxies[0].heal()
        await attempt
        history.check()
        history.check_exclusion()
        await until(partial(try_acquire, rivals, history), timeout_s=BACK_TIMEOUT_S)
        assert history.grants[-1].answered_at_ms >= stepped_at_ms + DISTRUST_MS
        history.check()


async def until_instant(instant_ms: float) -> None:
    """Return at that instant. Replies are under way meanwhile, and no condition shows that."""

    async def reached() -> bool:
        return now_ms() >= instant_ms

    await until(reached)


async def until_distrusted(server: LockServer, index: int) -> None:
    """Return once the server reports that it distrusts the node's clock."""

    async def distrusted() -> bool:
        return (await server.status()).nodes[index].clock_distrusted_for.ToMilliseconds() > 0

    await until(distrusted)


@pytest.mark.parametrize("stepped", [[0], [0, 1]], ids=["one of five", "two of five"])
async def test_a_server_that_starts_after_nodes_have_stepped_does_not_count_them(
    stepped: Sequence[int], nodes_with_clocks: FreshNodes, serve: Serve
) -> None:
    """The server that saw the steps has ended. A minority stepped, so the server's own clock was right."""
    nodes = await nodes_with_clocks(5)
    await form(nodes, ttl_ms_max=TTL_MS)
    seer = await serve(nodes)
    await until_all_ready(seer)
    stepped_at_ms = now_ms()
    await asyncio.gather(*(nodes[index].step_clock(STEP_MS) for index in stepped))
    for index in stepped:
        await until_distrusted(seer, index)
    await seer.drain()
    late, history = await serve(nodes), TokenHistory()
    for index in stepped:
        await until_distrusted(late, index)
    # The nodes that are left make a quorum only with the nodes that stepped.
    for node in nodes[len(stepped) + 2 :]:
        node.kill()
    await until(partial(try_acquire, late, history), timeout_s=BACK_TIMEOUT_S)
    assert history.grants[0].answered_at_ms >= stepped_at_ms + DISTRUST_MS


async def test_callers_notice_nothing_of_a_rolling_restart_of_durable_nodes(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """Each node votes again at once. The greatest ttl of this cluster is five minutes.

    A hold that lasts through the restarts still names the server to tell of its end.
    """
    nodes = await fresh_nodes(3)
    await form(nodes)
    servers = [await serve(nodes), await serve(nodes)]
    await until_all_ready(*servers)
    held = (await servers[1].acquire(NAME, ttl_ms=300_000)).lease
    [waiter] = await line_up(servers[0], NAME, 1, wait_ms=300_000)
    async with LockLoad(*servers) as load:
        for node in nodes:
            await load.until_granted_by_each(20)
            await node.stop()
            await load.until_granted_by_each(20)
            await node.start()
            await until_all_ready(*servers)
        await load.until_granted_by_each(20)
    assert not load.failures
    load.check()
    await servers[1].release(NAME, held.lease_id)
    assert (await waiter.lease()).fencing_token > held.fencing_token


async def test_durable_nodes_grant_soon_after_a_power_loss_of_all_of_them(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """Neither a server that ran all the while nor a new one needs an operator."""
    nodes = await fresh_nodes(3)
    await form(nodes)
    server, history = await serve(nodes), TokenHistory()
    await until_all_ready(server)
    for _ in range(10):
        await hold_once(server, history)
    for node in nodes:
        node.kill()
    await server.until_states(*[NODE_STATE_UNREACHABLE] * 3)
    await asyncio.gather(*(node.start() for node in nodes))
    started_at_ms = now_ms()
    for each in (server, await serve(nodes)):
        await until(partial(try_acquire, each, history, f"{NAME}/{each.port}"), timeout_s=BACK_TIMEOUT_S)
    await until(partial(try_acquire, server, history), timeout_s=BACK_TIMEOUT_S)
    assert now_ms() <= started_at_ms + BACK_TIMEOUT_S * 1000
    history.check()
    await until_all_ready(server)
