"""Nodes whose wall clock is set, under real servers.

The tests judge by answers and by the clock of the holders. A grant that comes too early is a failure.
A late one is not, because the machine may be busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from harness.load.failures import Failure
from harness.load.session_caller import SessionCaller
from harness.processes.fixture_types import FreshNodes
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import LockServer, Serve, form, locks_left, new_lease_id, now_ms, until
from harness.time.wrong_clock import WrongClock
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ERROR_REASON_QUORUM_UNAVAILABLE,
    LEASE_STATE_ACTIVE,
    NODE_ANSWER_ANSWERED,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
    RELEASE_OUTCOME_RELEASED,
)
from redfence_server import composition
from redfence_server.embedded.binary import RedisBinary
from redfence_server.locking.quorum import DRIFT_FIXED_MS, DRIFT_RATIO

NAME = "orders/42"
STEP_MS = 30_000
TTL_MS = 2_000  # the greatest that the cluster allows
DISTRUST_MS = TTL_MS * (1 + DRIFT_RATIO) + DRIFT_FIXED_MS
SET_EVENT = "node_clock_set"
pytestmark = pytest.mark.slow


@pytest.fixture
async def nodes(nodes_with_clocks: FreshNodes) -> list[RedisNode]:
    """Three nodes of one cluster, whose clocks can be moved."""
    return await clustered(nodes_with_clocks)


async def watch(nodes: list[RedisNode], serve: Serve, **settings: Any) -> LockServer:
    """Start a server that has seen the clock of every node."""
    # A node times out only if the test makes it silent, also on a busy machine.
    server = await serve(nodes, node_timeout_ms=TTL_MS, **settings)
    # Answers come in order, and the first on each connection tells of the clock.
    look = await server.look(NAME)
    assert [node.answer for node in look.nodes] == [NODE_ANSWER_ANSWERED] * 3
    return server


async def clustered(start: FreshNodes, *, binary: RedisBinary | None = None) -> list[RedisNode]:
    """Start three nodes and form them into a cluster."""
    nodes = await start(3, binary=binary)
    await form(nodes, ttl_ms_max=TTL_MS)
    return nodes


@dataclass(frozen=True)
class Hold:
    """A granted lease, by the holder's clock, and the failures before it."""

    server: LockServer
    lease_id: str
    token: int
    valid_until_ms: float
    granted_at_ms: float
    failures: list[Failure] = field(default_factory=list)

    async def release(self) -> None:
        """Release the lease."""
        assert await self.server.release(NAME, self.lease_id) == RELEASE_OUTCOME_RELEASED


async def hold(server: LockServer, *, timeout_s: float = 20.0) -> Hold:
    """Acquire again and again until the lock is granted."""
    failures: list[Failure] = []
    async with asyncio.timeout(timeout_s):
        while True:
            lease_id, sent_ms = new_lease_id(), now_ms()
            try:
                response = await server.acquire(NAME, ttl_ms=TTL_MS, wait_ms=10_000, lease_id=lease_id)
            except grpc.aio.AioRpcError as error:
                failures.append(Failure.of_call(error))
                await asyncio.sleep(0.01)
                continue
            assert response.outcome == ACQUIRE_OUTCOME_GRANTED
            validity_ms = response.lease.validity.ToMilliseconds()
            return Hold(
                server, lease_id, response.lease.fencing_token, sent_ms + validity_ms, now_ms(), failures
            )


async def until_distrusted(server: LockServer, *indexes: int) -> None:
    """Return once ClusterStatus reports these nodes, and no others, as nodes with a set clock."""

    async def told() -> bool:
        details = [node.detail for node in (await server.status()).nodes]
        return all(("clock was set" in detail) == (index in indexes) for index, detail in enumerate(details))

    await until(told)


async def noted(nodes: Sequence[RedisNode]) -> list[object]:
    """Return each node's note of a step of its clock."""
    return [await node.call("HGET", "redfence:node", "distrusted_until") for node in nodes]


@pytest.mark.parametrize("step_ms", [STEP_MS, -STEP_MS])
async def test_every_server_reports_a_clock_that_was_set(
    nodes_with_clocks: FreshNodes, engine: RedisBinary, serve: Serve, step_ms: int
) -> None:
    """It logs the step once, and shows it in ClusterStatus while the votes do not count."""
    nodes = await clustered(nodes_with_clocks, binary=engine)
    with capture_logs() as logs:
        servers = [await watch(nodes, serve), await watch(nodes, serve)]
        await nodes[1].step_clock(step_ms)
        for server in servers:
            await until_distrusted(server, 1)
        for server in servers:
            await until_distrusted(server)
            assert [node.state for node in (await server.status()).nodes] == [NODE_STATE_READY] * 3
    told = [log for log in logs if log["event"] == SET_EVENT]
    assert [(log["node_index"], log["log_level"]) for log in told] == [(1, "warning")] * 2
    for log in told:
        # The server is certain of the step less a second's drift and a round trip.
        assert 0.9 <= log["by_ms"] / step_ms <= 1.0


@pytest.mark.parametrize("step_ms", [STEP_MS, -STEP_MS])
async def test_votes_after_a_clock_was_set_do_not_count_until_every_lease_has_ended(
    nodes: list[RedisNode], serve: Serve, step_ms: int
) -> None:
    """No grant depends on this node for the greatest ttl and its drift."""
    server = await watch(nodes, serve)
    nodes[2].kill()
    await server.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
    await (await hold(server)).release()
    stepped_at_ms = now_ms()
    await nodes[0].step_clock(step_ms)
    if step_ms < 0:
        # A heartbeat notices it. It ends no lock early, so a mint does not.
        await until_distrusted(server, 0)
    held = await hold(server)
    assert held.granted_at_ms >= stepped_at_ms + DISTRUST_MS
    for failure in held.failures:
        assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
        assert failure.is_retryable
        assert failure.metadata["nodes"] == "0=clock_set,2=unreachable"
        assert "clock" in failure.message
    await held.release()
    assert not (await hold(server)).failures


@pytest.mark.parametrize("restarted", [False, True], ids=["cut-off", "restarted"])
async def test_a_step_that_no_server_could_see_is_noticed_before_the_next_vote(
    nodes: list[RedisNode], serve: Serve, *, restarted: bool
) -> None:
    """The node was cut off, or its process ended, while its clock was set."""
    server = await watch(nodes, serve, proxied=True)
    if restarted:
        nodes[0].kill()
    else:
        server.proxies[0].refuse()
    await server.until_states(NODE_STATE_UNREACHABLE, NODE_STATE_READY, NODE_STATE_READY)
    await nodes[0].step_clock(STEP_MS)
    back_at_ms = now_ms()
    if restarted:
        await nodes[0].start()
    else:
        await server.proxies[0].heal()
    await server.until_states(*[NODE_STATE_READY] * 3)
    nodes[2].kill()
    held = await hold(server)
    assert held.granted_at_ms >= back_at_ms + DISTRUST_MS


@pytest.mark.parametrize("rival", ["comes late", "comes first", "waits already"])
async def test_a_lock_that_a_step_ended_early_is_not_granted_to_another(
    nodes: list[RedisNode], serve: Serve, rival: str
) -> None:
    """The lease stands on two nodes. One ends it at once, and would be a quorum with the third node."""
    # With rare heartbeats the rival's server sees the step only in the answers of the mint.
    heartbeat_interval_ms = 60_000 if rival == "comes first" else 100
    holders = await watch(nodes, serve, proxied=True)
    rivals = await watch(nodes, serve, heartbeat_interval_ms=heartbeat_interval_ms)
    holders.proxies[2].refuse()
    await holders.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
    holder = await hold(holders)
    if rival == "waits already":
        waiting = asyncio.create_task(hold(rivals))
        await rivals.until_waiting(NAME)
    await nodes[0].step_clock(STEP_MS)
    if rival == "waits already":
        others = [asyncio.create_task(rivals.acquire(NAME, ttl_ms=TTL_MS, wait_ms=1)) for _ in range(10)]
        for other in await asyncio.gather(*others):
            assert other.outcome != ACQUIRE_OUTCOME_GRANTED or now_ms() >= holder.valid_until_ms
        next_holder = await waiting
    else:
        assert len(await locks_left(nodes)) <= 1  # on node 1 alone
        if rival == "comes late":
            await until_distrusted(rivals, 0)
        next_holder = await hold(rivals)
    assert next_holder.granted_at_ms >= holder.valid_until_ms
    assert next_holder.token > holder.token


async def test_a_server_whose_own_clock_is_wrong_stops_alone(
    nodes: list[RedisNode], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It logs that, grants nothing for the greatest ttl and notes nothing. Another server goes on."""
    clock = WrongClock()
    monkeypatch.setattr(composition, "SystemClock", lambda: clock)
    wrong = await watch(nodes, serve)
    monkeypatch.undo()
    right = await watch(nodes, serve)
    with capture_logs() as logs:
        stepped_at_ms = now_ms()
        clock.set_forward(STEP_MS)
        await until_distrusted(wrong, 0, 1, 2)
        held = await hold(right)
        assert not held.failures
        await held.release()
        assert (await hold(wrong)).granted_at_ms >= stepped_at_ms + DISTRUST_MS
    assert [log["event"] for log in logs].count("server_clock_wrong") == 1
    assert await noted(nodes) == [None] * 3
    await until_distrusted(right)


@pytest.mark.parametrize("step_ms", [STEP_MS, -STEP_MS])
async def test_when_every_clock_is_set_nothing_is_granted_for_the_greatest_ttl(
    nodes: list[RedisNode], serve: Serve, step_ms: int
) -> None:
    """A step forward ends all locks. After a step backward the holder can release."""
    server = await watch(nodes, serve)
    holder = await hold(server)
    stepped_at_ms = now_ms()
    await asyncio.gather(*(node.step_clock(step_ms) for node in nodes))
    if step_ms < 0:
        await until_distrusted(server, 0, 1, 2)
        assert await noted(nodes) == [None] * 3  # the server's own clock may have stepped
        await holder.release()
    rival = await hold(server)
    assert rival.granted_at_ms >= stepped_at_ms + DISTRUST_MS
    assert step_ms < 0 or rival.granted_at_ms >= holder.valid_until_ms
    assert rival.token > holder.token
    for failure in rival.failures:
        assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
        assert {node.partition("=")[2] for node in failure.metadata["nodes"].split(",")} == {"clock_set"}


async def renewed(session: SessionCaller, held: Hold) -> None:
    """Renew a lease, and check that it stays active with its token."""
    answer = (await session.renew(NAME, held.lease_id)).renew
    assert (answer.state, answer.fencing_token) == (LEASE_STATE_ACTIVE, held.token)
    await asyncio.sleep(TTL_MS / 20 / 1000)


@pytest.mark.parametrize(
    ("step_ms", "needed"),
    [(TTL_MS // 4, True), (STEP_MS, False), (-STEP_MS, True)],
    ids=["slightly", "far", "back"],
)
async def test_a_lease_is_renewed_through_a_node_whose_clock_was_set(
    nodes: list[RedisNode], serve: Serve, *, step_ms: int, needed: bool
) -> None:
    """The hold there outlived the step and is needed for a quorum, or neither. No rival gets the lock."""
    server, rivals = await watch(nodes, serve), await watch(nodes, serve)
    if needed:
        nodes[2].kill()
        for each in (server, rivals):
            await each.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
    held = await hold(server)
    rival = asyncio.create_task(hold(rivals))
    try:
        async with SessionCaller(server) as session:
            await renewed(session, held)
            await nodes[0].step_clock(step_ms)
            stepped_at_ms = now_ms()
            # The votes do not count at first, and a hold ends once they count again.
            while now_ms() < stepped_at_ms + DISTRUST_MS + TTL_MS:
                await renewed(session, held)
            assert not rival.done()
            await held.release()
            assert (await rival).token > held.token
    finally:
        rival.cancel()


async def test_a_hold_that_a_clock_kept_alive_through_a_quarantine_counts_for_nobody(
    nodes_with_clocks: FreshNodes, serve: Serve
) -> None:
    """The node came up with its clock behind. Its old hold must not be renewed beside the next holder."""
    nodes = await nodes_with_clocks(3, appendfsync="everysec")
    await form(nodes, ttl_ms_max=TTL_MS)
    server = await serve(nodes, node_timeout_ms=TTL_MS)
    await server.until_states(*[NODE_STATE_READY] * 3)
    lease = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    # As if the mint had never reached it.
    await nodes[2].call("DEL", f"redfence:lock:{NAME}")
    nodes[0].kill()
    await nodes[0].step_clock(-STEP_MS)
    await nodes[0].start()
    async with SessionCaller(server) as session:

        async def back() -> bool:
            # The hold stays on the second node alone, so no quorum confirms it.
            assert (await session.renew(NAME, lease.lease_id)).renew.state != LEASE_STATE_ACTIVE
            return all(node.state == NODE_STATE_READY for node in (await server.status()).nodes)

        await until(back, timeout_s=20)
        assert (await session.renew(NAME, lease.lease_id)).renew.state != LEASE_STATE_ACTIVE
    # The votes of the node count one greatest ttl later, because its clock was set.
    assert (await hold(server)).token > lease.fencing_token
