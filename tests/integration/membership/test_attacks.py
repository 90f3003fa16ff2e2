"""Two processes at one node index, and nodes that hide or change what they are.

Each test does what operators and networks do, and judges what callers heard, by their own clocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from harness.history.token_history import Grant, TokenHistory
from harness.load import tries
from harness.load.session_caller import SessionCaller
from harness.load.tries import NAME
from harness.processes.fixture_types import FreshNodes
from harness.processes.node_data import copy_data, put_back
from harness.processes.redis_nodes import RedisNode, run_id
from harness.processes.servers import LockServer, Serve, form, now_ms, until, until_all_ready
from harness.processes.stand_ins import follow, lead_to
from harness.processes.tcp_proxy import TcpProxy
from redfence_proto.v1.lock_pb2 import (
    LEASE_STATE_ACTIVE,
    NODE_ANSWER_ANSWERED,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
    TOKEN_STATE_LIVE,
)

TTL_MS = 1_500  # the greatest that the cluster allows
# A return takes the greatest ttl once or twice, and a machine that others use takes its time.
RETURN_TIMEOUT_S = 20.0
# Two heartbeats of the default interval, and as long again for a busy machine.
NOTICED_TIMEOUT_S = 2.0
ROUNDS = 20

pytestmark = pytest.mark.slow

try_acquire = partial(tries.try_acquire, ttl_ms=TTL_MS)
granted = partial(tries.granted, ttl_ms=TTL_MS)


@pytest.fixture
async def nodes(fresh_nodes: FreshNodes) -> list[RedisNode]:
    """Three nodes that fsync every write, formed with short quarantines."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    return nodes


@asynccontextmanager
async def renewing(grant: Grant, history: TokenHistory, *servers: LockServer) -> AsyncIterator[None]:
    """Renew a lease through each server, many times in its ttl, while the block runs."""

    async def renew_for_ever(session: SessionCaller) -> None:
        while True:
            sent_at_ms = now_ms()
            renewal = (await session.renew(grant.resource, grant.lease_id)).renew
            if renewal.state == LEASE_STATE_ACTIVE:
                validity_ms = renewal.validity.ToMilliseconds()
                history.renewed(grant, sent_at_ms=sent_at_ms, validity_ms=validity_ms)
            await asyncio.sleep(TTL_MS / 50 / 1000)

    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(SessionCaller(server)) for server in servers]
        tasks = [asyncio.create_task(renew_for_ever(session)) for session in sessions]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def see_only(server: LockServer, count: int) -> None:
    """Cut a server off from all nodes but the first few."""
    for proxy in server.proxies[count:]:
        proxy.refuse()
    cut_off = len(server.proxies) - count
    await server.until_states(*[NODE_STATE_READY] * count, *[NODE_STATE_UNREACHABLE] * cut_off)


# --- two processes at one node index --------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 5])
async def test_an_empty_newcomer_never_votes_beside_a_lease_of_its_predecessor(
    count: int, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """One server reaches the newcomer, another the node that lives on. Its caller renews all the while."""
    *nodes, newcomer = await fresh_nodes(count + 1)
    await form(nodes, ttl_ms_max=TTL_MS)
    with_old, with_new = await serve(nodes, proxied=True), await serve(nodes, proxied=True)
    await until_all_ready(with_old, with_new)
    await see_only(with_old, count // 2 + 1)
    history = TokenHistory()
    async with renewing(await granted(with_old, history), history, with_old):
        await lead_to(newcomer, with_new.proxies[:1], instead_of=nodes[0])
        await granted(with_new, history)
    history.check()
    history.check_exclusion()
    await until_all_ready(with_new)
    assert (await with_new.status()).nodes[0].run_id == await run_id(newcomer)


@pytest.mark.parametrize("call", ["CheckToken", "renewal"])
async def test_no_answer_counts_a_node_that_was_replaced_in_the_meantime(
    call: str, nodes: list[RedisNode], fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The answer of the replaced node must not count beside an answer after an examination.

    The replaced node answers at once. The server examines the next node again, hears of the newcomer there,
    and only then gets that node's answer.
    """
    [newcomer] = await fresh_nodes(1)
    with_old, with_new, only_old = [await serve(nodes, proxied=True) for _ in range(3)]
    await until_all_ready(with_old, with_new, only_old)
    await see_only(with_old, 2)
    history = TokenHistory()
    held = await granted(with_old, history)
    await see_only(only_old, 1)
    with_old.proxies[1].hold()
    # No renewal is confirmed by a quorum, yet the hold stays on node 0 and on node 1.
    async with renewing(held, history, only_old, with_new), SessionCaller(with_old) as session:
        await lead_to(newcomer, with_new.proxies[:1], instead_of=nodes[0])
        follower = await granted(with_new, history)
        assert follower.token > held.token

        async def is_told_that_it_holds() -> bool:
            if call == "renewal":
                return (await session.renew(NAME, held.lease_id)).renew.state == LEASE_STATE_ACTIVE
            try:
                return (await with_old.check(NAME, held.token)).state == TOKEN_STATE_LIVE
            except grpc.aio.AioRpcError:
                return False  # no quorum

        asked = with_old.proxies[0].requests.watch_for(NAME.encode())
        told = asyncio.create_task(is_told_that_it_holds())
        await asked.wait()
        await until_replied(with_old.proxies[0])
        await with_old.proxies[1].heal()
        assert not await told, f"token {held.token} is told to hold after {follower.token} was granted"


async def until_replied(proxy: TcpProxy) -> None:
    """Return once the node behind the proxy has answered again."""
    before = proxy.replies.passed_bytes

    async def replied() -> bool:
        return proxy.replies.passed_bytes > before

    await until(replied)


@pytest.mark.parametrize("seen", ["all", "copy and last node"])
@pytest.mark.parametrize("origin", ["copied", "promoted"])
async def test_tokens_stay_unique_while_a_node_and_its_copy_both_run(
    *, origin: str, seen: str, nodes: list[RedisNode], fresh_nodes: FreshNodes, serve: Serve, tmp_path: Path
) -> None:
    """The copy starts complete and looks like a restarted durable node. Each of two servers reaches one."""
    [twin] = await fresh_nodes(1)
    with_node, with_twin = await serve(nodes, proxied=True), await serve(nodes, proxied=True)
    await until_all_ready(with_node, with_twin)
    history = TokenHistory()
    await granted(with_node, history)
    if origin == "copied":
        twin.kill()
        put_back(twin, copy_data(nodes[0], tmp_path / "copy"))
        await twin.start()
    else:
        await follow(twin, nodes[0])
        await twin.call("REPLICAOF", "NO", "ONE")
        await twin.restart()
    await see_only(with_node, 2)
    if seen != "all":
        with_twin.proxies[1].refuse()
    await lead_to(twin, with_twin.proxies[:1], instead_of=nodes[0])

    async def looked_at() -> bool:
        return (await with_twin.status()).nodes[0].run_id == await run_id(twin)

    await until(looked_at)
    for number in range(ROUNDS):
        for server in (with_node, with_twin):
            await try_acquire(server, history, f"orders/{number}")
    for proxy in (*with_node.proxies, *with_twin.proxies):
        await proxy.heal()
    for server in (with_node, with_twin):
        await granted(server, history)
    history.check()


# --- nodes that hide or change what they are ------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "worse", "mended"),
    [
        ("maxmemory-policy", "allkeys-lru", "noeviction"),
        ("appendonly", "no", "yes"),
        ("appendfsync", "everysec", "always"),
    ],
)
async def test_a_node_whose_settings_get_worse_while_it_runs_stops_voting(
    setting: str, worse: str, mended: str, nodes: list[RedisNode], serve: Serve
) -> None:
    """A heartbeat notices. The node votes again once the setting is mended."""
    # Harmless under noeviction.
    await nodes[0].call("CONFIG", "SET", "maxmemory", "100mb")
    server, history = await serve(nodes), TokenHistory()
    await until_all_ready(server)
    await nodes[0].call("CONFIG", "SET", setting, worse)

    async def refused() -> bool:
        node = (await server.status()).nodes[0]
        return node.state != NODE_STATE_READY and setting in node.detail

    await until(refused, timeout_s=NOTICED_TIMEOUT_S)
    await granted(server, history)
    answers = [node.answer for node in (await server.look(NAME)).nodes]
    assert [answer == NODE_ANSWER_ANSWERED for answer in answers] == [False, True, True]
    await nodes[0].call("CONFIG", "SET", setting, mended)
    await until_all_ready(server, timeout_s=RETURN_TIMEOUT_S)
    nodes[2].kill()
    await granted(server, history)
    history.check()


async def test_a_node_votes_only_after_its_log_is_complete_again(
    nodes: list[RedisNode], serve: Serve
) -> None:
    """Its append-only file was off. Until the new file is complete, a crash loses acknowledged writes."""
    server = await serve(nodes)
    await until_all_ready(server)
    # Each key delays the new file by a second.
    await nodes[0].call("SET", "redfence:counter:slow", "1")
    await nodes[0].call("CONFIG", "SET", "rdb-key-save-delay", "1000000")
    await nodes[0].call("CONFIG", "SET", "appendonly", "no")

    async def shows(detail: str) -> bool:
        node = (await server.status()).nodes[0]
        return node.state != NODE_STATE_READY and detail in node.detail

    await until(lambda: shows("appendonly is no"), timeout_s=NOTICED_TIMEOUT_S)
    await nodes[0].call("CONFIG", "SET", "appendonly", "yes")
    await until(lambda: shows("not rewritten yet"), timeout_s=RETURN_TIMEOUT_S)
    await until_all_ready(server, timeout_s=RETURN_TIMEOUT_S)
    assert b"aof_rewrite_in_progress:0" in await nodes[0].call("INFO", "persistence")  # type: ignore[operator]
