"""Acquires that do not wait, noted in a history."""

from __future__ import annotations

import grpc

from harness.history.token_history import Grant, TokenHistory
from harness.processes.servers import LockServer, now_ms, until
from redfence_proto.v1.lock_pb2 import ACQUIRE_OUTCOME_GRANTED

NAME = "orders/42"


async def try_acquire(
    server: LockServer, history: TokenHistory, name: str = NAME, *, ttl_ms: int
) -> Grant | None:
    """Acquire without waiting; note a grant, and return None for any other answer."""
    began_at_ms = now_ms()
    try:
        answer = await server.acquire(name, ttl_ms=ttl_ms)
    except grpc.aio.AioRpcError:
        return None  # no quorum
    if answer.outcome != ACQUIRE_OUTCOME_GRANTED:
        return None
    return history.note(answer.lease, began_at_ms=began_at_ms)


async def granted(
    server: LockServer, history: TokenHistory, name: str = NAME, *, ttl_ms: int, timeout_s: float = 20.0
) -> Grant:
    """Acquire again and again until the lock is granted."""
    grant: Grant | None = None

    async def is_granted() -> bool:
        nonlocal grant
        grant = await try_acquire(server, history, name, ttl_ms=ttl_ms)
        return grant is not None

    await until(is_granted, timeout_s=timeout_s)
    assert grant is not None
    return grant
