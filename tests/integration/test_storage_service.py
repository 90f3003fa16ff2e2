"""The storage over real gRPC, by both clients: what it does, and every way in which it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.processes.storage_server import HeldStore, StorageCalls, connected, full_disk, serving
from harness.time.eventually import eventually
from redfence import (
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    OverloadedError,
    ServerError,
    StaleTokenError,
    UnavailableError,
    from_rpc_error,
)
from redfence_proto.storage.v1 import storage_pb2, storage_pb2_grpc
from redfence_storage.client import AsyncStorageClient
from redfence_storage.client_messages import DeleteResult, FenceResult, GetResult, KeyPage, PutResult
from redfence_storage.group_commit import GroupCommit

NAME = "orders/42"
QUEUE_MAX = 4


@dataclass(frozen=True)
class Lease:
    """What an SDK's lease looks like from here."""

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
async def storage(request: pytest.FixtureRequest, target: str) -> AsyncIterator[StorageCalls]:
    async with connected(request.param, target) as storage:
        yield storage


async def test_what_was_put_is_got_with_the_token_it_was_written_under(storage: StorageCalls) -> None:
    """A value, empty or of any bytes, comes back as it was; the highest token may have risen since."""
    assert await storage.put(NAME, key="state", value=bytes(range(256)), token=5) == PutResult(5)
    assert await storage.put(NAME, key="empty", value=b"", token=6) == PutResult(6)
    assert await storage.get(NAME, key="state") == GetResult(bytes(range(256)), 5, 6)
    assert await storage.get(NAME, key="empty") == GetResult(b"", 6, 6)


async def test_a_lease_serves_as_a_token(storage: StorageCalls) -> None:
    """Every fenced call takes anything with a token."""
    lease = Lease(token=3)
    assert await storage.fence(NAME, token=lease) == FenceResult(3)
    assert await storage.put(NAME, key="k", value=b"v", token=lease) == PutResult(3)
    assert await storage.get(NAME, key="k", token=lease) == GetResult(b"v", 3, 3)
    assert await storage.delete(NAME, key="k", token=lease) == DeleteResult(deleted=True, highest_token=3)


async def test_a_later_holder_succeeds_and_then_every_write_of_the_earlier_is_refused(
    storage: StorageCalls,
) -> None:
    """The later token takes over at once; the earlier can neither write, delete, fence nor read with its own."""
    await storage.put(NAME, key="k", value=b"earlier", token=1)
    await storage.put(NAME, key="k", value=b"later", token=2)
    for refused in (
        storage.put(NAME, key="k", value=b"stale", token=1),
        storage.delete(NAME, key="k", token=1),
        storage.fence(NAME, token=1),
        storage.get(NAME, key="k", token=1),
    ):
        with pytest.raises(StaleTokenError) as refusal:
            await refused
        assert refusal.value.highest_token == 2
        assert _status(refusal.value) is grpc.StatusCode.FAILED_PRECONDITION
        assert refusal.value.metadata == {"resource": NAME, "fencing_token": "1", "highest_token": "2"}
    assert await storage.get(NAME, key="k") == GetResult(b"later", 2, 2)
    await storage.put(NAME, key="k", value=b"later still", token=2)


async def test_a_fenced_read_or_a_fence_shuts_out_the_earlier_holder_before_any_write(
    storage: StorageCalls,
) -> None:
    """From the new holder's first read on, a late write of the old one is refused, whether or not the read found something."""
    await storage.put("read", key="k", value=b"0", token=1)
    assert await storage.get("read", key="k", token=2) == GetResult(b"0", 1, 2)
    with pytest.raises(NotFoundError):
        await storage.get("missed", key="k", token=2)
    await storage.fence("fenced", token=2)
    for name in ("read", "missed", "fenced"):
        with pytest.raises(StaleTokenError):
            await storage.put(name, key="k", value=b"late", token=1)


async def test_a_plain_read_is_never_stale_and_raises_nothing(storage: StorageCalls) -> None:
    """Anybody may look."""
    await storage.put(NAME, key="k", value=b"v", token=1)
    await storage.get(NAME, key="k")
    await storage.list_keys(NAME)
    assert await storage.put(NAME, key="k", value=b"w", token=1) == PutResult(1)


async def test_deleting_never_lowers_the_highest_token_and_may_be_repeated(storage: StorageCalls) -> None:
    """The fence stays when the data has gone."""
    await storage.put(NAME, key="k", value=b"v", token=7)
    assert await storage.delete(NAME, key="k", token=7) == DeleteResult(deleted=True, highest_token=7)
    assert await storage.delete(NAME, key="k", token=8) == DeleteResult(deleted=False, highest_token=8)
    with pytest.raises(StaleTokenError):
        await storage.put(NAME, key="k", value=b"late", token=7)


async def test_resources_are_fenced_apart(storage: StorageCalls) -> None:
    """A high token of one resource refuses nothing of another."""
    await storage.put("a", key="k", value=b"v", token=100)
    assert await storage.put("b", key="k", value=b"v", token=1) == PutResult(1)


async def test_pages_of_keys_join_to_the_whole_list_even_where_keys_are_long(storage: StorageCalls) -> None:
    """Asking for the greatest page of the longest keys gives pages that fit into a message, and misses none."""
    keys = [f"{number:03}".ljust(1_024, "k") for number in range(70)]
    for key in keys:
        await storage.put(NAME, key=key, value=b"", token=1)
    listed: list[str] = []
    page = await storage.list_keys(NAME, page_size=1_000)
    listed += page.keys
    while page.next_page_token:
        page = await storage.list_keys(NAME, page_size=1_000, page_token=page.next_page_token)
        listed += page.keys
    assert listed == keys
    assert await storage.list_keys("nobody's") == KeyPage((), "", 0)


@pytest.mark.parametrize(
    ("reason", "field", "method", "options"),
    [
        ("INVALID_RESOURCE", "resource", "Fence", {"resource": "", "fencing_token": 1}),
        ("INVALID_FENCING_TOKEN", "fencing_token", "Fence", {"fencing_token": 2**53}),
        ("INVALID_FENCING_TOKEN", "fencing_token", "Get", {"key": "k", "fencing_token": 0}),
        ("INVALID_KEY", "key", "Delete", {"key": "", "fencing_token": 1}),
        ("INVALID_VALUE", "value", "Put", {"key": "k", "value": b"x" * 32_769, "fencing_token": 1}),
        ("INVALID_PAGE", "page_size", "ListKeys", {"page_size": 1_001}),
        ("INVALID_PAGE", "page_token", "ListKeys", {"page_token": "?"}),
    ],
)
async def test_a_field_out_of_bounds_is_named_by_the_storage_and_nothing_is_changed(
    target: str, reason: str, field: str, method: str, options: dict[str, Any]
) -> None:
    """Whatever the caller is written in learns which field and why, by the reasons of the contract."""
    request = getattr(storage_pb2, f"{method}Request")(**{"resource": NAME, **options})
    async with grpc.aio.insecure_channel(target) as channel:
        stub = storage_pb2_grpc.StorageServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await getattr(stub, method)(request)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = from_rpc_error(refusal.value)
        assert isinstance(error, InvalidArgumentError)
        assert (error.error_reason, error.field) == (reason, field)
        assert str(error).startswith(f"{field} ")
        assert (await stub.ListKeys(storage_pb2.ListKeysRequest(resource=NAME))).highest_token == 0


_TOO_LONG = [
    ("resource", "fence", {"resource": "r" * 100_000, "token": 1}),
    ("key", "get", {"key": "k" * 100_000}),
    ("key", "delete", {"key": "k" * 100_000, "token": 1}),
    ("value", "put", {"key": "k", "value": b"x" * 32_769, "token": 1}),
    ("value", "put", {"key": "k", "value": b"x" * 100_000, "token": 1}),
]


@pytest.mark.parametrize(("field", "method", "options"), _TOO_LONG)
async def test_what_is_too_long_is_told_as_such_and_not_as_an_overload_that_goes_by(
    storage: StorageCalls, field: str, method: str, options: dict[str, Any]
) -> None:
    """The transport refuses a message beyond 64 KiB; a caller that believed it could retry would do so for ever."""
    with pytest.raises(InvalidArgumentError) as refusal:
        await getattr(storage, method)(**{"resource": NAME, **options})
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field} is ")
    assert (await storage.list_keys(NAME)).highest_token == 0


async def test_the_longest_value_under_the_longest_names_is_kept(storage: StorageCalls) -> None:
    """What is within the bounds fits into a message, both ways."""
    name, key, value = "ä" * 128, "k" * 1_024, b"x" * 32_768
    await storage.put(name, key=key, value=value, token=1)
    assert await storage.get(name, key=key, token=1) == GetResult(value, 1, 1)


async def test_a_missing_key_is_told_even_with_the_longest_names(storage: StorageCalls) -> None:
    """The error's details arrive whole however long the names and however badly they encode."""
    name, key = "ä" * 128, "豆" * 341
    with pytest.raises(NotFoundError) as refusal:
        await storage.get(name, key=key)
    assert _status(refusal.value) is grpc.StatusCode.NOT_FOUND
    assert refusal.value.metadata == {"resource": name, "key": key}


async def test_more_writes_than_the_queue_holds_are_refused_with_advice_to_retry(
    storage: StorageCalls, store: HeldStore, commit: GroupCommit
) -> None:
    """While the disk hangs, the queue fills up; those in it are acknowledged when it goes on."""
    store.hold()
    calls = [asyncio.create_task(storage.fence(NAME, token=1)) for _ in range(QUEUE_MAX + 2)]
    # Both: one that came after the disk goes on would be taken.
    await eventually(lambda: sum(call.done() for call in calls) == 2, interval_s=0.01)
    finished = [call for call in calls if call.done()]
    queued = [call for call in calls if call not in finished]
    (refusal,) = {type(call.exception()) for call in finished}
    assert refusal is OverloadedError
    error = finished.pop().exception()
    assert isinstance(error, OverloadedError)
    assert _status(error) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.error_reason == "TOO_MANY_WRITES"
    assert error.metadata == {"limit": str(QUEUE_MAX)}
    assert error.retry_after == 0.1
    store.gate.set()
    assert await asyncio.gather(*queued) == [FenceResult(1)] * QUEUE_MAX


async def test_a_database_that_fails_acknowledges_nothing_and_is_back_when_the_cause_has_gone(
    storage: StorageCalls,
) -> None:
    """Full disk: the write is refused as retryable; the same call with the same token works later."""
    await storage.put(NAME, key="k", value=b"before", token=1)
    with full_disk(after_bytes=32_768), pytest.raises(UnavailableError) as refusal:
        await storage.put(NAME, key="k", value=b"x" * 32_768, token=2)
    assert _status(refusal.value) is grpc.StatusCode.UNAVAILABLE
    assert refusal.value.error_reason == "STORAGE_FAILED"
    assert refusal.value.retry_after == 1
    assert await storage.get(NAME, key="k") == GetResult(b"before", 1, 1)
    assert await storage.put(NAME, key="k", value=b"x" * 32_768, token=2) == PutResult(2)


async def test_a_stopping_storage_says_so(storage: StorageCalls, commit: GroupCommit) -> None:
    """A call that meets a closed store is told to go on elsewhere."""
    await commit.close()
    with pytest.raises(UnavailableError) as refusal:
        await storage.fence(NAME, token=1)
    assert refusal.value.error_reason == "DRAINING"


async def test_a_defect_is_told_as_internal_without_what_happened_inside(
    storage: StorageCalls, store: HeldStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """The caller learns that it is not to blame and nothing more; the log has the traceback."""
    store.break_with(RuntimeError("secret detail"))
    with pytest.raises(ServerError) as refusal:
        await storage.fence(NAME, token=1)
    assert _status(refusal.value) is grpc.StatusCode.INTERNAL
    assert refusal.value.error_reason == "INTERNAL"
    assert "secret" not in str(refusal.value)
    assert "secret detail" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_call_out_of_time_is_unknown_and_its_write_may_have_happened(
    kind: str, target: str, store: HeldStore
) -> None:
    """The client does not say that it failed: here it did not."""
    store.hold()
    # Time enough to connect and to send on a machine that stands still for a while.
    async with connected(kind, target, timeout_s=1.5) as storage:
        with pytest.raises(OutcomeUnknownError):
            await storage.put(NAME, key="k", value=b"v", token=1)
    assert store.reached.is_set()
    store.gate.set()
    async with connected(kind, target) as storage:
        assert await storage.get(NAME, key="k") == GetResult(b"v", 1, 1)


async def test_a_cancelled_call_undoes_nothing_and_holds_nobody_up(target: str, store: HeldStore) -> None:
    """The caller went away while its write was being committed: it is committed, and the next call is answered."""
    async with AsyncStorageClient(target) as storage:
        store.hold()
        gone = asyncio.create_task(storage.put(NAME, key="k", value=b"v", token=1))
        assert await asyncio.to_thread(store.reached.wait, 10)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        store.gate.set()
        assert await storage.get(NAME, key="k") == GetResult(b"v", 1, 1)


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_nobody_listening_is_told_as_unavailable(kind: str) -> None:
    """The transport's own failures are of the clients' tree as well."""
    async with connected(kind, "127.0.0.1:1") as storage:
        with pytest.raises(UnavailableError):
            await storage.fence(NAME, token=1)


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_call_under_way_when_the_client_is_closed_is_unknown_and_a_later_one_is_refused(
    kind: str, target: str, store: HeldStore
) -> None:
    """Nobody has cancelled the caller's task, so it is not told that it was; its write is committed or not."""
    store.hold()
    async with connected(kind, target) as storage:
        writing = asyncio.create_task(storage.put(NAME, key="k", value=b"v", token=1))
        assert await asyncio.to_thread(store.reached.wait, 10)
    try:
        with pytest.raises(OutcomeUnknownError):
            await asyncio.wait_for(writing, 5)
    finally:
        store.gate.set()
    with pytest.raises(ClosedError):
        await storage.put(NAME, key="k", value=b"v", token=1)
