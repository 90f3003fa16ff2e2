"""What operators see and end: AdminService over real nodes and real gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest

import redfence
from harness.load.failures import failure_of
from harness.processes.servers import FormedNodes, LockServer, Serve, locks_left, until_no_locks
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    FORCE_RELEASE_OUTCOME_NOT_HELD,
    FORCE_RELEASE_OUTCOME_OTHER_TOKEN,
    FORCE_RELEASE_OUTCOME_RELEASED,
    LEASE_STATE_LOST,
    LEASE_STATE_REASON_FORCED,
    LEASE_STATE_REASON_NOT_HELD,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
)

NAME = "orders/42"


async def force(
    server: LockServer, token: int, *, resource: str = NAME, reason: str = ""
) -> lock_pb2.ForceReleaseResponse:
    """Call ForceRelease."""
    request = lock_pb2.ForceReleaseRequest(resource=resource, fencing_token=token, reason=reason)
    return await server.admin.ForceRelease(request)


async def renewed(server: LockServer, lease: lock_pb2.Lease) -> tuple[int, int]:
    """Renew a lease once over a new stream; return its state and the reason."""
    stream = server.locks.KeepAlive()
    await stream.write(lock_pb2.KeepAliveRequest(resource=lease.resource, lease_id=lease.lease_id))
    response = await stream.read()
    stream.cancel()
    assert isinstance(response, lock_pb2.KeepAliveResponse)
    return response.state, response.reason


async def test_a_forced_release_ends_the_lease_with_the_token_and_tells_its_holder(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The waiter is granted at once, with a greater token. Any server says FORCED."""
    nodes = await formed_nodes(3)
    server = await serve(nodes)
    lease = (await server.acquire(NAME, ttl_ms=60_000, holder="stuck")).lease
    waiting = asyncio.create_task(server.acquire(NAME, ttl_ms=60_000, wait_ms=30_000))
    await server.until_waiting(NAME)
    ended = await force(server, lease.fencing_token, reason="its machine is gone")
    assert (ended.outcome, ended.HasField("current")) == (FORCE_RELEASE_OUTCOME_RELEASED, False)
    async with asyncio.timeout(5):
        following = await waiting
    assert following.outcome == ACQUIRE_OUTCOME_GRANTED
    assert following.lease.fencing_token > lease.fencing_token
    other = await serve(nodes)
    for each in (server, other):
        assert await renewed(each, lease) == (LEASE_STATE_LOST, LEASE_STATE_REASON_FORCED)
        assert (await renewed(each, following.lease))[0] != LEASE_STATE_LOST
    # The same call again finds the next lease, and leaves it alone.
    again = await force(other, lease.fencing_token)
    assert again.outcome == FORCE_RELEASE_OUTCOME_OTHER_TOKEN
    assert again.current.fencing_token == following.lease.fencing_token


async def test_a_forced_release_of_a_free_lock_or_another_token_changes_nothing(server: LockServer) -> None:
    assert (await force(server, 7)).outcome == FORCE_RELEASE_OUTCOME_NOT_HELD
    lease = (await server.acquire(NAME, holder="them")).lease
    for token in (lease.fencing_token - 1 or lease.fencing_token + 2, lease.fencing_token + 1, 2**53 - 1):
        other = await force(server, token)
        assert other.outcome == FORCE_RELEASE_OUTCOME_OTHER_TOKEN
        assert (other.current.holder, other.current.fencing_token) == ("them", lease.fencing_token)
    assert (await server.look(NAME)).current.fencing_token == lease.fencing_token
    await server.release(NAME, lease.lease_id)
    assert (await force(server, lease.fencing_token)).outcome == FORCE_RELEASE_OUTCOME_NOT_HELD
    assert await renewed(server, lease) == (LEASE_STATE_LOST, LEASE_STATE_REASON_NOT_HELD)


@pytest.mark.slow
async def test_a_node_that_missed_a_forced_release_hears_of_it_when_it_is_back(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A quorum decides, without the node; it is no longer than one ttl behind anyway."""
    server = await serve(await formed_nodes(3), proxied=True)
    lease = (await server.acquire(NAME, ttl_ms=60_000)).lease
    server.proxies[0].refuse()
    await server.until_states(NODE_STATE_UNREACHABLE, NODE_STATE_READY, NODE_STATE_READY)
    assert (await force(server, lease.fencing_token)).outcome == FORCE_RELEASE_OUTCOME_RELEASED
    assert await locks_left(server.nodes[:1])
    await server.proxies[0].heal()
    await until_no_locks(server.nodes, timeout_s=15)


async def test_a_forced_release_with_a_malformed_field_names_it(server: LockServer) -> None:
    for request, field in (
        (lock_pb2.ForceReleaseRequest(fencing_token=1), "resource"),
        (lock_pb2.ForceReleaseRequest(resource=NAME), "fencing_token"),
        (lock_pb2.ForceReleaseRequest(resource=NAME, fencing_token=1, reason="a\nb"), "reason"),
        (lock_pb2.ForceReleaseRequest(resource=NAME, fencing_token=1, reason="x" * 257), "reason"),
    ):
        failure = await failure_of(server.admin.ForceRelease(request))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.metadata == {"field": field}


async def test_the_client_of_a_forced_lease_says_that_an_operator_ended_it(server: LockServer) -> None:
    async with redfence.AsyncClient(server.target) as client:
        lease = await client.acquire(NAME, ttl=3)
        assert (await force(server, lease.token)).outcome == FORCE_RELEASE_OUTCOME_RELEASED
        async with asyncio.timeout(5):
            await lease.lost.wait()
        with pytest.raises(redfence.LeaseLostError, match="an operator ended it") as lost:
            lease.raise_if_lost()
        assert lost.value.reason is redfence.LossReason.FORCED
