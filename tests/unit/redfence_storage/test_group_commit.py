"""Many callers, one transaction at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.processes.storage_server import HeldStore
from redfence_storage.errors import StaleToken, StoreClosed, TooManyWrites
from redfence_storage.group_commit import GroupCommit
from redfence_storage.store import Accepted, Fence, Get, Put

NAME = "orders/42"


@pytest.fixture
def store(tmp_path: Path) -> HeldStore:
    return HeldStore.open(tmp_path / "storage.db")


@pytest.fixture
async def commit(store: HeldStore) -> AsyncIterator[GroupCommit]:
    commit = GroupCommit(store, queue_max=3)
    yield commit
    await commit.close()


def put(token: int, key: str = "k") -> Put:
    return Put(resource=NAME, token=token, key=key, value=b"%d" % token)


async def start(commit: GroupCommit, command: Put | Fence) -> asyncio.Task[Accepted]:
    task = asyncio.create_task(commit.carry_out(command))
    await asyncio.sleep(0)
    return task


async def held(store: HeldStore, commit: GroupCommit, command: Put | Fence) -> asyncio.Task[Accepted]:
    """Submit a command and return when the writer has taken it and waits to commit it."""
    store.hold()
    task = await start(commit, command)
    assert await asyncio.to_thread(store.reached.wait, 10)
    return task


async def test_nothing_is_acknowledged_before_its_commit_returned(
    store: HeldStore, commit: GroupCommit
) -> None:
    task = await held(store, commit, put(1))
    assert not task.done()
    store.gate.set()
    assert await task == Accepted(1)


async def test_what_queues_during_a_commit_is_the_next_batch_in_the_order_of_submission(
    store: HeldStore, commit: GroupCommit
) -> None:
    """The order of submission decides which write is stale."""
    first = await held(store, commit, put(2))
    second, stale = await start(commit, put(3)), await start(commit, put(2))
    store.gate.set()
    assert (await first, await second) == (Accepted(2), Accepted(3))
    with pytest.raises(StaleToken):
        await stale


async def test_more_than_the_queue_holds_is_refused_and_the_queued_are_answered(
    store: HeldStore, commit: GroupCommit
) -> None:
    tasks = [await held(store, commit, put(1)), await start(commit, put(1)), await start(commit, put(1))]
    with pytest.raises(TooManyWrites) as refusal:
        await commit.carry_out(put(9))
    assert refusal.value.metadata == {"limit": "3"}
    store.gate.set()
    assert [await task for task in tasks] == [Accepted(1)] * 3
    assert await commit.carry_out(put(2)) == Accepted(2)


async def test_a_cancelled_caller_neither_undoes_its_command_nor_holds_up_the_others(
    store: HeldStore, commit: GroupCommit
) -> None:
    before = await held(store, commit, put(1))
    gone, behind = await start(commit, put(2, "gone")), await start(commit, put(2))
    gone.cancel()
    store.gate.set()
    async with asyncio.timeout(10):
        assert await before == Accepted(1)
        assert await behind == Accepted(2)
    reading = await commit.carry_out(Get(resource=NAME, token=None, key="gone"))
    assert reading.stored is not None
    assert reading.highest_token == 2
    assert gone.cancelled()


async def test_a_defect_in_the_store_reaches_its_callers_and_the_next_command_works(
    commit: GroupCommit,
) -> None:
    with pytest.raises(UnicodeEncodeError):
        await commit.carry_out(Fence(resource="\ud800", token=1))
    assert await commit.carry_out(put(1)) == Accepted(1)


async def test_closing_answers_what_was_submitted_and_refuses_what_comes_later(
    store: HeldStore, commit: GroupCommit
) -> None:
    tasks = [await held(store, commit, put(1)), await start(commit, put(2))]
    closing = asyncio.create_task(commit.close())
    await asyncio.sleep(0)
    with pytest.raises(StoreClosed):
        await commit.carry_out(put(3))
    store.gate.set()
    await closing
    assert [await task for task in tasks] == [Accepted(1), Accepted(2)]
    await commit.close()
