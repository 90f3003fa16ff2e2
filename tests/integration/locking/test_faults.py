"""Nodes die and networks break under the algorithm: what callers hear, and what stays on the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from harness.load.failures import failure_of
from harness.load.lock_load import LockLoad
from harness.load.session_caller import SessionCaller
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    locks_left,
    memory,
    now_ms,
    until,
    until_all_ready,
    until_no_locks,
)
from harness.time.eventually import eventually
from redfence_proto.v1.lock_pb2 import (
    ERROR_REASON_QUORUM_UNAVAILABLE,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
    RELEASE_OUTCOME_RELEASED,
    TOKEN_STATE_LIVE,
)

NAME = "orders/42"
LOCK_KEY = b"redfence:lock:orders/42"
IDENTITY_KEY, HIGH_KEY = b"redfence:node", b"redfence:high"
# For tests that wait until it is over; longer than a machine stalls.
NODE_TIMEOUT_MS = 1_000
pytestmark = pytest.mark.slow


async def proxied(nodes: Sequence[RedisNode], serve: Serve, **settings: Any) -> LockServer:
    """Serve through proxies. Heartbeats are rare, so a lost reply is one to a command of the test."""
    server = await serve(nodes, proxied=True, **{"heartbeat_interval_ms": 60_000, **settings})
    await until_all_ready(server)

    async def subscribed() -> bool:
        return all([await node.call("PUBSUB", "CHANNELS") for node in nodes])

    # A node votes before it answers the subscription to notices.
    await until(subscribed)
    replies = [proxy.replies for proxy in server.proxies]
    await eventually(lambda: all(each.taken_bytes == each.passed_bytes for each in replies))
    return server


async def until_holding(nodes: Sequence[RedisNode], count: int) -> None:
    """Return once the nodes have so many lock keys altogether."""

    async def reached() -> bool:
        return len(await locks_left(nodes)) == count

    await until(reached)


async def test_a_minority_killed_under_load_costs_no_caller_more_than_a_retry(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    nodes = await fresh_formed_nodes(5)
    servers = [await serve(nodes), await serve(nodes)]
    minority = nodes[:2]
    async with LockLoad(*servers) as load:
        await load.until_granted(150)
        for node in minority:
            node.kill()
        await load.until_granted(150)
        for node in minority:
            await node.start()
        await until_all_ready(*servers)
        await load.until_granted(150)
    load.history.check()
    await until_no_locks(nodes)


async def test_without_a_majority_every_call_fails_at_once_until_the_nodes_are_back(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Nodes that fsync every write keep their holds."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes, node_timeout_ms=20_000)
    await until_all_ready(server)
    held = (await server.acquire("held", ttl_ms=60_000)).lease
    await server.until_carried_out()
    before = [await memory(node) for node in nodes[:2]]
    for node in nodes[:2]:
        node.kill()
    sent_at_ms = now_ms()
    for number in range(50):
        for call in (
            server.acquire(f"orders/{number}", wait_ms=60_000),
            server.release("free", held.lease_id),
            server.look("held"),
            server.check("held", held.fencing_token),
        ):
            failure = await failure_of(call)
            assert failure.is_retryable
            assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
    # Two hundred calls in turn took less than one node timeout, so no call waited for it.
    assert now_ms() - sent_at_ms < 20_000
    await until_holding(nodes[2:], 1)
    for node in nodes[:2]:
        await node.start()
    await until_all_ready(server)
    for node, remembered in zip(nodes, before, strict=False):
        # The fence has changed these two.
        now = await memory(node)
        assert {**now, **{key: remembered[key] for key in (IDENTITY_KEY, HIGH_KEY)}} == remembered
    assert (await server.check("held", held.fencing_token)).state == TOKEN_STATE_LIVE
    assert await server.release("held", held.lease_id) == RELEASE_OUTCOME_RELEASED
    assert (await server.acquire("held")).lease.fencing_token > held.fencing_token


async def test_a_node_that_swallows_everything_delays_no_call_beyond_the_others(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """One of five nodes answers none of five hundred acquires."""
    server = await serve(await formed_nodes(5), proxied=True, node_timeout_ms=20_000)
    await until_all_ready(server)
    black_hole = server.proxies[4]
    black_hole.drop()
    replies = black_hole.replies
    # An answer to a heartbeat may be on its way.
    await eventually(lambda: replies.taken_bytes == replies.passed_bytes + replies.kept_bytes)
    answered_bytes = replies.passed_bytes
    began_at_ms = now_ms()
    tokens = []
    async with SessionCaller(server) as session:
        for _ in range(500):
            lease = (await session.acquire(NAME)).acquire.lease
            tokens.append(lease.fencing_token)
            assert (await session.release(NAME, lease.lease_id)).release.outcome == RELEASE_OUTCOME_RELEASED
    assert replies.passed_bytes == answered_bytes
    assert tokens == sorted(set(tokens))
    # They took less than one node timeout, so no call waited for it.
    assert now_ms() - began_at_ms < 20_000
    await black_hole.heal()
    await until_all_ready(server)


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize(
    "how", ["replies lost", "replies dropped", "requests held", "disconnected before the undo"]
)
async def test_a_mint_without_answers_of_a_quorum_fails_and_is_undone_everywhere(
    count: int, how: str, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Held requests arrive long after the timeout, and the undo right behind them."""
    nodes = await formed_nodes(count)
    timeout_ms = NODE_TIMEOUT_MS if how in {"replies dropped", "requests held"} else 10_000
    server = await proxied(nodes, serve, node_timeout_ms=timeout_ms)
    first = (await server.acquire(NAME)).lease
    await server.release(NAME, first.lease_id)
    await until_no_locks(nodes)
    cut = server.proxies[: count // 2 + 1]
    for proxy in cut:
        match how:
            case "replies lost":
                proxy.lose_replies(1)
            case "replies dropped":
                proxy.drop(requests=False)
            case "requests held":
                proxy.hold(replies=False)
            case _:
                proxy.hold(requests=False)
    acquiring = asyncio.create_task(failure_of(server.acquire(NAME, ttl_ms=60_000)))
    if how == "disconnected before the undo":
        await until_holding(nodes, count)
        for proxy in cut:
            proxy.refuse()
    failure = await acquiring
    assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
    assert failure.is_retryable
    if how == "disconnected before the undo":
        await until_holding(nodes[len(cut) :], 0)
        assert len(await locks_left(nodes)) == len(cut)
    if how != "replies dropped":
        for proxy in cut:
            await proxy.heal()
    # Dropped replies keep no request from arriving.
    await until_no_locks(nodes)
    for proxy in cut:
        await proxy.heal()

    async def minted_everywhere() -> bool:
        counters = [await node.call("GET", f"redfence:counter:{NAME}") for node in nodes]
        return all(isinstance(each, bytes) and int(each) > first.fencing_token for each in counters)

    await until(minted_everywhere)
    await until_no_locks(nodes)
    # Asked only now, because the server notices a healed connection's reset within a round trip to a node.
    await until_all_ready(server)
    assert (await server.acquire(NAME)).lease.fencing_token > first.fencing_token + 1


async def test_a_node_that_missed_a_release_is_told_when_it_is_back(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The hold would otherwise block a free lock until its ttl ends."""
    nodes = await formed_nodes(3)
    server = await proxied(nodes, serve)
    lease = (await server.acquire(NAME, ttl_ms=60_000)).lease
    server.proxies[0].refuse()
    await server.until_states(NODE_STATE_UNREACHABLE, NODE_STATE_READY, NODE_STATE_READY)
    assert await server.release(NAME, lease.lease_id) == RELEASE_OUTCOME_RELEASED
    assert await locks_left(nodes) == [LOCK_KEY]
    await server.proxies[0].heal()
    await until_no_locks(nodes)
    following = (await server.acquire(NAME)).lease
    assert following.fencing_token > lease.fencing_token
