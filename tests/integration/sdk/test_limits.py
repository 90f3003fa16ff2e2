"""The SDK on a real server with low limits: each call is answered, and renewals and releases go first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from harness.processes.servers import FormedNodes, Serve, until

_WAITS = 80
# Longer than the ttl of what is held meanwhile, which is itself longer than a busy machine stands still.
_WAIT_S = 3.0

MakeClient = Callable[..., Any]


@pytest.mark.parametrize(
    ("waits", "setting"),
    [(_WAITS, {"commands_max": 50}), (6, {"waiters_per_connection_max": 2})],
    ids=["commands", "waiters"],
)
async def test_more_waits_than_a_connection_may_have_are_all_granted_one_after_the_other(
    formed_nodes: FormedNodes, serve: Serve, make_client: MakeClient, waits: int, setting: dict[str, Any]
) -> None:
    """Those without room wait in the client. Meanwhile a free lock is granted at once."""
    server = await serve(await formed_nodes(3), **setting)
    held = (await server.acquire("r", ttl_ms=60_000)).lease
    client = make_client(server.target)
    tokens: list[int] = []

    async def take_turn() -> None:
        lease = await client.acquire("r", ttl=10, wait=30)
        tokens.append(lease.token)
        assert await lease.release()

    turns = [asyncio.create_task(take_turn()) for _ in range(waits)]

    async def full() -> bool:
        return (await server.look("r")).waiters >= 2

    await until(full)
    assert await (await asyncio.wait_for(client.acquire("free", ttl=10, wait=0), 5)).release()
    await server.release("r", held.lease_id)
    await asyncio.wait_for(asyncio.gather(*turns), 30)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == waits
