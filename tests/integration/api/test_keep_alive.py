"""KeepAlive over real nodes and real gRPC: what becomes of leases whose holders renew them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc
import pytest

from harness.load.failures import failure_of
from harness.load.session_caller import SessionCaller
from harness.processes.servers import FormedNodes, LockServer, Serve, memories, new_lease_id, now_ms, until
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_HELD,
    LEASE_STATE_ACTIVE,
    LEASE_STATE_AT_RISK,
    LEASE_STATE_LOST,
    LEASE_STATE_REASON_NOT_HELD,
    LEASE_STATE_REASON_QUORUM_UNAVAILABLE,
    LEASE_STATE_REASON_UNSPECIFIED,
    NODE_STATE_READY,
    TOKEN_STATE_LIVE,
)

NAME = "orders/42"
Response = lock_pb2.KeepAliveResponse


class KeepAliveCaller:
    """One open KeepAlive stream."""

    def __init__(self, server: LockServer) -> None:
        self.call: grpc.aio.StreamStreamCall[Any, Any] = server.locks.KeepAlive()
        self._sequence = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call.cancel()

    async def send(self, resource: str, lease_id: str) -> int:
        """Send one renewal and return its sequence."""
        self._sequence += 1
        request = lock_pb2.KeepAliveRequest(resource=resource, lease_id=lease_id, sequence=self._sequence)
        await self.call.write(request)
        return self._sequence

    async def receive(self) -> Response:
        """Return the next response."""
        response = await self.call.read()
        assert isinstance(response, Response), "the stream has ended"
        return response

    async def renew(self, resource: str, lease_id: str) -> Response:
        """Renew once and return the answer; nothing else may be outstanding."""
        sequence = await self.send(resource, lease_id)
        response = await self.receive()
        assert (response.resource, response.sequence) == (resource, sequence)
        return response


@pytest.fixture
async def keep_alive(server: LockServer) -> AsyncIterator[KeepAliveCaller]:
    async with KeepAliveCaller(server) as keep_alive:
        yield keep_alive


@pytest.mark.slow
async def test_renewals_keep_a_lease_beyond_its_ttl_with_the_same_token(
    server: LockServer, keep_alive: KeepAliveCaller
) -> None:
    """For twice its ttl the lease stays ACTIVE, and nobody else is granted."""
    acquired_at_ms = now_ms()
    # Long enough for a machine that stands still for a second.
    lease = (await server.acquire(NAME, ttl_ms=1_500)).lease
    while now_ms() - acquired_at_ms < 3_000:
        sent_at_ms = now_ms()
        response = await keep_alive.renew(NAME, lease.lease_id)
        assert (response.state, response.reason) == (LEASE_STATE_ACTIVE, LEASE_STATE_REASON_UNSPECIFIED)
        assert response.fencing_token == lease.fencing_token
        # Counted from the sending of this very renewal: a ttl less drift, whatever was left before.
        assert response.validity.ToMilliseconds() == 1_500 - 17
        assert now_ms() < sent_at_ms + response.validity.ToMilliseconds()
        assert (await server.acquire(NAME)).outcome == ACQUIRE_OUTCOME_HELD
        await asyncio.sleep(0.03)
    assert (await server.check(NAME, lease.fencing_token)).state == TOKEN_STATE_LIVE


async def test_a_released_an_expired_and_an_unknown_lease_are_lost_and_stay_lost(
    server: LockServer, keep_alive: KeepAliveCaller
) -> None:
    """A renewal never makes a hold: what is over is LOST, and every node is as before."""
    released = (await server.acquire("released")).lease
    await server.release("released", released.lease_id)
    # Shorter, and a machine that stands still for a moment would be granted nothing.
    expired = (await server.acquire("expired", ttl_ms=700)).lease

    async def gone() -> bool:
        return not any(node.HasField("hold") for node in (await server.look("expired")).nodes)

    await until(gone)
    before = await memories(server.nodes)
    for name, lease_id in (
        ("released", released.lease_id),
        ("expired", expired.lease_id),
        ("unknown", new_lease_id()),
    ):
        for _ in range(2):
            response = await keep_alive.renew(name, lease_id)
            assert (response.state, response.reason) == (LEASE_STATE_LOST, LEASE_STATE_REASON_NOT_HELD)
            assert not response.fencing_token
            assert not response.HasField("validity")
    assert await memories(server.nodes) == before


async def test_a_lease_that_another_one_follows_is_lost_and_does_not_disturb_it(
    server: LockServer, keep_alive: KeepAliveCaller
) -> None:
    """Whoever renews too late learns it, and the new holder's time is not touched."""
    first = (await server.acquire(NAME, ttl_ms=700)).lease
    second = await server.acquire(NAME, wait_ms=5_000)
    before = await memories(server.nodes)
    assert (await keep_alive.renew(NAME, first.lease_id)).state == LEASE_STATE_LOST
    assert await memories(server.nodes) == before
    assert (await keep_alive.renew(NAME, second.lease.lease_id)).state == LEASE_STATE_ACTIVE


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 5])
async def test_without_a_quorum_a_lease_is_at_risk_and_active_again_once_the_network_heals_in_time(
    count: int, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """One failed renewal loses nothing: the lease keeps its token when a quorum is back before its ttl ends."""
    server = await serve(await formed_nodes(count), proxied=True, node_timeout_ms=1_000)
    await server.until_states(*[NODE_STATE_READY] * count)
    lease = (await server.acquire(NAME, ttl_ms=30_000)).lease
    cut = server.proxies[: count // 2 + 1]
    async with KeepAliveCaller(server) as keep_alive:
        for proxy in cut:
            proxy.hold()
        at_risk = await keep_alive.renew(NAME, lease.lease_id)
        assert at_risk.state == LEASE_STATE_AT_RISK
        assert at_risk.reason == LEASE_STATE_REASON_QUORUM_UNAVAILABLE
        assert not at_risk.HasField("validity")
        for proxy in cut:
            await proxy.heal()

        async def active() -> bool:
            return (await keep_alive.renew(NAME, lease.lease_id)).state == LEASE_STATE_ACTIVE

        await until(active)
        assert (await keep_alive.renew(NAME, lease.lease_id)).fencing_token == lease.fencing_token


async def test_one_stream_carries_many_leases_and_answers_those_of_one_lease_in_order(
    server: LockServer, keep_alive: KeepAliveCaller
) -> None:
    """Twenty leases renewed ten times each without waiting: every request is answered, each lease's in sequence."""
    leases = {
        response.lease.resource: response.lease.lease_id
        for response in await asyncio.gather(*(server.acquire(f"orders/{number}") for number in range(20)))
    }
    sent = [
        (name, await keep_alive.send(name, lease_id)) for _ in range(10) for name, lease_id in leases.items()
    ]
    received = [await keep_alive.receive() for _ in sent]
    assert {response.state for response in received} == {LEASE_STATE_ACTIVE}
    assert sorted((response.resource, response.sequence) for response in received) == sorted(sent)
    for name in leases:
        sequences = [response.sequence for response in received if response.resource == name]
        assert sequences == sorted(sequences)


async def test_a_release_between_two_renewals_of_a_lease_is_seen_by_the_second(
    server: LockServer, keep_alive: KeepAliveCaller
) -> None:
    """Renewing never outruns a release that was answered."""
    lease = (await server.acquire(NAME)).lease
    assert (await keep_alive.renew(NAME, lease.lease_id)).state == LEASE_STATE_ACTIVE
    await server.release(NAME, lease.lease_id)
    assert (await keep_alive.renew(NAME, lease.lease_id)).state == LEASE_STATE_LOST


@pytest.mark.parametrize("how", ["half-close", "cancel"])
async def test_closing_the_stream_releases_nothing(
    how: str, server: LockServer, keep_alive: KeepAliveCaller
) -> None:
    """The lease lives on until its ttl ends, for whoever has its id."""
    lease = (await server.acquire(NAME)).lease
    await keep_alive.renew(NAME, lease.lease_id)
    before = await memories(server.nodes)
    if how == "cancel":
        keep_alive.call.cancel()
    else:
        await keep_alive.call.done_writing()
        assert await keep_alive.call.read() is grpc.aio.EOF
        assert await keep_alive.call.code() is grpc.StatusCode.OK
    assert await memories(server.nodes) == before
    async with KeepAliveCaller(server) as another:
        assert (await another.renew(NAME, lease.lease_id)).state == LEASE_STATE_ACTIVE


async def test_a_half_closed_stream_answers_what_was_sent_before_and_ends_with_ok(
    server: LockServer, keep_alive: KeepAliveCaller
) -> None:
    """No renewal is lost by hanging up politely."""
    lease = (await server.acquire(NAME)).lease
    for _ in range(10):
        await keep_alive.send(NAME, lease.lease_id)
    await keep_alive.call.done_writing()
    received = [await keep_alive.receive() for _ in range(10)]
    assert [response.sequence for response in received] == list(range(1, 11))
    assert await keep_alive.call.read() is grpc.aio.EOF
    assert await keep_alive.call.code() is grpc.StatusCode.OK


async def test_a_draining_server_tells_every_stream_and_ends_it_with_ok_and_no_lease_is_affected(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The notice comes once, without a resource; the holder goes on at another server."""
    nodes = await formed_nodes(3)
    server, another = await serve(nodes), await serve(nodes)
    lease = (await server.acquire(NAME)).lease
    streams = [KeepAliveCaller(server) for _ in range(3)]
    for stream in streams:
        assert (await stream.renew(NAME, lease.lease_id)).state == LEASE_STATE_ACTIVE
    drained = server.drain(grace_ms=10_000)
    for stream in streams:
        notice = await stream.receive()
        assert notice.draining.grace.ToMilliseconds() == 10_000
        assert (notice.resource, notice.sequence, notice.HasField("error")) == ("", 0, False)
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK
    await asyncio.wait_for(drained, timeout=5)
    async with KeepAliveCaller(another) as stream:
        assert (await stream.renew(NAME, lease.lease_id)).fencing_token == lease.fencing_token


async def test_a_renewal_that_waits_for_a_slow_node_is_answered_before_a_later_one_of_its_lease(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The later one could be decided at once; told first, the earlier would seem to bring the lease back."""
    nodes = await formed_nodes(3)
    # What is seen on the wire is the doing of this test alone.
    server = await serve(nodes, proxied=True, node_timeout_ms=10_000, heartbeat_interval_ms=60_000)
    await server.until_states(*[NODE_STATE_READY] * 3)
    lease = (await server.acquire(NAME, ttl_ms=60_000)).lease
    await nodes[1].call("DEL", f"redfence:lock:{NAME}")
    slow = server.proxies[2]
    slow.hold(requests=False)
    async with KeepAliveCaller(server) as keep_alive:
        # One node renews, one holds nothing, and the third decides.
        undecided = await keep_alive.send(NAME, lease.lease_id)
        await eventually(lambda: slow.replies.kept_bytes)
        await nodes[0].call("DEL", f"redfence:lock:{NAME}")
        passed_bytes = [proxy.replies.passed_bytes for proxy in server.proxies[:2]]
        decided = await keep_alive.send(NAME, lease.lease_id)
        await eventually(
            lambda: all(
                proxy.replies.passed_bytes > before
                for proxy, before in zip(server.proxies[:2], passed_bytes, strict=True)
            )
        )
        # Another lease does not wait for this one.
        other = await keep_alive.send("other", new_lease_id())
        assert (await keep_alive.receive()).sequence == other
        await slow.heal()
        first, second = await keep_alive.receive(), await keep_alive.receive()
    assert (first.sequence, first.state) == (undecided, LEASE_STATE_ACTIVE)
    assert (second.sequence, second.state) == (decided, LEASE_STATE_LOST)


async def test_a_stream_opened_while_the_server_begins_to_drain_is_told_and_ended_as_well(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A call that was on its way when the signal came does not hold up the end for the whole grace."""
    server = await serve(await formed_nodes(3))
    await server.begin_drain()
    async with KeepAliveCaller(server) as keep_alive, SessionCaller(server) as session:
        assert (await keep_alive.receive()).HasField("draining")
        assert await keep_alive.call.read() is grpc.aio.EOF
        assert await session.ended() is None
        assert session.draining is not None
    failure = await failure_of(server.acquire(NAME))
    assert failure.reason == lock_pb2.ERROR_REASON_DRAINING
