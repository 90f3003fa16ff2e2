"""`redfence.current_lease`: the lease of the lock around the code, also in tasks that inherit it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator

import pytest

import redfence
from harness.time.eventually import eventually
from redfence.testing import FakeLockServer


@pytest.fixture
def memory() -> Iterator[FakeLockServer]:
    """An in-memory server."""
    with FakeLockServer() as server:
        yield server


async def test_asyncio_code_and_its_children_get_the_innermost_lease(memory: FakeLockServer) -> None:
    left = asyncio.Event()

    async def late() -> list[object]:
        seen: list[object] = [redfence.current_lease()]
        await left.wait()
        return [*seen, redfence.current_lease(), redfence.current_lease("outer")]

    async with memory.async_client() as client:
        assert redfence.current_lease() is None
        async with client.lock("outer", ttl=60) as outer:
            async with client.lock("inner", ttl=60) as inner:
                assert redfence.current_lease() is inner
                assert redfence.current_lease("outer") is outer
                assert redfence.current_lease("other") is None
                assert await asyncio.to_thread(redfence.current_lease) is inner
                child = asyncio.create_task(late())
                await asyncio.sleep(0)
            left.set()
            # The child must not get the outer token for what the inner lock protected.
            assert await child == [inner, None, outer]
            assert redfence.current_lease() is outer
            await outer.release()
            assert redfence.current_lease() is redfence.current_lease("outer") is None
        held = await client.acquire("alone", ttl=60)
        assert redfence.current_lease() is None
        await held.release()


def test_a_thread_gets_the_lease_also_when_it_is_lost_and_none_after_the_lock(memory: FakeLockServer) -> None:
    client = memory.client()
    with client.lock("outer", ttl=60) as outer:
        lock = client.lock("inner", ttl=0.2)
        inner = lock.__enter__()
        memory.take_away("inner")
        assert inner.lost.wait(5)
        assert redfence.current_lease() is inner
        with pytest.raises(redfence.LeaseLostError):
            lock.__exit__(None, None, None)
        assert redfence.current_lease() is outer
        assert contextvars.copy_context().run(redfence.current_lease) is outer
        assert contextvars.Context().run(redfence.current_lease) is None
    assert redfence.current_lease() is None


def test_a_lock_left_in_another_context_hides_no_later_one(memory: FakeLockServer) -> None:
    client = memory.client()
    elsewhere = contextvars.copy_context()
    lock = client.lock("elsewhere", ttl=60)
    elsewhere.run(lock.__enter__)
    with client.lock("here", ttl=60) as here:
        lock.__exit__(None, None, None)
        assert redfence.current_lease() is here
    assert elsewhere.run(redfence.current_lease) is None

    def work() -> None:
        for _ in range(3):
            with client.lock("again", ttl=60) as again:
                assert redfence.current_lease() is again

    elsewhere.run(work)
    assert all(len(stack) == 0 for variable, stack in elsewhere.items() if variable.name == "redfence_leases")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_the_context_keeps_no_dropped_lease_alive(memory: FakeLockServer) -> None:
    client = memory.client()
    client.lock("thread", ttl=60).__enter__()
    async with memory.async_client() as waking:
        await waking.lock("task", ttl=60).__aenter__()
        await eventually(lambda: memory.token("thread") is memory.token("task") is None)
        assert redfence.current_lease() is None
