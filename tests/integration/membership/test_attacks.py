"""Two processes at one place, and nodes that hide or change what they are: callers must not notice.

Each test plays what operators and networks do, on real nodes behind proxies. It judges what callers were told, by their own clocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest

from harness.history.token_history import Grant, TokenHistory
from harness.load.session_caller import SessionCaller
from harness.processes.fixture_types import FlushedNodes, FreshNodes
from harness.processes.node_data import copy_data, put_back
from harness.processes.ports import HOST
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import LockServer, Serve, form, now_ms, until, until_all_ready
from harness.processes.tcp_proxy import TcpProxy
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    LEASE_STATE_ACTIVE,
    NODE_ANSWER_ANSWERED,
    NODE_STATE_QUARANTINED,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
    TOKEN_STATE_LIVE,
)
from redfence_server import composition, config

NAME = "orders/42"
TTL_MS = 1_500  # the greatest that the cluster allows
# A return takes the greatest ttl once or twice, and a machine that others use takes its time.
RETURN_TIMEOUT_S = 20.0
# Two heartbeats of the default interval, and as long again for a busy machine.
NOTICED_TIMEOUT_S = 2.0
ROUNDS = 20

pytestmark = pytest.mark.slow


async def try_acquire(server: LockServer, history: TokenHistory, name: str = NAME) -> Grant | None:
    """Acquire without waiting; note a grant, and return None for any other answer."""
    began_at_ms = now_ms()
    try:
        answer = await server.acquire(name, ttl_ms=TTL_MS)
    except grpc.aio.AioRpcError:
        return None  # no quorum
    if answer.outcome != ACQUIRE_OUTCOME_GRANTED:
        return None
    return history.note(answer.lease, began_at_ms=began_at_ms)


async def granted(server: LockServer, history: TokenHistory, name: str = NAME) -> Grant:
    """Acquire again and again until the lock is granted."""
    grant: Grant | None = None

    async def is_granted() -> bool:
        nonlocal grant
        grant = await try_acquire(server, history, name)
        return grant is not None

    await until(is_granted, timeout_s=RETURN_TIMEOUT_S)
    assert grant is not None
    return grant


@asynccontextmanager
async def renewing(grant: Grant, history: TokenHistory, *servers: LockServer) -> AsyncIterator[None]:
    """Renew a lease through each server, many times in its ttl, for as long as the block runs."""

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


async def lead_to(node: RedisNode, proxies: Sequence[TcpProxy], *, instead_of: RedisNode) -> None:
    """Let one node answer at another one's address and take its password; the other one lives on."""
    await node.call("ACL", "SETUSER", "default", f">{urlsplit(instead_of.url).password}")
    for proxy in proxies:
        proxy.forward_to(node.port)


async def see_only(server: LockServer, count: int) -> None:
    """Cut a server off from all nodes but the first few."""
    for proxy in server.proxies[count:]:
        proxy.refuse()
    cut_off = len(server.proxies) - count
    await server.until_states(*[NODE_STATE_READY] * count, *[NODE_STATE_UNREACHABLE] * cut_off)


async def run_id(node: RedisNode) -> str:
    """Return the id that the node gives its present run."""
    info = await node.call("INFO", "server")
    assert isinstance(info, bytes)
    return next(line[7:] for line in info.decode().splitlines() if line.startswith("run_id:"))


# --- two processes at one place -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 5])
async def test_an_empty_newcomer_never_votes_beside_a_lease_of_its_predecessor(
    count: int, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """One server sees a newcomer behind the address, another one the node that lives on; its caller renews all the while."""
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
    call: str, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The replaced node answers at once; the next one answers after it was looked at anew, and that look tells of the newcomer.

    The first answer is from a node that votes no more. It must not count beside the second.
    """
    *nodes, newcomer = await fresh_nodes(4)
    await form(nodes, ttl_ms_max=TTL_MS)
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

        asked = with_old.proxies[0].delay_from(NAME.encode(), replies_ms=0.0)
        told = asyncio.create_task(is_told_that_it_holds())
        await asked.wait()
        await until_replied(with_old.proxies[0])
        await with_old.proxies[1].heal()
        assert not await told, f"token {held.token} is told to hold after {follower.token} was granted"


async def until_replied(proxy: TcpProxy) -> None:
    """Return once the node behind the proxy has answered something more."""
    before = proxy.replies.passed_bytes

    async def replied() -> bool:
        return proxy.replies.passed_bytes > before

    await until(replied)


@pytest.mark.parametrize("seen", ["all", "copy and last node"])
@pytest.mark.parametrize("origin", ["copied", "promoted"])
async def test_tokens_stay_unique_while_a_node_and_its_copy_both_run(
    origin: str, seen: str, fresh_nodes: FreshNodes, serve: Serve, tmp_path: Path
) -> None:
    """The copy looks like a durable node after a restart, and lacks nothing when it starts. Each of two servers sees one of them."""
    *nodes, twin = await fresh_nodes(4)
    await form(nodes, ttl_ms_max=TTL_MS)
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


async def follow(replica: RedisNode, primary: RedisNode) -> None:
    """Make one node a replica of another; return when it has all of the other's data, also on its disk."""
    password = urlsplit(primary.url).password
    assert password is not None
    await replica.call("CONFIG", "SET", "masterauth", password)
    # The primary would wait for further replicas.
    await primary.call("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    await replica.call("REPLICAOF", HOST, primary.port)

    async def in_step() -> bool:
        info = await replica.call("INFO")
        assert isinstance(info, bytes)
        wanted = (
            "master_link_status:up",
            "aof_rewrite_in_progress:0",
            "aof_rewrite_scheduled:0",
            "aof_last_bgrewrite_status:ok",
        )
        return all(f"\r\n{each}\r\n".encode() in info for each in wanted)

    await until(in_step, timeout_s=15)


# --- nodes that hide or change what they are ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "worse", "mended"),
    [
        ("maxmemory-policy", "allkeys-lru", "noeviction"),
        ("appendonly", "no", "yes"),
        ("appendfsync", "everysec", "always"),
    ],
)
async def test_a_node_whose_settings_get_worse_while_it_runs_stops_voting(
    setting: str, worse: str, mended: str, fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The next heartbeats find out, on a connection that lasts; the node votes again once the setting is mended."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
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
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """Its append-only file was off. Until the new file is complete, a crash loses what the node answers."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes)
    await until_all_ready(server)
    # So writing the new file takes seconds: one key, and redfence's own.
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


async def test_a_node_that_does_not_tell_its_run_id_is_refused(fresh_nodes: FreshNodes, serve: Serve) -> None:
    """A filter on the way leaves the run id out of INFO. Without it no restart can be noticed."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes, proxied=True)
    await until_all_ready(server)
    server.proxies[0].hide_in_replies(b"run_id:")
    server.proxies[0].reset()

    async def refused() -> bool:
        node = (await server.status()).nodes[0]
        return node.state == NODE_STATE_QUARANTINED and "run_id" in node.detail

    await until(refused)
    await server.proxies[0].heal()
    server.proxies[0].reset()
    await until_all_ready(server)


async def test_a_user_without_the_right_to_client_commands_is_served(flushed_nodes: FlushedNodes) -> None:
    """The name of a connection is for people who read CLIENT LIST; nothing depends on it."""
    nodes = await flushed_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    for node in nodes:
        await node.call("ACL", "SETUSER", "plain", "reset", "on", ">secret", "~*", "&*", "+@all", "-client")
    urls = [f"redis://plain:secret@{HOST}:{node.port}" for node in nodes]
    settings = config.load({"nodes": urls, "listen": f"{HOST}:0"})
    try:
        async with (
            composition.lock_server(settings) as running,
            grpc.aio.insecure_channel(f"{HOST}:{running.port}") as channel,
        ):
            server = LockServer(channel, running=running)
            await until_all_ready(server)
            await granted(server, TokenHistory())
    finally:
        for node in nodes:
            await node.call("ACL", "DELUSER", "plain")
