"""Several servers: leases and calls survive as long as one of them is well."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import redfence
from harness.doubles.grpc_fake import GrpcFake, serving
from harness.processes.ports import free_port
from harness.time.eventually import eventually
from redfence._clock import SystemClock
from redfence._fake.server import FakeServer


@pytest.fixture
def pair() -> Iterator[tuple[GrpcFake, GrpcFake]]:
    """Two servers over the same leases, as two replicas over the same nodes are."""
    shared = FakeServer(SystemClock())
    with serving(shared) as first, serving(shared) as second:
        yield first, second


def _addresses(pair: tuple[GrpcFake, GrpcFake]) -> tuple[str, str]:
    return pair[0].address, pair[1].address


async def test_a_lease_survives_the_death_of_its_server(pair: tuple[GrpcFake, GrpcFake]) -> None:
    """The client goes on at the other one and renews there, long before the deadline."""
    async with redfence.AsyncClient(*_addresses(pair)) as client, client.lock("r", ttl=1.5) as lease:
        await asyncio.to_thread(pair[0].stop)
        renewals = pair[0].server.counts.get("renew", 0)
        await eventually(lambda: pair[0].server.counts.get("renew", 0) > renewals + 1)
        lease.raise_if_lost()
        assert await (await client.acquire("other", ttl=10)).release()


@pytest.mark.slow
def test_a_threads_lease_survives_the_death_of_its_server(pair: tuple[GrpcFake, GrpcFake]) -> None:
    """The same for the client for threads."""
    with redfence.Client(*_addresses(pair)) as client, client.lock("r", ttl=1.5) as lease:
        pair[0].stop()
        assert client.acquire("other", ttl=10).release()
        assert not lease.lost.wait(1.0)


async def test_a_waiting_acquire_moves_to_the_other_server(pair: tuple[GrpcFake, GrpcFake]) -> None:
    """Its server dies while it waits; it waits on at the other, and is granted there."""
    async with (
        redfence.AsyncClient(pair[1].address) as holder,
        redfence.AsyncClient(*_addresses(pair)) as client,
    ):
        held = await holder.acquire("r", ttl=10)
        waiting = asyncio.create_task(client.acquire("r", ttl=10))
        await eventually(lambda: pair[0].server.waiters("r") == 1)
        await asyncio.to_thread(pair[0].stop)
        await eventually(lambda: pair[1].server.waiters("r") == 1)
        await held.release()
        assert (await asyncio.wait_for(waiting, 5)).token == held.token + 1


async def test_a_drain_disturbs_nobody(pair: tuple[GrpcFake, GrpcFake]) -> None:
    """Waiting acquires and leases go on elsewhere; no caller sees an error."""
    async with redfence.AsyncClient(*_addresses(pair)) as client, client.lock("held", ttl=10) as lease:
        waiting = asyncio.create_task(client.acquire("held", ttl=10))
        await eventually(lambda: pair[0].server.waiters("held") == 1)
        pair[0].server.drain()
        await eventually(lambda: pair[0].server.waiters("held") == 1)
        assert await (await client.acquire("other", ttl=10)).release()
        lease.raise_if_lost()
        await lease.release()
        assert (await asyncio.wait_for(waiting, 5)).token == lease.token + 1


async def test_an_unreachable_first_address_costs_no_error(pair: tuple[GrpcFake, GrpcFake]) -> None:
    """Nobody listens there: the next address is tried at once."""
    async with redfence.AsyncClient(f"127.0.0.1:{free_port()}", pair[0].address) as client:
        async with asyncio.timeout(2):
            assert (await client.cluster_status()).ready
            assert await (await client.acquire("r", ttl=10)).release()


@pytest.mark.slow
async def test_with_no_server_at_all_calls_fail_in_time_and_not_before() -> None:
    """Never a hang: UnavailableError after the rpc timeout, naming what was tried."""
    # Time enough to try on a machine that stands still for a while.
    options = redfence.ClientOptions(rpc_timeout_ms=1_000)
    async with redfence.AsyncClient(f"127.0.0.1:{free_port()}", options=options) as client:
        for call in (
            client.acquire("r", ttl=10),
            client.acquire("r", ttl=10, wait=0),
            client.cluster_status(),
        ):
            async with asyncio.timeout(3):
                with pytest.raises(redfence.UnavailableError, match="refused the connection") as failed:
                    await call
            assert isinstance(failed.value.__cause__, redfence.UnavailableError)


def test_with_no_server_at_all_a_threads_calls_fail_in_time() -> None:
    """The same for the client for threads."""
    options = redfence.ClientOptions(rpc_timeout_ms=300)
    with redfence.Client(f"127.0.0.1:{free_port()}", options=options) as client:
        with pytest.raises(redfence.UnavailableError):
            client.acquire("r", ttl=10)
        with pytest.raises(redfence.UnavailableError):
            client.cluster_status()


async def test_a_client_finds_its_server_again_after_a_restart(pair: tuple[GrpcFake, GrpcFake]) -> None:
    """One address only: the server goes and comes back, and the next call works."""
    async with redfence.AsyncClient(pair[0].address) as client:
        assert await (await client.acquire("r", ttl=10)).release()
        await asyncio.to_thread(pair[0].stop)
        acquiring = asyncio.create_task(client.acquire("r", ttl=10))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(pair[0].start)
        assert await (await asyncio.wait_for(acquiring, 5)).release()


@pytest.mark.slow
async def test_a_frozen_server_is_left_after_the_rpc_timeout_and_the_outcome_is_unknown(
    pair: tuple[GrpcFake, GrpcFake],
) -> None:
    """The acquire may be granted when the server wakes up, so its Release is waiting there, and goes to the next server too."""
    # Time enough to connect and to send on a machine that stands still for a while.
    options = redfence.ClientOptions(rpc_timeout_ms=1_500)
    async with redfence.AsyncClient(pair[0].address, options=options) as client:
        await client.cluster_status()
        pair[0].server.frozen = True
        with pytest.raises(redfence.OutcomeUnknownError):
            await client.acquire("r", ttl=60, wait=0)
        pair[0].server.thaw()
        await eventually(lambda: pair[0].server.counts.get("release", 0) >= 1)
        await eventually(lambda: pair[0].server.hold_of("r") is None)


async def test_wrong_credentials_or_a_wrong_service_do_not_hang() -> None:
    """Something listens that is no lock server: the calls end in time."""

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    options = redfence.ClientOptions(rpc_timeout_ms=300, connect_timeout_ms=100)
    async with listener, redfence.AsyncClient(f"{host}:{port}", options=options) as client:
        with pytest.raises(redfence.UnavailableError):
            await asyncio.wait_for(client.acquire("r", ttl=10), 3)
