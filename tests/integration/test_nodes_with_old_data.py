"""Nodes that come back with what they knew earlier: an old copy of their disk, another machine's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from harness.failures import failure_of
from harness.fixture_types import FreshNodes, StartProxy
from harness.node_data import copy_data, put_back
from harness.redis_nodes import RedisNode
from harness.servers import LockServer, Serve, form, now_ms, serving, until, until_all_ready
from harness.tcp_proxy import TcpProxy
from harness.token_history import TokenHistory
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ERROR_REASON_QUORUM_UNAVAILABLE,
    NODE_STATE_QUARANTINED,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
)

NAME = "orders/42"
# The greatest that the cluster allows, and so about how long a quarantine lasts.
TTL_MS = 1_000
pytestmark = pytest.mark.slow


@pytest.fixture
async def nodes(fresh_nodes: FreshNodes) -> list[RedisNode]:
    """Three nodes that fsync every write, formed with short quarantines."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    return nodes


async def hold_once(server: LockServer, *, times: int = 1) -> int:
    """Acquire and release, and return the last token."""
    for _ in range(times):
        lease = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
        await server.release(NAME, lease.lease_id)
    return lease.fencing_token


async def until_granted(server: LockServer, history: TokenHistory) -> None:
    """Try, and not wait, until the lock is granted; write the grant down."""

    async def granted() -> bool:
        began_at_ms = now_ms()
        try:
            answer = await server.acquire(NAME, ttl_ms=TTL_MS)
        except grpc.aio.AioRpcError:
            return False  # no quorum yet
        if answer.outcome == ACQUIRE_OUTCOME_GRANTED:
            history.note(answer.lease, began_at_ms=began_at_ms)
        return answer.outcome == ACQUIRE_OUTCOME_GRANTED

    await until(granted)


async def until_admitted(node: RedisNode) -> None:
    """A server has admitted the node in its present run."""

    async def noted() -> bool:
        info = await node.call("INFO", "server")
        run_id = await node.call("HGET", "redfence:node", "run_id")
        assert isinstance(info, bytes)
        assert isinstance(run_id, bytes)
        return b"run_id:%b\r\n" % run_id in info

    await until(noted, timeout_s=10)


@asynccontextmanager
async def healed_after(task: asyncio.Task[None], proxy: TcpProxy) -> AsyncIterator[None]:
    """Heal the network once the task is done, while what is within goes on."""

    async def heal() -> None:
        await task
        await proxy.heal()

    healing = asyncio.create_task(heal())
    yield
    await healing


async def until_noted(nodes: Sequence[RedisNode], place: int, *, on: int) -> None:
    """One node knows how many changes another one has made."""

    async def noted() -> bool:
        made = await nodes[place].call("HGET", "redfence:node", "changes")
        told = await nodes[on].call("HGET", "redfence:node", f"changes:{place}")
        assert isinstance(made, bytes)
        return isinstance(told, bytes) and int(told) >= int(made)

    await until(noted)


async def test_a_node_that_went_back_while_no_server_ran_gives_no_vote_once_another_has_told_of_it(
    nodes: list[RedisNode], start_proxy: StartProxy, tmp_path: Path
) -> None:
    """It was admitted before anybody who knows could be asked, and shows too few changes with its first vote.

    The other one lacks the same numbers, so that vote would repeat them.
    """
    async with serving(nodes) as server:
        await until_all_ready(server)
        await hold_once(server)
        old = copy_data(nodes[0], tmp_path / "old")
        nodes[2].kill()
        last = await hold_once(server, times=3)
        await nodes[2].start()
        await until_all_ready(server)
        await until_noted(nodes, 0, on=2)
    nodes[0].kill()
    nodes[1].kill()
    put_back(nodes[0], old)
    await nodes[0].start()
    proxies = [await start_proxy(node) for node in nodes]
    proxies[2].refuse()
    admitted = asyncio.create_task(until_admitted(nodes[0]))
    # Its pulses, which would find out as well, come too late.
    async with (
        healed_after(admitted, proxies[2]),
        serving(nodes, proxies=proxies, pulse_interval_ms=60_000) as server,
    ):
        failure = await failure_of(server.acquire(NAME, ttl_ms=TTL_MS))
        assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
        await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_UNREACHABLE, NODE_STATE_READY)
        await nodes[1].start()
        await until_all_ready(server)
        assert await hold_once(server) > last


async def test_a_node_that_is_put_back_into_an_earlier_quarantine_sits_it_out_anew(
    nodes: list[RedisNode], serve: Serve, tmp_path: Path
) -> None:
    """What it has promised since is forgotten as well, so the lease that it stood for keeps the lock to its end."""
    server = await serve(nodes)
    await until_all_ready(server)
    await nodes[0].call("FLUSHALL")
    await hold_once(server)
    await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
    old = copy_data(nodes[0], tmp_path / "old")
    await until_all_ready(server)
    history = TokenHistory()
    await until_granted(server, history)
    # As if the mint had never reached it: for as long as it lasts, the lease stands on the first two nodes alone.
    await nodes[2].call("DEL", f"redfence:lock:{NAME}")
    nodes[0].kill()
    put_back(nodes[0], old)
    await nodes[0].start()
    await until_granted(server, history)
    history.check()
    history.check_exclusion()
    await until_all_ready(server)
