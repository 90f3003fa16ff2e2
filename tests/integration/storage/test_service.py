"""The storage over real gRPC, by both clients: what it does, and every way in which it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

import redfence
from harness.processes.storage_server import HeldStore, StorageCalls, connected, full_disk, serving
from redfence_storage.client_messages import DeleteResult, FenceResult, GetResult, KeyPage, PutResult
from redfence_storage.group_commit import GroupCommit

NAME = "orders/42"
QUEUE_MAX = 4


@dataclass(frozen=True)
class Lease:
    """Stands for a lease of the SDK: it has a token."""

    token: int


def _status(error: BaseException) -> grpc.StatusCode:
    """Return the status that the storage gave, which the SDK's error keeps as its cause."""
    assert isinstance(error.__cause__, grpc.RpcError)
    return error.__cause__.code()


@pytest.fixture
def store(tmp_path: Path) -> HeldStore:
    return HeldStore.open(tmp_path / "storage.db")


@pytest.fixture
async def commit(store: HeldStore) -> GroupCommit:
    return GroupCommit(store, queue_max=QUEUE_MAX)


@pytest.fixture
async def target(commit: GroupCommit) -> AsyncIterator[str]:
    async with serving(commit) as target:
        yield target


@pytest.fixture(params=["async", "sync"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of client in turn."""
    return str(request.param)


@pytest.fixture
async def storage(kind: str, target: str) -> AsyncIterator[StorageCalls]:
    async with connected(kind, target) as storage:
        yield storage


async def test_every_call_takes_a_token_or_a_lease_and_tells_what_it_did(storage: StorageCalls) -> None:
    """A value of any bytes comes back with the token of its write; a delete keeps the highest token."""
    lease = Lease(token=5)
    assert await storage.fence(NAME, token=lease) == FenceResult(5)
    assert await storage.put(NAME, key="state", value=bytes(range(256)), token=lease) == PutResult(5)
    assert await storage.put(NAME, key="empty", value=b"", token=6) == PutResult(6)
    assert await storage.get(NAME, key="state", unfenced=True) == GetResult(bytes(range(256)), 5, 6)
    assert await storage.get(NAME, key="empty", token=Lease(7)) == GetResult(b"", 6, 7)
    assert await storage.list_keys(NAME) == KeyPage(("empty", "state"), "", 7)
    assert await storage.delete(NAME, key="empty", token=7) == DeleteResult(deleted=True, highest_token=7)
    assert await storage.delete(NAME, key="empty", token=8) == DeleteResult(deleted=False, highest_token=8)
    assert await storage.list_keys("another resource") == KeyPage((), "", 0)


async def test_a_later_holder_succeeds_and_then_every_write_of_the_earlier_is_refused(
    storage: StorageCalls,
) -> None:
    """The earlier holder can neither write, delete, fence nor read with its own token."""
    await storage.put(NAME, key="k", value=b"earlier", token=1)
    await storage.put(NAME, key="k", value=b"later", token=2)
    for refused in (
        storage.put(NAME, key="k", value=b"stale", token=1),
        storage.delete(NAME, key="k", token=1),
        storage.fence(NAME, token=1),
        storage.get(NAME, key="k", token=1),
    ):
        with pytest.raises(redfence.StaleTokenError) as refusal:
            await refused
        assert refusal.value.highest_token == 2
        assert _status(refusal.value) is grpc.StatusCode.FAILED_PRECONDITION
        assert refusal.value.metadata == {"resource": NAME, "fencing_token": "1", "highest_token": "2"}
    assert await storage.get(NAME, key="k", unfenced=True) == GetResult(b"later", 2, 2)
    await storage.put(NAME, key="k", value=b"later still", token=2)


async def test_a_fenced_read_or_a_fence_shuts_out_the_earlier_holder_before_any_write(
    storage: StorageCalls,
) -> None:
    """The new holder's first read refuses a late write of the old one, even if it finds nothing."""
    await storage.put("read", key="k", value=b"0", token=1)
    assert await storage.get("read", key="k", token=2) == GetResult(b"0", 1, 2)
    with pytest.raises(redfence.NotFoundError):
        await storage.get("missed", key="k", token=2)
    await storage.fence("fenced", token=2)
    for name in ("read", "missed", "fenced"):
        with pytest.raises(redfence.StaleTokenError):
            await storage.put(name, key="k", value=b"late", token=1)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("fencing_token", {}),
        ("fencing_token", {"token": 0}),
        ("unfenced", {"token": 2, "unfenced": True}),
    ],
)
async def test_a_read_says_whether_it_is_fenced_or_is_refused(
    storage: StorageCalls, field: str, options: dict[str, Any]
) -> None:
    """A forgotten token is an error of the caller; the refused read raises no token."""
    await storage.put(NAME, key="k", value=b"v", token=1)
    with pytest.raises(redfence.InvalidArgumentError) as refusal:
        await storage.get(NAME, key="k", **options)
    assert (refusal.value.field, refusal.value.error_reason) == (field, "INVALID_FENCING_TOKEN")
    assert await storage.get(NAME, key="k", unfenced=True) == GetResult(b"v", 1, 1)


async def test_pages_of_keys_join_to_the_whole_list_even_where_keys_are_long(storage: StorageCalls) -> None:
    """The greatest page of the longest keys fits into a message, and the pages miss no key."""
    keys = [f"{number:03}".ljust(1_024, "k") for number in range(70)]
    for key in keys:
        await storage.put(NAME, key=key, value=b"", token=1)
    page = await storage.list_keys(NAME, page_size=1_000)
    listed = list(page.keys)
    while page.next_page_token:
        page = await storage.list_keys(NAME, page_size=1_000, page_token=page.next_page_token)
        listed += page.keys
    assert listed == keys


@pytest.mark.parametrize(
    ("field", "method", "options"),
    [
        ("resource", "fence", {"resource": "r" * 100_000, "token": 1}),
        ("key", "get", {"key": "k" * 100_000}),
        ("key", "delete", {"key": "k" * 100_000, "token": 1}),
        ("value", "put", {"key": "k", "value": b"x" * 32_769, "token": 1}),
        ("value", "put", {"key": "k", "value": b"x" * 100_000, "token": 1}),
    ],
)
async def test_a_field_that_is_too_long_is_an_invalid_argument_and_no_overload(
    storage: StorageCalls, field: str, method: str, options: dict[str, Any]
) -> None:
    """The transport refuses a message beyond 64 KiB, and a retry cannot help."""
    with pytest.raises(redfence.InvalidArgumentError) as refusal:
        await getattr(storage, method)(**{"resource": NAME, **options})
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field} is ")
    assert (await storage.list_keys(NAME)).highest_token == 0


async def test_the_longest_names_and_value_fit_into_a_message_and_into_an_error(
    storage: StorageCalls,
) -> None:
    name, value = "ä" * 128, b"x" * 32_768
    await storage.put(name, key="k" * 1_024, value=value, token=1)
    assert await storage.get(name, key="k" * 1_024, token=1) == GetResult(value, 1, 1)
    with pytest.raises(redfence.NotFoundError) as refusal:
        await storage.get(name, key="豆" * 341, unfenced=True)
    assert _status(refusal.value) is grpc.StatusCode.NOT_FOUND
    assert refusal.value.metadata == {"resource": name, "key": "豆" * 341}


async def test_a_database_that_fails_acknowledges_nothing_and_works_again_afterwards(
    storage: StorageCalls,
) -> None:
    """A full disk refuses the write as retryable; the same call with the same token works later."""
    await storage.put(NAME, key="k", value=b"before", token=1)
    with full_disk(after_bytes=32_768), pytest.raises(redfence.UnavailableError) as refusal:
        await storage.put(NAME, key="k", value=b"x" * 32_768, token=2)
    assert _status(refusal.value) is grpc.StatusCode.UNAVAILABLE
    assert refusal.value.error_reason == "STORAGE_FAILED"
    assert refusal.value.retry_after == 1
    assert await storage.get(NAME, key="k", unfenced=True) == GetResult(b"before", 1, 1)
    assert await storage.put(NAME, key="k", value=b"x" * 32_768, token=2) == PutResult(2)


async def test_a_defect_is_told_as_internal_without_what_happened_inside(
    storage: StorageCalls, store: HeldStore, commit: GroupCommit, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log has the traceback. A storage that stops tells so with a reason of its own."""
    store.break_with(RuntimeError("secret detail"))
    with pytest.raises(redfence.ServerError) as refusal:
        await storage.fence(NAME, token=1)
    assert _status(refusal.value) is grpc.StatusCode.INTERNAL
    assert refusal.value.error_reason == "INTERNAL"
    assert "secret" not in str(refusal.value)
    assert "secret detail" in capsys.readouterr().out
    await commit.close()
    with pytest.raises(redfence.UnavailableError) as stopping:
        await storage.fence(NAME, token=1)
    assert stopping.value.error_reason == "DRAINING"


@pytest.mark.slow
async def test_a_call_out_of_time_is_unknown_and_its_write_may_have_happened(
    kind: str, target: str, store: HeldStore
) -> None:
    store.hold()
    # Time enough to connect and to send on a machine that stands still for a while.
    async with connected(kind, target, timeout_s=1.5) as storage:
        with pytest.raises(redfence.OutcomeUnknownError):
            await storage.put(NAME, key="k", value=b"v", token=1)
    assert store.reached.is_set()
    store.gate.set()
    async with connected(kind, target) as storage:
        assert await storage.get(NAME, key="k", unfenced=True) == GetResult(b"v", 1, 1)


async def test_a_storage_that_is_not_there_is_unavailable(kind: str) -> None:
    async with connected(kind, "127.0.0.1:1") as storage:
        with pytest.raises(redfence.UnavailableError):
            await storage.fence(NAME, token=1)


async def test_a_call_under_way_at_the_close_is_unknown_and_a_later_one_is_refused(
    kind: str, target: str, store: HeldStore
) -> None:
    """The caller's task is not cancelled; the storage may commit the write."""
    store.hold()
    async with connected(kind, target) as storage:
        writing = asyncio.create_task(storage.put(NAME, key="k", value=b"v", token=1))
        assert await asyncio.to_thread(store.reached.wait, 10)
    try:
        with pytest.raises(redfence.OutcomeUnknownError):
            await asyncio.wait_for(writing, 5)
    finally:
        store.gate.set()
    with pytest.raises(redfence.ClosedError):
        await storage.put(NAME, key="k", value=b"v", token=1)
