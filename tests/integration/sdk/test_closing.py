"""A client that is closed while others use it ends every call, and each call tells its outcome."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from grpc import aio

import redfence
from harness.doubles.grpc_fake import GrpcFake
from harness.processes.servers import LockServer
from harness.time.eventually import eventually
from redfence._fake.links import FakeAsyncConnector, FakeSyncConnector
from redfence._transport import grpc_async_link
from redfence.testing import FakeLockServer

# The close gives up long before the calls would by themselves.
_OPTIONS = redfence.ClientOptions(rpc_timeout=60, close_timeout=0.1)
_PATIENT = redfence.ClientOptions(rpc_timeout=60, close_timeout=60)

MakeClient = Callable[..., Any]


async def _cut_short(client: redfence.AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.close(), 0.1)


async def _check_that_calls_end(client: Any, fake: GrpcFake, closing: Callable[[], Any]) -> None:
    """Check that a release and a body at a silent server end with the close."""
    released = await client.acquire("released", ttl=60)
    entered, leaving = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with client.lock("held", ttl=60):
            entered.set()
            await leaving.wait()

    working = asyncio.create_task(work())
    await entered.wait()
    fake.server.frozen = True
    leaving.set()
    releasing = asyncio.create_task(released.release())
    session = getattr(client, "inner", client)._session
    core = getattr(session, "_driver", session)._core
    await eventually(lambda: len(core._releases._pending) == 2)
    await closing()
    with pytest.raises(redfence.OutcomeUnknownError, match="closed"):
        await asyncio.wait_for(releasing, 1)
    await asyncio.wait_for(working, 1)


async def test_a_release_and_a_body_under_way_end_with_the_close(
    fake: GrpcFake, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The release ends as unknown; the body ends well, and the log tells of its unconfirmed release."""
    client = make_client(fake.address, options=_OPTIONS)
    with caplog.at_level(logging.WARNING, logger="redfence"):
        await _check_that_calls_end(client, fake, client.close)
    assert "release_failed resource='held'" in caplog.text


async def test_a_release_and_a_body_under_way_end_with_a_close_that_is_cancelled(fake: GrpcFake) -> None:
    client = redfence.AsyncClient(fake.address, options=_PATIENT)
    await _check_that_calls_end(client, fake, lambda: _cut_short(client))


async def test_closing_wakes_all_who_wait_for_a_lock(server: LockServer, make_client: MakeClient) -> None:
    """Ten callers wait for ever; each ends with ClosedError, and the server has no waiter."""
    client = make_client(server.target)
    await server.acquire("r", ttl_ms=60_000)
    waiting = [asyncio.create_task(client.acquire("r", ttl=60, wait=None)) for _ in range(10)]
    await server.until_waiting("r", count=10)
    await client.close()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 1)
    assert [str(each) for each in outcomes] == ["the client was closed during the call"] * 10
    assert {type(each) for each in outcomes} == {redfence.ClosedError}
    await server.until_waiting("r", count=0)


async def test_a_second_close_returns_with_the_first(fake: GrpcFake) -> None:
    client = redfence.AsyncClient(fake.address, options=_PATIENT)
    lease = await client.acquire("r", ttl=60)
    fake.server.frozen = True
    first = asyncio.create_task(client.close())
    second = asyncio.create_task(client.close())
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait_for(second, 2)
    assert lease.lost.is_set()


@pytest.fixture
async def slow_look(fake: GrpcFake) -> asyncio.Event:
    """Makes every GetLock of the server hang; the event is set once one does."""
    loop, reached = asyncio.get_running_loop(), asyncio.Event()

    async def hang() -> None:
        loop.call_soon_threadsafe(reached.set)
        await asyncio.Event().wait()

    fake.before_call = hang
    return reached


async def test_a_single_call_under_way_when_the_client_is_closed_ends_as_closed(
    fake: GrpcFake, slow_look: asyncio.Event, make_client: MakeClient
) -> None:
    """The call is not cancelled, because its caller did not cancel it."""
    client = make_client(fake.address, options=_OPTIONS)
    looking = asyncio.create_task(client.get_lock("r"))
    await slow_look.wait()
    await client.close()
    with pytest.raises(redfence.ClosedError):
        await asyncio.wait_for(looking, 1)


async def test_a_single_call_whose_server_drains_is_made_again(
    fake: GrpcFake, slow_look: asyncio.Event
) -> None:
    """The call goes on at the next link, and its task is not cancelled."""
    async with redfence.AsyncClient(fake.address, options=_OPTIONS) as client:
        looking = asyncio.create_task(client.get_lock("r"))
        await slow_look.wait()
        fake.before_call = None
        fake.server.drain()
        assert (await asyncio.wait_for(looking, 5)).resource == "r"


async def test_a_single_call_whose_caller_gives_up_is_cancelled(
    fake: GrpcFake, slow_look: asyncio.Event
) -> None:
    async with redfence.AsyncClient(fake.address, options=_OPTIONS) as client:
        looking = asyncio.create_task(client.get_lock("r"))
        await slow_look.wait()
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "taken"])
@pytest.mark.parametrize("turns", range(6))
async def test_a_client_that_is_closed_just_as_its_connection_is_taken_or_refused_ends(
    fake: GrpcFake, monkeypatch: pytest.MonkeyPatch, turns: int, *, refused: bool
) -> None:
    """The connection comes before or after the close, by a turn of the loop or several."""
    connecting, go_on = asyncio.Event(), asyncio.Event()

    async def is_ready(channel: aio.Channel) -> bool:
        connecting.set()
        await go_on.wait()
        return not refused

    monkeypatch.setattr(grpc_async_link, "_is_ready", is_ready)
    client = redfence.AsyncClient(fake.address, options=_OPTIONS)
    acquiring = asyncio.create_task(client.acquire("r", ttl=60))
    await connecting.wait()
    acquiring.cancel()
    await asyncio.wait([acquiring])
    asyncio.get_running_loop().call_soon(go_on.set)
    for _ in range(turns):
        await asyncio.sleep(0)
    await asyncio.wait_for(client.close(), 10)


@pytest.mark.filterwarnings("default::ResourceWarning")
async def test_what_a_program_drops_is_released_with_a_warning() -> None:
    with FakeLockServer() as fake:
        client = fake.client()
        async with fake.async_client() as async_client:
            with pytest.warns(ResourceWarning, match="<Lease 'a' token=1 .*> was dropped without a release"):
                client.acquire("a", ttl=60)
            with pytest.warns(ResourceWarning, match="<AsyncLease 'b' .* was dropped without a release"):
                await async_client.acquire("b", ttl=60)
            await eventually(lambda: fake.token("a") is fake.token("b") is None)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_client_that_a_program_drops_ends_its_threads_and_its_leases() -> None:
    with FakeLockServer() as fake:
        thread_count = threading.active_count()
        client = redfence.Client("fake", connector=FakeSyncConnector(fake._network))
        lease, lock = client.acquire("r", ttl=60), client.lock("s", ttl=60)
        lock.__enter__()
        assert (fake.token("r"), fake.token("s")) == (1, 1)
        del client, lease, lock
        await eventually(lambda: fake.token("r") is fake.token("s") is None)
        await eventually(lambda: threading.active_count() == thread_count)


@pytest.mark.filterwarnings("default::ResourceWarning")
@pytest.mark.parametrize("kind", [redfence.Client, redfence.AsyncClient])
def test_a_client_that_was_used_and_not_closed_warns(kind: Any) -> None:
    def use() -> None:
        with FakeLockServer() as fake:
            connector = FakeSyncConnector if kind is redfence.Client else FakeAsyncConnector
            called = kind("fake", connector=connector(fake._network)).cluster_status()
            if asyncio.iscoroutine(called):
                asyncio.run(called)

    def warned() -> bool:
        gc.collect()  # while another thread collects, this returns at once
        return bool(seen)

    def use_and_collect() -> None:
        use()
        asyncio.run(eventually(warned, interval_s=0.01))

    with pytest.warns(ResourceWarning, match="client was not closed") as seen:
        use_and_collect()


async def test_a_close_does_not_wait_for_a_server_that_accepts_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        options = redfence.ClientOptions(rpc_timeout=0.1, connect_timeout=60)
        client = redfence.Client(address, options=options)
        with pytest.raises(redfence.UnavailableError):
            await asyncio.to_thread(client.get_lock, "r")
        await asyncio.wait_for(asyncio.to_thread(client.close), 5)
