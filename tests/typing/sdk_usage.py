"""The SDK's public typing: this file only has to type-check."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import timedelta
from typing import assert_type

import grpc

import redfence
from redfence import fence, propagation
from redfence.testing import FakeLockServer, ManualClock
from redfence_storage.client import AsyncStorageClient, StorageClient
from redfence_storage.client_messages import PutResult


async def asynchronous() -> None:
    """The client for asyncio."""
    options = redfence.ClientOptions(rpc_timeout=1)
    async with redfence.AsyncClient("127.0.0.1:50051", "other:50051", options=options) as client:
        assert_type(client, redfence.AsyncClient)
        async with client.lock("orders/42", ttl=10, wait=None, holder="billing") as lease:
            assert_type(lease, redfence.AsyncLease)
            assert_type(lease.token, int)
            assert_type(lease.remaining(), float)
            assert_type(lease.lost.is_set(), bool)
            assert_type(await lease.lost, bool)
            assert_type(await lease.lost.wait(), bool)
            assert_type(lease.owned(), bool)
            lease.raise_if_lost()
            assert_type(redfence.current_lease(), redfence.AsyncLease | redfence.Lease | None)
            async for state in lease.events():
                assert_type(state, redfence.LeaseState)

        @client.lock("orders/42", ttl=10, on_at_risk=lambda lease: lease.token, on_lost=print)
        async def pay(order: int, *, currency: str) -> bytes:
            return f"{order} {currency}".encode()

        assert_type(await pay(42, currency="EUR"), bytes)
        await pay("42", currency="EUR")  # type: ignore[arg-type]
        assert_type(await client.try_run("r", asyncio.sleep, 1.0, ttl=10), bool)
        held = await client.acquire("r", ttl=timedelta(seconds=10), wait=0.5, max_hold=60)
        assert_type(await held.release(), bool)
        report = await client.get_lock("r")
        assert_type(report.current, redfence.Hold | None)
        assert_type((report.waiters, report.position), tuple[int, int])
        assert_type(report.queue, tuple[redfence.QueuedAcquire, ...])
        assert_type((await client.check_token("r", 1)).live, bool)
        assert_type((await client.check_token(held)).live, bool)
        assert_type((await client.cluster_status()).nodes, tuple[redfence.NodeReport, ...])


def threads() -> None:
    """The client for threads."""
    credentials = grpc.ssl_channel_credentials()
    with redfence.Client("a:1", credentials=credentials, metadata=(("authorization", "Bearer x"),)) as client:
        assert_type(client, redfence.Client)
        with client.lock("orders/42", ttl=10, wait=0) as lease:
            assert_type(lease, redfence.Lease)
            assert_type(lease.state, redfence.LeaseState)
            assert_type(lease.lost.wait(timeout=1.0), bool)
        assert_type(client.acquire("r", ttl=10).release(), bool)
        lock = client.lock("orders/42", ttl=10, on_lost=lambda lease: lease.token)
        assert_type(lock.locked(), bool)

        @lock
        def pay(order: int, *, currency: str) -> bytes:
            return f"{order} {currency}".encode()

        assert_type(pay(42, currency="EUR"), bytes)
        pay("42", currency="EUR")  # type: ignore[arg-type]
        assert_type(client.try_run("r", pow, 2, 3, ttl=10), bool)


def errors() -> None:
    """What can be caught, and what it tells."""
    try:
        threads()
    except redfence.LockHeldError as held:
        assert_type(held.holder, str)
        assert_type(held.token, int | None)
        assert_type(held.remaining, float | None)
    except redfence.AcquireTimeoutError as ran_out:
        assert_type(ran_out.position, int)
    except redfence.LeaseLostError as lost:
        assert_type(lost.reason, redfence.LossReason)
    except redfence.StaleTokenError as stale:
        assert_type(stale.highest_token, int)
    except redfence.InvalidArgumentError as invalid:
        assert_type(invalid.field, str)
    except redfence.OverloadedError as overloaded:
        assert_type(overloaded.scope, str)
    except redfence.UnavailableError as unavailable:
        assert_type(unavailable.retry_after, float | None)
    except redfence.RedfenceError as error:
        assert_type(error.error_reason, str)


async def storage() -> None:
    """The storage's clients take a lease where a token is wanted."""
    async with (
        redfence.AsyncClient("a:1") as client,
        AsyncStorageClient("a:2") as storage,
        client.lock("orders/42", ttl=10) as lease,
    ):
        assert_type(await storage.put("orders/42", key="total", value=b"17", token=lease), PutResult)
        assert_type((await storage.get("orders/42", key="total", token=lease.token)).value, bytes)
        await storage.put("orders/42", "total", b"17", token=lease)  # type: ignore[call-arg]
    with redfence.Client("a:1") as blocking, StorageClient("a:2") as blocking_storage:
        blocking_storage.fence("orders/42", token=blocking.acquire("orders/42", ttl=10))


async def fencing(connection: sqlite3.Connection) -> None:
    """A token goes with a call, and into the caller's own database."""
    headers = propagation.to_headers(redfence.current_lease("orders/42"))
    assert_type(headers, dict[str, str])
    assert_type(propagation.to_metadata(redfence.FencingToken("orders/42", 1)), tuple[tuple[str, str], ...])
    token = propagation.from_headers(headers)
    assert_type(token, redfence.FencingToken | None)
    assert_type(propagation.from_metadata([("redfence-token", b"1")]), redfence.FencingToken | None)
    fence.check(connection, token, resource="orders/42")
    fence.check(connection.cursor(), 1, resource="orders/42", table="app.fences", paramstyle="qmark")
    await fence.check_async(connection, redfence.current_lease())
    assert_type(fence.create_table_sql(), str)
    fence.check(connection, "1", resource="orders/42")  # type: ignore[arg-type]


def testing() -> None:
    """The server in memory."""
    with FakeLockServer(ManualClock()) as fake:
        assert_type(fake.client(), redfence.Client)
        assert_type(fake.async_client("a", "b"), redfence.AsyncClient)
        assert_type(fake.take_away("r"), int)


def wrong() -> None:
    """What must not type-check."""
    client = redfence.Client("a:1")
    client.acquire("r")  # type: ignore[call-arg]
    client.acquire("r", ttl="10")  # type: ignore[arg-type]
    client.acquire("r", 10)  # type: ignore[call-arg]
    client.acquire("r", ttl=10, on_lost=lambda: None)  # type: ignore[misc, arg-type]
    client.try_run("r", len, 7, ttl=10)  # type: ignore[arg-type]
    redfence.AsyncClient("a:1").lock("r", ttl=10)(len)  # type: ignore[arg-type]
    asyncio.run(client.acquire("r", ttl=1))  # type: ignore[arg-type]
