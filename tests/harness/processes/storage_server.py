"""A storage server inside the test's process, both clients as one type, and a store that can be held."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

from redfence_proto.storage.v1 import storage_pb2_grpc
from redfence_server.access.guard import Guard
from redfence_server.api import serving as grpc_serving
from redfence_storage.client import AsyncStorageClient, StorageClient
from redfence_storage.client_messages import (
    DeleteResult,
    FenceResult,
    GetResult,
    KeyPage,
    PutResult,
    Token,
)
from redfence_storage.group_commit import GroupCommit
from redfence_storage.grpc_servicer import StorageServicer
from redfence_storage.sqlite_store import Outcome, SqliteStore
from redfence_storage.store import Command

ResultT = TypeVar("ResultT")


@asynccontextmanager
async def serving(commit: GroupCommit, *, guard: Guard | None = None) -> AsyncIterator[str]:
    """Serve the store over real gRPC and yield the address; the store is closed at the end."""
    server = grpc_serving.new_server()
    storage_pb2_grpc.add_StorageServiceServicer_to_server(StorageServicer(commit, guard=guard), server)
    port = grpc_serving.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)
        await commit.close()


class HeldStore(SqliteStore):
    """A real store whose transactions a test can hold up, and which can meet a full disk or a defect."""

    gate: threading.Event
    reached: threading.Event
    _defect: Exception | None = None

    def hold(self) -> None:
        """Make transactions wait for `gate` from now on; `reached` is set when one does."""
        self.gate, self.reached = threading.Event(), threading.Event()

    def break_with(self, defect: Exception) -> None:
        """Raise this from every transaction."""
        self._defect = defect

    def transact(self, commands: Sequence[Command[Any]]) -> list[Outcome]:
        """Do what the real store does, unless told otherwise."""
        if self._defect:
            raise self._defect
        if hasattr(self, "gate"):
            self.reached.set()
            assert self.gate.wait(10)
        return super().transact(commands)


@contextmanager
def full_disk(*, after_bytes: int = 0) -> Iterator[None]:
    """Make the kernel refuse to let any file of this process grow beyond that size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class StorageCalls(Protocol):
    """What both clients can do, as a test awaits it."""

    async def put(self, resource: str, *, key: str, value: bytes, token: Token) -> PutResult: ...

    async def get(
        self, resource: str, *, key: str, token: Token | None = None, unfenced: bool = False
    ) -> GetResult: ...

    async def delete(self, resource: str, *, key: str, token: Token) -> DeleteResult: ...

    async def fence(self, resource: str, *, token: Token) -> FenceResult: ...

    async def list_keys(self, resource: str, *, page_size: int = 0, page_token: str = "") -> KeyPage: ...


class InThreads:
    """The blocking client, each call in a thread, so that a test can await it."""

    def __init__(self, client: StorageClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            return await asyncio.to_thread(method, *arguments, **options)

        return call


@asynccontextmanager
async def connected(
    kind: str, target: str, *, timeout_s: float = 5.0, **options: Any
) -> AsyncIterator[StorageCalls]:
    """Yield the client of that kind, "async" or "sync"."""
    if kind == "async":
        async with AsyncStorageClient(target, timeout=timeout_s, **options) as client:
            yield client
    else:
        with StorageClient(target, timeout=timeout_s, **options) as blocking:
            yield InThreads(blocking)
