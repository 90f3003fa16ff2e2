"""A client is closed while others still use it: nobody is left waiting, and everybody is told the truth."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from grpc import aio

import redfence
from harness.doubles.grpc_fake import GrpcFake, serving
from harness.processes.servers import LockServer
from harness.time.eventually import eventually
from redfence._transport import grpc_async_link

# The close gives up long before the calls would by themselves.
_OPTIONS = redfence.ClientOptions(rpc_timeout_ms=60_000, close_timeout_ms=100)
_PATIENT = redfence.ClientOptions(rpc_timeout_ms=60_000, close_timeout_ms=60_000)


@pytest.fixture
def fake() -> Iterator[GrpcFake]:
    """A server behind real gRPC that can fall silent."""
    with serving() as grpc_fake:
        yield grpc_fake


async def _close(client: redfence.AsyncClient) -> None:
    await client.close()


async def _close_cut_short(client: redfence.AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.close(), 0.1)


_CLOSINGS = pytest.mark.parametrize(
    ("close", "options"),
    [(_close, _OPTIONS), (_close_cut_short, _PATIENT)],
    ids=["closed", "close cancelled"],
)
Close = Callable[[redfence.AsyncClient], Awaitable[None]]


@_CLOSINGS
async def test_a_release_that_is_under_way_when_the_client_is_closed_ends_as_unknown(
    fake: GrpcFake, close: Close, options: redfence.ClientOptions
) -> None:
    """The server is silent: after the close nothing could wake the caller any more, so the close does."""
    client = redfence.AsyncClient(fake.address, options=options)
    lease = await client.acquire("r", ttl=60)
    fake.server.frozen = True
    releasing = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    await close(client)
    with pytest.raises(redfence.OutcomeUnknownError, match="closed"):
        await asyncio.wait_for(releasing, 1)


@_CLOSINGS
async def test_a_body_can_be_left_when_the_client_is_closed_meanwhile(
    fake: GrpcFake,
    close: Close,
    options: redfence.ClientOptions,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its work was done under the lock, so it ends well; the log tells that the release was not confirmed."""
    client = redfence.AsyncClient(fake.address, options=options)

    async def work() -> None:
        async with client.lock("r", ttl=60):
            fake.server.frozen = True

    with caplog.at_level(logging.WARNING, logger="redfence"):
        working = asyncio.create_task(work())
        await eventually(lambda: fake.server.frozen)
        await close(client)
        await asyncio.wait_for(working, 1)
    assert "release_failed resource='r'" in caplog.text


async def test_a_threads_release_and_body_end_when_the_client_is_closed_meanwhile(fake: GrpcFake) -> None:
    """The same for the client for threads: both threads come back with the close."""
    client = redfence.Client(fake.address, options=_OPTIONS)
    released, held = client.acquire("released", ttl=60), threading.Event()

    def work() -> str:
        with client.lock("held", ttl=60):
            held.set()
            assert frozen.wait(10)
        return "left"

    frozen = threading.Event()
    working = _in_thread(work)
    assert await asyncio.to_thread(held.wait, 10)
    fake.server.frozen = True
    frozen.set()
    releasing = _in_thread(released.release)
    await eventually(lambda: len(client._session._core._releases._pending) == 2)
    await asyncio.to_thread(client.close)
    with pytest.raises(redfence.OutcomeUnknownError, match="closed"):
        await asyncio.wait_for(releasing, 1)
    assert await asyncio.wait_for(working, 1) == "left"


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run it in a thread that does not keep the test alive if it hangs."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except redfence.RedfenceError as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(outcome)


async def test_closing_wakes_the_threads_that_wait_for_a_lock(server: LockServer) -> None:
    """Ten threads wait for ever; each ends with ClosedError, and the server has forgotten them."""
    client = redfence.Client(server.target)
    await server.acquire("r", ttl_ms=60_000)
    waiting = [_in_thread(lambda: client.acquire("r", ttl=60, wait=None)) for _ in range(10)]
    await server.until_waiting("r", count=10)
    await asyncio.to_thread(client.close)
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 1)
    assert [str(each) for each in outcomes] == ["the client was closed during the call"] * 10
    assert {type(each) for each in outcomes} == {redfence.ClosedError}
    await server.until_waiting("r", count=0)


async def test_a_second_close_returns_with_the_first(fake: GrpcFake) -> None:
    """Whoever closes a client that is being closed does not wait any longer than the first one."""
    client = redfence.AsyncClient(fake.address, options=_PATIENT)
    await client.acquire("r", ttl=60)
    fake.server.frozen = True
    first = asyncio.create_task(client.close())
    second = asyncio.create_task(client.close())
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait_for(second, 2)


@pytest.fixture
async def slow_look(fake: GrpcFake) -> asyncio.Event:
    """Makes every GetLock of the server hang; set once one does."""
    loop, reached = asyncio.get_running_loop(), asyncio.Event()

    async def hang() -> None:
        loop.call_soon_threadsafe(reached.set)
        await asyncio.Event().wait()

    fake.before_call = hang
    return reached


async def test_a_single_call_under_way_when_the_client_is_closed_ends_as_closed(
    fake: GrpcFake, slow_look: asyncio.Event
) -> None:
    """And not as cancelled: nobody has cancelled its task."""
    client = redfence.AsyncClient(fake.address, options=_OPTIONS)
    looking = asyncio.create_task(client.get_lock("r"))
    await slow_look.wait()
    await client.close()
    with pytest.raises(redfence.ClosedError):
        await asyncio.wait_for(looking, 1)


async def test_a_threads_single_call_under_way_when_the_client_is_closed_ends_as_closed(
    fake: GrpcFake, slow_look: asyncio.Event
) -> None:
    """The same for the client for threads."""
    client = redfence.Client(fake.address, options=_OPTIONS)
    looking = asyncio.create_task(asyncio.to_thread(client.get_lock, "r"))
    await slow_look.wait()
    await asyncio.to_thread(client.close)
    with pytest.raises(redfence.ClosedError):
        await asyncio.wait_for(looking, 1)


async def test_a_single_call_whose_server_drains_is_made_again(
    fake: GrpcFake, slow_look: asyncio.Event
) -> None:
    """Its link is left while it is under way: the call goes on at the next link, and its task is not cancelled."""
    async with redfence.AsyncClient(fake.address, options=_OPTIONS) as client:
        looking = asyncio.create_task(client.get_lock("r"))
        await slow_look.wait()
        fake.before_call = None
        fake.server.drain()
        assert (await asyncio.wait_for(looking, 5)).resource == "r"


async def test_a_single_call_whose_caller_gives_up_is_cancelled(
    fake: GrpcFake, slow_look: asyncio.Event
) -> None:
    """The caller's own cancellation stays one."""
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
    """Whichever comes first, by a turn of the loop or several."""
    connecting, go_on = asyncio.Event(), asyncio.Event()

    async def until_ready(channel: aio.Channel, address: str) -> None:
        connecting.set()
        await go_on.wait()
        if refused:
            raise redfence.UnavailableError(f"{address} refused the connection")

    monkeypatch.setattr(grpc_async_link, "_until_ready", until_ready)
    client = redfence.AsyncClient(fake.address, options=_OPTIONS)
    acquiring = asyncio.create_task(client.acquire("r", ttl=60))
    await connecting.wait()
    acquiring.cancel()
    await asyncio.wait([acquiring])
    asyncio.get_running_loop().call_soon(go_on.set)
    for _ in range(turns):
        await asyncio.sleep(0)
    await asyncio.wait_for(client.close(), 10)
