"""A holder learns that its lease is over, and its own errors are not hidden by the loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import redfence
from harness.doubles.grpc_fake import GrpcFake
from harness.load.threaded import Threaded
from harness.processes.servers import now_ms
from harness.time.eventually import eventually
from harness.time.loop_lag import LoopLag
from redfence.testing import FakeLockServer, ManualClock

_TTL = 1.0
# How long after the end of its validity a body may still run, unless this process stood still.
_LATE_MS = 200.0

_FAULTS: dict[str, Callable[[GrpcFake], Any]] = {
    "taken away": lambda fake: fake.server.grant("r", holder="them", ttl_ms=60_000),
    "server gone": lambda fake: fake.stop(),
    "server frozen": lambda fake: setattr(fake.server, "frozen", True),
    "no quorum": lambda fake: setattr(fake.server, "quorum_lost", True),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", _FAULTS)
async def test_a_holder_learns_the_loss_before_another_can_have_the_lock(
    fake: GrpcFake, make_client: Callable[..., Any], fault: str
) -> None:
    """A task's body is cancelled within the ttl; a thread's event is set. Leaving the body raises."""
    client = make_client(fake.address, options=redfence.ClientOptions(close_timeout=0.1))
    # The end of the lease must not come before the renewal that tells that it was taken away.
    ttl = 4 * _TTL if fault == "taken away" else _TTL
    began_at_ms = told_at_ms = 0.0
    warned: list[float] = []
    lost_told: list[Any] = []

    async def hold() -> None:
        nonlocal began_at_ms, told_at_ms
        warn = lambda lease: warned.append(lease.remaining() * 1_000)
        async with client.lock("r", ttl=ttl, on_at_risk=warn, on_lost=lost_told.append) as lease:
            await asyncio.to_thread(_FAULTS[fault], fake)
            # Each renewal that succeeded was sent before.
            began_at_ms = now_ms()
            try:
                waiting = lease.lost.wait() if isinstance(client, Threaded) else asyncio.Event().wait()
                await asyncio.wait_for(waiting, 30)
            finally:
                told_at_ms = now_ms()
                assert lease.remaining() == 0.0

    async with LoopLag() as loop:
        with pytest.raises(redfence.LeaseLostError) as lost:
            await hold()
        late_ms = loop.late_ms(since_ms=began_at_ms)
    assert told_at_ms - began_at_ms - late_ms < ttl * 1_000 + _LATE_MS
    expected = redfence.LossReason.NOT_HELD if fault == "taken away" else redfence.LossReason.EXPIRED
    assert lost.value.reason is expected
    await eventually(lambda: len(lost_told) == 1)
    if fault != "taken away":
        assert warned[0] + late_ms > ttl * 1_000 / 3 - _LATE_MS
    fake.server.thaw()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["server gone", "no quorum"])
async def test_a_fault_shorter_than_the_validity_costs_nothing(fake: GrpcFake, fault: str) -> None:
    """The lease is AT_RISK for a while, then ACTIVE again; the body never notices."""
    async with redfence.AsyncClient(fake.address) as client, client.lock("r", ttl=3) as lease:
        await asyncio.to_thread(_FAULTS[fault], fake)
        await eventually(lambda: lease.state is redfence.LeaseState.AT_RISK)
        if fault == "server gone":
            await asyncio.to_thread(fake.start)
        else:
            fake.server.quorum_lost = False
        await eventually(lambda: lease.state is redfence.LeaseState.ACTIVE)
        assert lease.remaining() > 1.5


# What the body raises. Time is moved by hand: exactly, and without waiting.


async def _fail() -> None:
    raise KeyError("mine")


async def _fail_while_cancelled() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise KeyError("mine")


async def _swallow_the_cancellation() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


async def _end_without_awaiting() -> None:
    """No timer gets a chance to run: the exit of the lock looks at the clock."""


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (_fail, KeyError),
        (_fail_while_cancelled, KeyError),
        (_swallow_the_cancellation, redfence.LeaseLostError),
        (_end_without_awaiting, redfence.LeaseLostError),
    ],
)
async def test_a_body_that_outlives_its_lease_raises_its_own_error_or_the_loss(
    body: Callable[[], Awaitable[None]], error: type[Exception]
) -> None:
    """No stray cancellation follows."""
    with FakeLockServer(ManualClock()) as fake:
        async with fake.async_client() as client:

            async def hold() -> None:
                async with client.lock("r", ttl=10):
                    fake.clock.advance(11)
                    await body()

            with pytest.raises(error):
                await hold()
            for _ in range(10):
                await asyncio.sleep(0)
            assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("fails", [True, False])
def test_a_threads_body_that_outlives_its_lease_raises_its_own_error_or_the_loss(*, fails: bool) -> None:
    with FakeLockServer(ManualClock()) as fake:
        client = fake.client()

        def hold() -> None:
            with client.lock("r", ttl=10):
                fake.clock.advance(11)
                if fails:
                    raise KeyError("mine")

        with pytest.raises(KeyError if fails else redfence.LeaseLostError):
            hold()


@pytest.mark.parametrize("at", ["in the body", "at the exit"])
async def test_a_cancellation_from_outside_stays_one_although_the_lease_is_lost_as_well(at: str) -> None:
    """The lock is released all the same, because nodes may still hold it."""
    with FakeLockServer(ManualClock()) as fake:
        async with fake.async_client() as client:
            entered = asyncio.Event()

            async def hold() -> None:
                async with client.lock("r", ttl=10):
                    entered.set()
                    await (_swallow_the_cancellation() if at == "at the exit" else asyncio.Event().wait())
                    asyncio.get_running_loop().call_soon(task.cancel)

            task = asyncio.create_task(hold())
            await entered.wait()
            fake.clock.advance(11)
            if at == "in the body":
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            await eventually(lambda: fake._server.counts.get("release") == 1)


async def test_an_outer_timeout_stays_a_timeout() -> None:
    with FakeLockServer(ManualClock()) as fake:
        async with fake.async_client() as client:

            async def hold() -> None:
                async with asyncio.timeout(None) as timeout, client.lock("r", ttl=10):
                    # Now that the body has begun.
                    timeout.reschedule(asyncio.get_running_loop().time())
                    await asyncio.Event().wait()

            with pytest.raises(TimeoutError):
                await hold()
            assert fake.holder("r") is None


@pytest.mark.parametrize("lost", ["outer", "inner"])
async def test_a_lost_lock_cancels_what_it_guards_and_names_itself(lost: str) -> None:
    """The outer loss goes through the inner lock; the inner loss leaves the outer lock held."""
    with FakeLockServer() as fake:
        async with fake.async_client() as client:

            async def nested() -> None:
                async with client.lock("outer", ttl=2) as outer:
                    try:
                        async with client.lock("inner", ttl=2):
                            fake.take_away(lost)
                            await asyncio.Event().wait()
                    finally:
                        if lost == "inner":
                            outer.raise_if_lost()

            with pytest.raises(redfence.LeaseLostError) as error:
                await nested()
            assert error.value.resource == lost
            assert fake.holder("inner" if lost == "outer" else "outer") is None


async def test_a_release_that_fails_at_the_exit_is_logged_and_not_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The lease ends by its ttl, and the work was done under the lock. The log does not have the lease id."""
    with FakeLockServer() as fake:
        async with fake.async_client() as client:
            with caplog.at_level(logging.WARNING, logger="redfence"):
                async with client.lock("r", ttl=10) as lease:
                    fake.lose_quorum()
            assert "release_failed resource='r'" in caplog.text
            assert lease._core.lease_id not in caplog.text


def test_closing_the_client_ends_its_threads() -> None:
    with FakeLockServer() as fake:
        client = fake.client()
        with client.lock("r", ttl=10):
            pass
        client.close()
        names = {thread.name for thread in threading.enumerate()}
        assert not names & {"redfence-session", "redfence-timer"}
