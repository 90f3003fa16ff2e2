"""Who waits for a lock learns that too few nodes are left to grant it, and is spared when they are back in a blink."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from harness.redis_nodes import RedisNode
from harness.servers import FormedNodes, Serve, now_ms, until, until_all_ready
from harness.session_caller import SessionCaller
from harness.waiters import TTL_MS, Waiter, line_up
from redfence_proto.v1.lock_pb2 import ERROR_REASON_QUORUM_UNAVAILABLE

NAME = "orders/42"


async def wiped(node: RedisNode) -> None:
    """It answers, and has forgotten."""
    await node.call("FLUSHALL")


async def killed(node: RedisNode) -> None:
    """It is gone."""
    node.kill()


async def frozen(node: RedisNode) -> None:
    """It takes everything and answers nothing."""
    node.pause()


@pytest.mark.parametrize("lose", [wiped, killed, frozen], ids=lambda lose: lose.__name__)
async def test_everybody_who_waits_is_told_when_no_quorum_is_left(
    lose: Callable[[RedisNode], Awaitable[None]],
    fresh_formed_nodes: FormedNodes,
    serve: Serve,
    record_property: Callable[[str, object], None],
) -> None:
    """Long before the hold ends, and before anybody else asks: the server finds out by itself."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes)
    await until_all_ready(server)
    await server.acquire(NAME, ttl_ms=TTL_MS)
    async with SessionCaller(server) as session:
        waiters = [
            *await line_up(server, NAME, 2),
            Waiter(server, NAME, session=session),
        ]
        await server.until_waiting(NAME, count=3)
        # Soon after an arrival the head looks at the nodes; from then on nobody does before the hold ends.
        await asyncio.sleep(0.25)
        for node in nodes[:2]:
            await lose(node)
        lost_at_ms = now_ms()
        for waiter in waiters:
            failure = await waiter.failure()
            assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
            assert failure.is_retryable
            assert {each.partition("=")[0] for each in failure.metadata["nodes"].split(",")} == {"0", "1"}
    record_property("told after, in ms", round(max(each.answered_at_ms for each in waiters) - lost_at_ms))
    for node in nodes[:2]:
        node.resume()


async def test_nobody_who_waits_is_told_when_every_connection_breaks_and_is_made_again(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Each keeps its place, and the next one is granted when the holder releases."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes)
    await until_all_ready(server)
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    first, second = await line_up(server, NAME, 2)
    before = [node.state_changes for node in (await server.status()).nodes]
    for node in nodes:
        await node.call("CLIENT", "KILL", "TYPE", "pubsub")  # whoever is subscribed, as servers are

    async def back() -> bool:
        changes = [node.state_changes for node in (await server.status()).nodes]
        return changes == [count + 2 for count in before]

    await until(back)
    assert (await server.look(NAME)).waiters == 2
    await server.release(NAME, held.lease_id)
    assert (await first.lease()).fencing_token == held.fencing_token + 1
    assert not second.done
