"""A holder is told in time that its lease is at risk or lost, by callbacks or by an iteration."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import redfence
from harness.load.threaded import Threaded
from harness.time.eventually import eventually
from redfence import LeaseState
from redfence.testing import FakeLockServer, ManualClock

# Long enough for each step of a test to be a fraction of it; only the clock of the test passes.
_TTL = 30.0


class Told:
    """Records each callback, with the validity that was left."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.remaining: list[float] = []

    def on_at_risk(self, lease: Any) -> None:
        self.states.append("AT_RISK")
        self.remaining.append(lease.remaining())

    def on_lost(self, lease: Any) -> None:
        with pytest.raises(redfence.LeaseLostError) as lost:
            lease.raise_if_lost()
        self.states.append(lost.value.reason.name)

    @property
    def callbacks(self) -> dict[str, Callable[[Any], None]]:
        return {"on_at_risk": self.on_at_risk, "on_lost": self.on_lost}


@pytest.fixture
def fake() -> Iterator[FakeLockServer]:
    """A server whose clock, and that of its clients, the test moves."""
    with FakeLockServer(ManualClock()) as server:
        yield server


@pytest.fixture(params=["asyncio", "threads"])
async def client(request: pytest.FixtureRequest, fake: FakeLockServer) -> AsyncIterator[Any]:
    """A client of each colour in turn."""
    made = fake.async_client() if request.param == "asyncio" else Threaded(fake.client())
    yield made
    await made.close()


async def _pass(fake: FakeLockServer, client: Any, seconds: float) -> None:
    """Move the clock, and let the client send and get what is then due."""
    await asyncio.to_thread(fake.clock.advance, seconds)
    with contextlib.suppress(redfence.OutcomeUnknownError):
        await client.cluster_status()


def _pass_unnoticed(fake: FakeLockServer, seconds: float) -> None:
    """Move the clock as it moves while the session's timer is late."""
    with fake.clock._lock:
        fake.clock._now_ms += seconds * 1000


async def _at_risk(fake: FakeLockServer, client: Any) -> None:
    fake.lose_quorum()
    await _pass(fake, client, _TTL / 3)


async def test_each_risk_and_the_loss_are_told_once(fake: FakeLockServer, client: Any) -> None:
    told = Told()
    lease = await client.acquire("r", ttl=_TTL, **told.callbacks)
    for count in (1, 2):
        await _at_risk(fake, client)
        await eventually(lambda count=count: told.states == ["AT_RISK"] * count)  # type: ignore[misc]
        fake.regain_quorum()
        await _pass(fake, client, _TTL / 10)
        await eventually(lambda: lease.state is LeaseState.ACTIVE)
    fake.take_away("r")
    await _pass(fake, client, _TTL / 3)
    await eventually(lambda: told.states == ["AT_RISK", "AT_RISK", "NOT_HELD"])


async def test_a_server_that_says_nothing_leaves_a_third_of_the_ttl_to_stop(
    fake: FakeLockServer, client: Any
) -> None:
    told = Told()
    lease = await client.acquire("r", ttl=_TTL, **told.callbacks)
    fake.freeze()
    seconds = 0
    while not lease.lost.is_set():
        fake.clock.advance(1)
        seconds += 1
        await asyncio.sleep(0.005)
    await eventually(lambda: told.states == ["AT_RISK", "EXPIRED"])
    assert seconds == 30
    assert told.remaining[0] > _TTL / 3
    fake.thaw()


async def test_a_loss_that_only_the_exit_notices_is_told(fake: FakeLockServer, client: Any) -> None:
    """The program keeps no lease object here, and the clock's jump ends the body at once."""
    told = Told()
    with suppress(redfence.LeaseLostError, asyncio.CancelledError):
        async with client.lock("r", ttl=_TTL, **told.callbacks):
            fake.clock.advance(_TTL + 1)
    gc.collect()  # the error refers to itself, and to the lease
    await eventually(lambda: told.states == ["EXPIRED"])


@pytest.mark.parametrize("way", ["lock", "release"])
async def test_a_loss_that_the_holder_sees_before_the_session_is_told(fake: FakeLockServer, way: str) -> None:
    """The program drops the lease before the session's thread, which is late, can look at it."""
    with fake.client() as client:
        told = Told()
        lock = client.lock("r", ttl=_TTL, on_lost=told.on_lost)
        lease = lock.__enter__() if way == "lock" else client.acquire("r", ttl=_TTL, on_lost=told.on_lost)
        with client._session._driver._lock:
            _pass_unnoticed(fake, _TTL + 1)
            if way == "lock":
                lock.__exit__(KeyError, KeyError(), None)
            else:
                assert not lease.release()
            del lease
        await eventually(lambda: told.states == ["EXPIRED"])


async def test_closing_the_client_is_a_loss_and_a_release_is_none(fake: FakeLockServer, client: Any) -> None:
    released, closed = Told(), Told()
    async with client.lock("released", ttl=_TTL, **released.callbacks):
        pass
    kept = await client.acquire("closed", ttl=_TTL, **closed.callbacks)
    await client.close()
    await eventually(lambda: closed.states == ["CLIENT_CLOSED"])
    assert kept.lost.is_set()
    assert not released.states


async def test_what_a_callback_raises_is_logged_and_the_next_one_is_called(
    fake: FakeLockServer, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_lease: object) -> None:
        raise KeyError("mine")

    told = Told()
    lease = await client.acquire("r", ttl=_TTL, on_at_risk=fail, on_lost=told.on_lost)
    await _at_risk(fake, client)
    await eventually(lambda: "callback_failed" in caplog.text)
    assert "KeyError: 'mine'" in caplog.text
    assert lease._core.lease_id not in caplog.text
    fake.regain_quorum()
    await _pass(fake, client, _TTL / 10)
    await eventually(lambda: lease.state is LeaseState.ACTIVE)
    fake.take_away("r")
    await _pass(fake, client, _TTL / 3)
    await eventually(lambda: told.states == ["NOT_HELD"])


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_no_error_of_a_callback_silences_another_lease(
    fake: FakeLockServer, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    told, go_on = Told(), threading.Event()

    def fail(_lease: object) -> None:
        assert go_on.wait(10)
        raise error

    with fake.client() as client:
        kept = (
            client.acquire("r", ttl=_TTL, on_lost=fail),
            client.acquire("s", ttl=_TTL, on_lost=told.on_lost),
        )
    go_on.set()
    await eventually(lambda: told.states == ["CLIENT_CLOSED"])
    assert f"callback_failed lease={kept[0]!r} state=lost" in caplog.text
    assert error.__name__ in caplog.text


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_callback_may_end_the_event_loop(fake: FakeLockServer, error: type[BaseException]) -> None:
    def end(_lease: object) -> None:
        raise error

    async def run() -> None:
        async with fake.async_client() as client:
            lease = await client.acquire("r", ttl=_TTL, on_lost=end)
        assert lease.lost.is_set()
        await asyncio.sleep(10)

    with pytest.raises(error):
        asyncio.run(run())


async def test_a_callback_that_blocks_its_thread_stops_no_renewal(fake: FakeLockServer) -> None:
    """Afterwards the client reports only the latest change."""
    client = Threaded(fake.client())
    told, go_on = Told(), threading.Event()

    def block(lease: Any) -> None:
        told.on_at_risk(lease)
        assert go_on.wait(10)

    lease = await client.acquire("r", ttl=_TTL, on_at_risk=block, on_lost=told.on_lost)
    for _ in range(3):
        await _at_risk(fake, client)
        await eventually(lambda: lease.state is LeaseState.AT_RISK)
        await eventually(lambda: told.states == ["AT_RISK"])
        fake.regain_quorum()
        await _pass(fake, client, _TTL / 10)
        await eventually(lambda: lease.state is LeaseState.ACTIVE)
    fake.take_away("r")
    await _pass(fake, client, _TTL / 3)
    await eventually(lease.lost.is_set)
    assert told.states == ["AT_RISK"]
    go_on.set()
    await eventually(lambda: told.states == ["AT_RISK", "NOT_HELD"])
    await eventually(lambda: not client.inner._session.callbacks._busy.locked())


async def test_a_callback_may_use_its_client(fake: FakeLockServer) -> None:
    """It stops the work of a lease at risk by a release; the answer comes through the session."""
    outcomes: list[bool] = []
    client = Threaded(fake.client())

    def stop(lease: redfence.Lease) -> None:
        fake.regain_quorum()
        outcomes.append(lease.release())

    lease = await client.acquire("r", ttl=_TTL, on_at_risk=stop)
    await _at_risk(fake, client)
    await eventually(lambda: outcomes == [True])
    assert lease.state is LeaseState.RELEASED


@pytest.mark.parametrize("callback", ["on_at_risk", "on_lost"])
async def test_a_callback_that_cannot_be_called_is_refused(client: Any, callback: str) -> None:
    async def wrong(_lease: object) -> None: ...

    def generator(_lease: object) -> Iterator[None]:
        yield

    class Wrong:
        async def __call__(self, _lease: object) -> None: ...

    for each in (wrong, Wrong(), generator, "stop"):
        with pytest.raises(
            redfence.InvalidArgumentError, match=f"^{callback} must be a plain function"
        ) as error:
            await client.acquire("r", ttl=_TTL, **{callback: each})
        assert error.value.field == callback


async def test_a_released_lease_is_not_told_that_it_was_at_risk(fake: FakeLockServer) -> None:
    told, go_on, ended = Told(), threading.Event(), threading.Event()
    with fake.client() as client:
        client._session.callbacks.put(partial(go_on.wait, 10))  # type: ignore[arg-type]  # its result is ignored
        lease = client.acquire("r", ttl=_TTL, max_hold=0.001, on_at_risk=told.on_at_risk)
        await asyncio.to_thread(fake.clock.advance, _TTL * 0.7)
        assert lease.release()
        client._session.callbacks.put(ended.set)
        go_on.set()
        assert await asyncio.to_thread(ended.wait, 10)
        assert not told.states


async def test_an_iteration_that_reads_before_a_late_session_does_not_stay_at_risk(
    fake: FakeLockServer,
) -> None:
    async with fake.async_client() as client:
        lease = await client.acquire("r", ttl=_TTL)
        seen: list[LeaseState] = []

        async def read() -> None:
            seen.extend([state async for state in lease.events()])

        fake.freeze()
        fake.clock.advance(_TTL / 3)
        await eventually(lambda: lease._core.unanswered_since_ms is not None)
        await asyncio.sleep(0.05)  # the renewal leaves
        _pass_unnoticed(fake, _TTL / 3 + 1)
        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        fake.thaw()
        await eventually(lambda: lease._core.unanswered_since_ms is None)
        await lease.release()
        await reader
        assert seen[-2:] in ([LeaseState.RELEASED], [LeaseState.ACTIVE, LeaseState.RELEASED])


async def test_an_iteration_yields_each_change_and_ends_with_the_lease(fake: FakeLockServer) -> None:
    async with fake.async_client() as client:
        lease = await client.acquire("r", ttl=_TTL)
        seen: dict[str, list[LeaseState]] = {"quick": [], "slow": []}
        go_on = asyncio.Event()

        async def read(kind: str) -> None:
            async for state in lease.events():
                seen[kind].append(state)
                if kind == "slow":
                    await go_on.wait()

        readers = [asyncio.create_task(read(kind)) for kind in seen]
        await _at_risk(fake, client)
        await eventually(lambda: seen["slow"] == [LeaseState.AT_RISK])
        fake.regain_quorum()
        await _pass(fake, client, _TTL / 10)
        await eventually(lambda: lease.state is LeaseState.ACTIVE)
        await _at_risk(fake, client)
        await eventually(lambda: len(seen["quick"]) == 3)
        fake.regain_quorum()
        await lease.release()
        go_on.set()
        await asyncio.gather(*readers)
        quick = [LeaseState.AT_RISK, LeaseState.ACTIVE, LeaseState.AT_RISK, LeaseState.RELEASED]
        assert seen == {"quick": quick, "slow": [LeaseState.AT_RISK, LeaseState.RELEASED]}
        assert [state async for state in lease.events()] == [LeaseState.RELEASED]
        assert not lease._core.watchers


async def test_an_iteration_that_begins_late_or_is_left_misses_nothing(fake: FakeLockServer) -> None:
    """A lease at risk is told first, and a reader that was cancelled leaves nothing behind."""
    async with fake.async_client() as client:
        lease = await client.acquire("r", ttl=_TTL)

        async def first() -> LeaseState:
            return await anext(lease.events())

        reader = asyncio.create_task(first())
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader])
        assert not lease._core.watchers
        await _at_risk(fake, client)
        await eventually(lambda: lease.state is LeaseState.AT_RISK)
        assert await first() is LeaseState.AT_RISK
        fake.clock.advance(_TTL)
        states = [state async for state in lease.events()]
        assert states[-1] is LeaseState.LOST
