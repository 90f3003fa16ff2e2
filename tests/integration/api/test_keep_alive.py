"""KeepAlive over real nodes and real gRPC."""

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
    LEASE_STATE_ACTIVE,
    LEASE_STATE_LOST,
    LEASE_STATE_REASON_NOT_HELD,
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


async def test_a_lease_that_has_ended_is_lost_and_its_renewal_changes_nothing(
    server: LockServer, keep_alive: KeepAliveCaller
) -> None:
    """A waiter gets the expired lock, and not within the validity of the lease before."""
    released = (await server.acquire("released")).lease
    assert (await keep_alive.renew("released", released.lease_id)).state == LEASE_STATE_ACTIVE
    await server.release("released", released.lease_id)
    sent_at_ms = now_ms()
    # A machine that stalls would get no grant with a shorter ttl.
    expired = (await server.acquire("expired", ttl_ms=700)).lease
    following = (await server.acquire("expired", wait_ms=5_000)).lease
    assert now_ms() >= sent_at_ms + expired.validity.ToMilliseconds()
    assert following.fencing_token > expired.fencing_token
    await server.until_carried_out()
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
    await server.until_carried_out()
    assert await memories(server.nodes) == before
    assert (await keep_alive.renew("expired", following.lease_id)).state == LEASE_STATE_ACTIVE


async def test_one_stream_renews_many_leases_and_keeps_the_order_of_each(
    server: LockServer, keep_alive: KeepAliveCaller
) -> None:
    """After a half-close the server answers everything and ends the stream with OK. No lease ends."""
    granted = await asyncio.gather(*(server.acquire(f"orders/{number}") for number in range(20)))
    leases = {response.lease.resource: response.lease.lease_id for response in granted}
    sent = [
        (name, await keep_alive.send(name, lease_id)) for _ in range(10) for name, lease_id in leases.items()
    ]
    await keep_alive.call.done_writing()
    received = [await keep_alive.receive() for _ in sent]
    assert {(response.state, response.reason) for response in received} == {
        (LEASE_STATE_ACTIVE, LEASE_STATE_REASON_UNSPECIFIED)
    }
    # The ttl less drift, counted from the sending of the renewal.
    assert {response.validity.ToMilliseconds() for response in received} == {10_000 - 102}
    tokens = {response.lease.resource: response.lease.fencing_token for response in granted}
    assert all(response.fencing_token == tokens[response.resource] for response in received)
    assert sorted((response.resource, response.sequence) for response in received) == sorted(sent)
    for name in leases:
        sequences = [response.sequence for response in received if response.resource == name]
        assert sequences == sorted(sequences)
    assert await keep_alive.call.read() is grpc.aio.EOF
    assert await keep_alive.call.code() is grpc.StatusCode.OK
    assert (await server.check("orders/0", granted[0].lease.fencing_token)).state == TOKEN_STATE_LIVE


async def test_a_cancelled_stream_releases_nothing(server: LockServer, keep_alive: KeepAliveCaller) -> None:
    lease = (await server.acquire(NAME)).lease
    await keep_alive.renew(NAME, lease.lease_id)
    await server.until_carried_out()
    before = await memories(server.nodes)
    keep_alive.call.cancel()

    async def ended() -> bool:
        return not (await server.admin.ListSessions(lock_pb2.ListSessionsRequest())).sessions

    await until(ended)
    await server.until_carried_out()
    assert await memories(server.nodes) == before
    async with KeepAliveCaller(server) as another:
        assert (await another.renew(NAME, lease.lease_id)).state == LEASE_STATE_ACTIVE


async def test_a_drain_tells_every_stream_ends_it_with_ok_and_ends_no_lease(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The holder goes on at another server."""
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


async def test_a_renewal_that_waits_for_a_slow_node_is_answered_before_a_later_one(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The server could decide the later one at once. Out of order, LOST would come before ACTIVE."""
    nodes = await formed_nodes(3)
    # No heartbeat may pass between the server and the nodes.
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
    """A call that arrives late does not delay the end of the server; a renewal in it gets no answer."""
    server = await serve(await formed_nodes(3))
    lease = (await server.acquire(NAME)).lease
    await server.begin_drain()
    async with KeepAliveCaller(server) as keep_alive, SessionCaller(server) as session:
        try:
            await keep_alive.send(NAME, lease.lease_id)
            assert (await keep_alive.receive()).HasField("draining")
            assert await keep_alive.call.read() is grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            # gRPC's own client fails so if the stream has ended before its write.
            if error.code() is not grpc.StatusCode.INTERNAL:
                raise
        assert await session.ended() is None
        assert session.draining is not None
    failure = await failure_of(server.acquire(NAME))
    assert failure.reason == lock_pb2.ERROR_REASON_DRAINING
