"""How a holder learns that its lease is over, and what it sees of its own errors meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator

import pytest

import redfence
from harness.doubles.grpc_fake import GrpcFake, serving
from harness.processes.servers import now_ms
from harness.time.eventually import eventually
from harness.time.loop_lag import LateLoop
from redfence.testing import FakeLockServer, ManualClock

_TTL = 1.0
# How long after the end of its validity a body may still run, unless this process stood still.
_LATE_MS = 200.0


@pytest.fixture
def fake() -> Iterator[GrpcFake]:
    """A server behind real gRPC whose faults can be switched."""
    with serving() as grpc_fake:
        yield grpc_fake


async def _hold(client: redfence.AsyncClient, *, ttl: float = _TTL) -> None:
    async with client.lock("r", ttl=ttl):
        await asyncio.wait_for(asyncio.Event().wait(), 30)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["taken away", "server gone", "server frozen", "no quorum"])
async def test_a_body_is_cancelled_before_anybody_else_can_have_the_lock(fake: GrpcFake, fault: str) -> None:
    """Whatever the fault, the body ends within its ttl, and the async with raises LeaseLostError with the reason."""
    options = redfence.ClientOptions(close_timeout_ms=100)
    async with LateLoop() as loop, redfence.AsyncClient(fake.address, options=options) as client:
        await client.cluster_status()
        # The end of the lease must not come before the renewal that tells that it was taken away.
        ttl = 4 * _TTL if fault == "taken away" else _TTL
        task = asyncio.create_task(_hold(client, ttl=ttl))
        await eventually(lambda: fake.server.hold_of("r"))
        if fault == "taken away":
            fake.server.grant("r", holder="them", ttl_ms=60_000)
        elif fault == "server gone":
            await asyncio.to_thread(fake.stop)
        elif fault == "server frozen":
            fake.server.frozen = True
        else:
            fake.server.quorum_lost = True
        # What was renewed was renewed before.
        fault_at_ms = now_ms()
        with pytest.raises(redfence.LeaseLostError) as lost:
            await asyncio.wait_for(task, 10)
        held_ms = now_ms() - fault_at_ms - loop.late_ms(since_ms=fault_at_ms)
        assert held_ms < ttl * 1_000 + _LATE_MS
        expected = redfence.LossReason.NOT_HELD if fault == "taken away" else redfence.LossReason.EXPIRED
        assert lost.value.reason is expected
        fake.server.thaw()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["taken away", "server gone", "server frozen", "no quorum"])
async def test_a_thread_sees_the_event_and_leaving_the_body_raises(fake: GrpcFake, fault: str) -> None:
    """`lease.lost` is set in time, whatever the fault."""
    client = redfence.Client(fake.address, options=redfence.ClientOptions(close_timeout_ms=100))

    def hold() -> None:
        with client.lock("r", ttl=_TTL) as lease:
            if fault == "taken away":
                fake.server.grant("r", holder="them", ttl_ms=60_000)
            elif fault == "server gone":
                fake.stop()
            elif fault == "server frozen":
                fake.server.frozen = True
            else:
                fake.server.quorum_lost = True
            fault_at_ms = now_ms()
            assert lease.lost.wait(10)
            held_ms = now_ms() - fault_at_ms - loop.late_ms(since_ms=fault_at_ms)
            assert held_ms < _TTL * 1_000 + _LATE_MS
            assert lease.remaining() == 0.0

    async with LateLoop() as loop:
        with pytest.raises(redfence.LeaseLostError):
            await asyncio.to_thread(hold)
    fake.server.thaw()
    await asyncio.to_thread(client.close)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["restart", "quorum"])
async def test_a_fault_shorter_than_the_validity_costs_nothing(fake: GrpcFake, fault: str) -> None:
    """AT_RISK for a while, then ACTIVE again: the body never notices."""
    async with redfence.AsyncClient(fake.address) as client, client.lock("r", ttl=3) as lease:
        if fault == "restart":
            await asyncio.to_thread(fake.stop)
        else:
            fake.server.quorum_lost = True
        await eventually(lambda: lease.state is redfence.LeaseState.AT_RISK)
        if fault == "restart":
            await asyncio.to_thread(fake.start)
        else:
            fake.server.quorum_lost = False
        await eventually(lambda: lease.state is redfence.LeaseState.ACTIVE)
        assert lease.remaining() > 1.5


# What the body raises, and who cancelled it. Time by hand: exact and without waiting.


def _jump(fake: FakeLockServer) -> None:
    fake.clock.advance(11)


async def test_the_bodys_own_error_is_not_hidden_by_the_loss() -> None:
    """A body that fails while its lease is lost raises its own error."""
    with FakeLockServer(ManualClock()) as fake:
        async with fake.async_client() as client:

            async def fail() -> None:
                async with client.lock("r", ttl=10):
                    _jump(fake)
                    raise KeyError("mine")

            with pytest.raises(KeyError, match="mine"):
                await fail()
            await asyncio.sleep(0)
            assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_an_error_raised_while_the_loss_cancels_the_body_is_not_hidden() -> None:
    """A body that answers its cancellation with an error of its own keeps that error."""
    with FakeLockServer(ManualClock()) as fake:
        async with fake.async_client() as client:

            async def fail() -> None:
                async with client.lock("r", ttl=10):
                    _jump(fake)
                    try:
                        await asyncio.Event().wait()
                    finally:
                        raise KeyError("mine")

            with pytest.raises(KeyError, match="mine"):
                await fail()


async def test_a_body_that_swallows_its_cancellation_still_raises_at_the_end() -> None:
    """Nobody gets out of a lost lock as if nothing had happened."""
    with FakeLockServer(ManualClock()) as fake:
        async with fake.async_client() as client:

            async def swallow() -> None:
                async with client.lock("r", ttl=10):
                    _jump(fake)
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()

            with pytest.raises(redfence.LeaseLostError):
                await swallow()
            assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_a_body_that_never_awaits_raises_at_the_end_by_the_clock() -> None:
    """No timer had a chance to run: the exit looks at the clock, and no stray cancellation follows."""
    with FakeLockServer(ManualClock()) as fake:
        async with fake.async_client() as client:

            async def busy() -> None:
                async with client.lock("r", ttl=10):
                    _jump(fake)

            with pytest.raises(redfence.LeaseLostError):
                await busy()
            for _ in range(10):
                await asyncio.sleep(0)


async def test_a_cancellation_from_outside_stays_one_although_the_lease_is_lost_as_well() -> None:
    """Both at once: the outer cancellation wins, for its owner waits for it."""
    with FakeLockServer(ManualClock()) as fake:
        async with fake.async_client() as client:
            entered = asyncio.Event()

            async def hold() -> None:
                async with client.lock("r", ttl=10):
                    entered.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hold())
            await entered.wait()
            _jump(fake)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()


async def test_a_cancellation_that_comes_while_a_lost_lock_is_left_does_not_keep_the_release_from_leaving() -> (
    None
):
    """The exit is cancelled at its own await; what the nodes may still hold is released all the same."""
    with FakeLockServer(ManualClock()) as fake:
        async with fake.async_client() as client:
            loop = asyncio.get_running_loop()

            async def hold() -> None:
                async with client.lock("r", ttl=10):
                    _jump(fake)
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()
                    loop.call_soon(working.cancel)

            working = asyncio.create_task(hold())
            with pytest.raises(asyncio.CancelledError):
                await working
            await eventually(lambda: fake._server.counts.get("release") == 1)


async def test_an_outer_timeout_stays_a_timeout() -> None:
    """asyncio.timeout around the lock sees its own cancellation."""
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


async def test_nested_locks_only_cancel_what_they_guard() -> None:
    """Losing the inner lease is the inner async with's error; the outer lock is still held."""
    with FakeLockServer() as fake:
        async with fake.async_client() as client, client.lock("outer", ttl=10) as outer:

            async def inner() -> None:
                async with client.lock("inner", ttl=2):
                    fake.take_away("inner")
                    await asyncio.Event().wait()

            with pytest.raises(redfence.LeaseLostError) as lost:
                await inner()
            assert lost.value.resource == "inner"
            outer.raise_if_lost()


async def test_losing_the_outer_lock_goes_through_the_inner_one() -> None:
    """The inner body is cancelled too, and the outer async with says what was lost."""
    with FakeLockServer() as fake:
        async with fake.async_client() as client:

            async def nested() -> None:
                async with client.lock("outer", ttl=2):
                    fake.take_away("outer")
                    async with client.lock("inner", ttl=10):
                        await asyncio.Event().wait()

            with pytest.raises(redfence.LeaseLostError) as lost:
                await nested()
            assert lost.value.resource == "outer"
            assert fake.holder("inner") is None


async def test_a_release_that_fails_at_the_exit_is_logged_and_not_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The lease ends by its ttl; the work was done under the lock. The lease id is not in the log."""
    with FakeLockServer() as fake:
        async with fake.async_client() as client:
            with caplog.at_level(logging.WARNING, logger="redfence"):
                async with client.lock("r", ttl=10) as lease:
                    fake.lose_quorum()
            assert "release_failed resource='r'" in caplog.text
            assert lease._core.lease_id not in caplog.text


def test_a_threads_own_error_is_not_hidden_by_the_loss() -> None:
    """The same for the client for threads."""
    with FakeLockServer(ManualClock()) as fake:
        client = fake.client()

        def fail() -> None:
            with client.lock("r", ttl=10):
                _jump(fake)
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            fail()


def test_a_threads_body_that_outlives_its_lease_raises_at_the_end_by_the_clock() -> None:
    """And so does this."""
    with FakeLockServer(ManualClock()) as fake:
        client = fake.client()

        def outlive() -> None:
            with client.lock("r", ttl=10):
                _jump(fake)

        with pytest.raises(redfence.LeaseLostError):
            outlive()


def test_closing_the_client_ends_its_threads() -> None:
    """Nothing of a closed client runs on."""
    with FakeLockServer() as fake:
        client = fake.client()
        with client.lock("r", ttl=10):
            pass
        client.close()
        names = {thread.name for thread in threading.enumerate()}
        assert not names & {"redfence-session", "redfence-timer"}
