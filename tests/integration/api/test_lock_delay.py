"""A lock that was lost stays closed for its lock delay: real nodes, two servers, both transports."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

import redfence
from harness.processes.servers import FormedNodes, LockServer, Serve, call_counts, new_lease_id, until
from redfence._cli.lock import EXIT_LEASE_LOST
from redfence_proto.v1 import lock_pb2

NAME = "orders/42"
# Longer than any test: what opens the lock before is no clock.
LONG_S = 120.0


async def seen_closed(client: redfence.AsyncClient) -> redfence.Hold:
    """Return the hold once a quorum of nodes says that it is closed."""
    found: list[redfence.Hold] = []

    async def is_closed() -> bool:
        current = (await client.get_lock(NAME)).current
        if current is not None and current.closed:
            found.append(current)
        return bool(found)

    await until(is_closed)
    return found[0]


async def waiting_at(server: LockServer, client: redfence.AsyncClient) -> asyncio.Task[redfence.AsyncLease]:
    """Return an acquire that waits at this server."""
    waiting = asyncio.create_task(client.acquire(NAME, ttl=10))
    await server.until_waiting(NAME)
    return waiting


@pytest.mark.slow
async def test_the_lock_of_a_holder_that_is_stopped_is_closed_to_all(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """SIGSTOP past the lease: the other server's waiter gets nothing. The holder goes on, and has lost."""
    nodes = await formed_nodes(3)
    server, other = await serve(nodes), await serve(nodes)
    command = ("lock", "--ttl", "1s", "--lock-delay", f"{LONG_S:.0f}s", "--server", server.target)
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "redfence", *command, NAME, "sleep", "600"), stderr=asyncio.subprocess.DEVNULL
    )
    async with redfence.AsyncClient(other.target) as client:

        async def is_held() -> bool:
            return (await client.get_lock(NAME)).current is not None

        await until(is_held)
        os.kill(holder.pid, signal.SIGSTOP)
        waiting = await waiting_at(other, client)
        lost = await seen_closed(client)
        assert lost.remaining <= lost.lock_delay == LONG_S
        assert not (await client.check_token(NAME, lost.token)).live
        with pytest.raises(redfence.LockHeldError):
            await client.acquire(NAME, ttl=10, wait=0)
        assert not waiting.done()
        os.kill(holder.pid, signal.SIGCONT)
        async with asyncio.timeout(20):
            assert await holder.wait() == EXIT_LEASE_LOST
        await seen_closed(client)
        assert not waiting.done()
        waiting.cancel()


async def test_a_closed_lock_opens_by_itself_and_its_lease_stays_lost(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    nodes = await formed_nodes(3)
    server, other = await serve(nodes), await serve(nodes)
    granted = await server.acquire(NAME, ttl_ms=100, lock_delay_ms=400)
    async with redfence.AsyncClient(other.target) as client:
        waiting = await waiting_at(other, client)
        await seen_closed(client)
        stream = server.locks.KeepAlive()
        await stream.write(lock_pb2.KeepAliveRequest(resource=NAME, lease_id=granted.lease.lease_id))
        renewed = await stream.read()
        stream.cancel()
        assert isinstance(renewed, lock_pb2.KeepAliveResponse)
        assert renewed.state == lock_pb2.LEASE_STATE_LOST
        async with asyncio.timeout(5):
            assert (await waiting).token > granted.lease.fencing_token


async def test_a_forced_release_closes_the_lock_until_its_holder_releases_it(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    nodes = await formed_nodes(3)
    server, other = await serve(nodes), await serve(nodes)
    async with redfence.AsyncClient(server.target) as holder, redfence.AsyncClient(other.target) as client:
        lease = await holder.acquire(NAME, ttl=60, lock_delay=LONG_S)
        waiting = await waiting_at(other, client)
        request = lock_pb2.ForceReleaseRequest(resource=NAME, fencing_token=lease.token)
        forced = await server.admin.ForceRelease(request)
        assert forced.outcome == lock_pb2.FORCE_RELEASE_OUTCOME_RELEASED
        await seen_closed(client)
        again = await server.admin.ForceRelease(request)
        assert again.outcome == lock_pb2.FORCE_RELEASE_OUTCOME_NOT_HELD
        listed = await server.admin.ListLocks(lock_pb2.ListLocksRequest())
        assert [each.current.closed for each in listed.locks] == [True]
        before = sum(await call_counts(nodes, "evalsha"))
        assert not (await other.acquire(NAME, wait_ms=400)).HasField("lease")
        # The waiters know when the lock opens, so only the arrival calls for a try.
        assert sum(await call_counts(nodes, "evalsha")) - before <= 3 * len(nodes)
        assert not waiting.done()
        assert not await lease.release(), "the lease was not held any more"
        async with asyncio.timeout(5):
            assert (await waiting).token > lease.token


async def test_a_waiter_waits_through_the_delay_without_polling_even_for_its_own_lease(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A client that repeats the Acquire of its lost lease gets no grant either."""
    nodes = await formed_nodes(3)
    server = await serve(nodes)
    lease_id = new_lease_id()
    await server.acquire(NAME, ttl_ms=100, lock_delay_ms=60_000, lease_id=lease_id)
    async with redfence.AsyncClient(server.target) as client:
        await seen_closed(client)
    before = sum(await call_counts(nodes, "evalsha"))
    repeated = [server.acquire(NAME, ttl_ms=100, wait_ms=400, lease_id=lease_id) for _ in range(2)]
    for again in await asyncio.gather(*repeated):
        assert again.outcome == lock_pb2.ACQUIRE_OUTCOME_WAIT_TIMEOUT
        assert again.current.closed
        assert again.current.remaining.seconds > 50
    # A try for each arrival, and one more for each end of a wait.
    assert sum(await call_counts(nodes, "evalsha")) - before <= 4 * len(nodes)
