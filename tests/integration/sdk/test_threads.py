"""No caller of `Client` waits for ever: races, failed threads, finalizers, interrupted closes."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from integration.sdk.test_cancellation import Interruption

import redfence
from harness.time.eventually import eventually
from redfence._fake.links import FakeSyncConnector
from redfence.testing import FakeLockServer, ManualClock

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@pytest.fixture
def fake() -> Iterator[FakeLockServer]:
    """An in-memory server."""
    with FakeLockServer() as server:
        yield server


def _bounded(call: Any, *, timeout_s: float = 10.0) -> BaseException | None:
    """Run a call in a thread of its own, and return what it raised; not to end is a failure."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  (the test looks at it)
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert raised, "the caller waits for ever"
    return raised[0]


def test_a_first_use_that_meets_the_close_ends(fake: FakeLockServer) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(100):
            client = redfence.Client("fake", connector=FakeSyncConnector(fake._network))
            closer = threading.Thread(target=client.close)
            closer.start()
            assert isinstance(_bounded(client.cluster_status), redfence.ClosedError | None)
            closer.join()
            client.close()
    finally:
        sys.setswitchinterval(before)


def test_a_finalizer_on_the_clients_own_thread_does_not_stop_it(fake: FakeLockServer) -> None:
    client = fake.client()
    lease = client.acquire("r", ttl=60)
    outcomes: list[Any] = []

    def finalize(*_: object) -> None:
        outcomes.append(lease.release())
        outcomes.append(_bounded_here(lambda: client.acquire("s", ttl=60)))

    def _bounded_here(call: Any) -> str:
        try:
            call()
        except RuntimeError as error:
            return str(error)
        return ""

    client._session._driver.run(finalize)
    assert _bounded(client.cluster_status) is None
    assert outcomes[0] is True
    assert "on the client's own thread" in outcomes[1]


def test_a_thread_that_cannot_be_started_fails_the_call(
    fake: FakeLockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "redfence-link":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    client = redfence.Client("fake", connector=FakeSyncConnector(fake._network))
    assert isinstance(_bounded(lambda: client.acquire("r", ttl=60)), redfence.ClosedError)
    assert _bounded(client.close) is None


def test_a_defect_in_a_call_reaches_its_caller(fake: FakeLockServer) -> None:
    class Broken:
        def lease_id(self) -> str:
            raise OSError("no random numbers")

        def fraction(self) -> float:
            return 0.0

    connector = FakeSyncConnector(fake._network)
    client = redfence.Client("fake", connector=connector, randomness=Broken())
    assert isinstance(_bounded(lambda: client.acquire("r", ttl=60)), OSError)
    assert isinstance(_bounded(client.cluster_status), redfence.ClosedError)
    assert _bounded(client.close) is None


def test_the_first_callback_waits_for_no_lock_of_threading() -> None:
    """Another thread is in the middle of `Thread.start` or `enumerate`, as if a signal interrupted it."""
    entered, leave, told = threading.Event(), threading.Event(), threading.Event()
    in_time: list[bool] = []

    def hold() -> None:
        with threading._active_limbo_lock:  # type: ignore[attr-defined]
            entered.set()
            in_time.append(leave.wait(5))

    with FakeLockServer(ManualClock()) as fake, fake.client() as client:
        lease = client.acquire("r", ttl=30, on_lost=lambda _: told.set())
        other = client.acquire("other", ttl=60)
        holder = threading.Thread(target=hold)
        holder.start()
        entered.wait()
        fake.clock.advance(31)
        assert other.release()
        assert told.wait(10)
        leave.set()
        holder.join()
    assert lease.lost.is_set()
    assert in_time == [True]


async def test_a_failed_call_keeps_nothing_of_its_callers_alive(fake: FakeLockServer) -> None:
    client = fake.client()
    fake.take_away("held")

    def fail() -> None:
        sibling = client.acquire("sibling", ttl=60)
        assert sibling.token
        client.acquire("held", ttl=60, wait=0)

    gc.disable()
    try:
        with pytest.raises(redfence.LockHeldError):
            fail()
        await eventually(lambda: fake.token("sibling") is None)
    finally:
        gc.enable()


@pytest.mark.slow
def test_ctrl_c_at_any_instruction_of_a_close_leaves_no_lease_and_no_thread(fake: FakeLockServer) -> None:
    for instructions in itertools.count():
        thread_count = threading.active_count()
        client = redfence.Client("fake", connector=FakeSyncConnector(fake._network))
        lease = client.acquire("r", ttl=60)
        try:
            with Interruption(after_instructions=instructions) as interruption:
                client.close()
        except KeyboardInterrupt:
            pass
        del client, lease
        deadline_s = time.monotonic() + 10
        while fake.holder("r") is not None or threading.active_count() > thread_count:
            assert time.monotonic() < deadline_s, f"something is left after {instructions} instructions"
            time.sleep(0.0005)
        if interruption.left >= 0:
            break
    assert instructions > 20


def test_a_lease_cannot_be_copied_and_a_wait_may_be_over_already(fake: FakeLockServer) -> None:
    lease = fake.client().acquire("r", ttl=60)
    assert lease.lost.wait(-1) is False
    for make in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="pass its token instead"):
            make(lease)


@pytest.mark.parametrize("kind", ["asyncio", "threads"])
async def test_a_lease_that_only_its_own_callback_refers_to_is_released(
    fake: FakeLockServer, kind: str
) -> None:
    class Job:
        def stop(self, _lease: object) -> None: ...

    job = Job()
    async with fake.async_client() as client:
        if kind == "asyncio":
            job.lease = await client.acquire("r", ttl=60, on_lost=job.stop)  # type: ignore[attr-defined]
        else:
            job.lease = fake.client().acquire("r", ttl=60, on_lost=job.stop)  # type: ignore[attr-defined]
        del job
        gc.collect()
        await eventually(lambda: fake.token("r") is None)


async def test_an_asyncio_lock_or_acquire_that_is_dropped_is_released(fake: FakeLockServer) -> None:
    async with fake.async_client() as client:
        lock = client.lock("lock", ttl=60)
        await lock.__aenter__()
        del lock
        kept = await client.lock("kept", ttl=1).__aenter__()
        fake.take_away("kept")
        async with asyncio.timeout(5):
            assert await kept.lost.wait()
        acquiring = client.acquire("acquire", ttl=60)
        asyncio.get_running_loop().call_later(0.05, acquiring.close)
        waiting = acquiring.send(None)
        assert waiting is not None
        await eventually(lambda: fake.token("lock") is fake.token("acquire") is None)
