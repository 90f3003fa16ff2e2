"""Limits on waiters."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from harness.load.failures import Failure
from harness.load.session_caller import SessionCaller
from harness.load.waiters import TTL_MS, Waiter, line_up
from harness.processes.servers import FormedNodes, Serve
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import ACQUIRE_OUTCOME_HELD

NAME = "orders/42"


def is_refusal(failure: Failure, *, scope: str, limit: int) -> None:
    """Fail unless the failure tells this limit."""
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.reason == lock_pb2.ERROR_REASON_TOO_MANY_WAITERS
    assert failure.metadata == {"limit": str(limit), "scope": scope}
    assert failure.retry_after_ms == 1_000
    assert str(limit) in failure.message


@pytest.mark.parametrize(
    ("setting", "limit", "scope"),
    [
        ("waiters_per_resource_max", 3, "resource"),
        # A peer may take no more than it leaves free.
        ("waiters_max", 5, "peer"),
        ("waiters_per_connection_max", 3, "connection"),
    ],
)
async def test_one_waiter_too_many_is_refused_until_another_one_leaves(
    setting: str, limit: int, scope: str, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Here a waiter leaves when it loses its stream."""
    settings: dict[str, Any] = {setting: limit}
    server = await serve(await formed_nodes(3), **settings)
    await server.acquire(NAME, ttl_ms=TTL_MS)
    await line_up(server, NAME, 2)
    session = SessionCaller(server)
    third = Waiter(server, NAME, session=session)
    await server.until_waiting(NAME, count=3)
    is_refusal(await Waiter(server, NAME).failure(), scope=scope, limit=3)
    is_refusal(await Waiter(server, NAME, session=session).failure(), scope=scope, limit=3)
    assert (await server.look(NAME)).waiters == 3
    # Neither a single try nor a free lock needs a place.
    assert (await server.acquire(NAME)).outcome == ACQUIRE_OUTCOME_HELD
    assert (await Waiter(server, "free").lease()).fencing_token > 0
    await session.cancel()
    assert await third.answer() is None
    await server.until_waiting(NAME, count=2)
    await line_up(server, NAME, 1)


async def test_calls_and_streams_of_one_connection_count_together_and_others_do_not(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    server = await serve(await formed_nodes(3), waiters_per_connection_max=2)
    for name in ("a", "b"):
        await server.acquire(name, ttl_ms=TTL_MS)
    async with server.on_own_connection() as one, server.on_own_connection() as another:
        for there in (one, another):
            async with SessionCaller(there) as session:
                before = (await server.look("a")).waiters
                await line_up(there, "a", 1)
                [waiter] = await line_up(there, "b", 1, session=session)
                is_refusal(await Waiter(there, "a").failure(), scope="connection", limit=2)
                is_refusal(await Waiter(there, "b", session=session).failure(), scope="connection", limit=2)
                assert (await server.look("a")).waiters == before + 1
                waiter.give_up()
                await server.until_waiting("b", count=0)
