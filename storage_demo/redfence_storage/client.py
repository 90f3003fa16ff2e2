"""Typed clients of the storage, one for asyncio and one for threads: same methods, same order, same results and errors.

    with StorageClient("127.0.0.1:50052") as storage:
        storage.fence("orders/42", token=lease)
        storage.put("orders/42", key="state", value=b"paid", token=lease)

A token is a number or a lease: anything with a `token`. What goes wrong is told by the SDK's own errors:

    StaleTokenError       the lease behind the token is over: stop, and acquire anew; `highest_token` tells how far behind it is
    NotFoundError         there is no such key
    InvalidArgumentError  a field breaks its bounds, `field` tells which; do not retry
    UnavailableError      nobody listens, the queue is full, or the database failed: not acknowledged, retry with the same token
    OutcomeUnknownError   no answer in time, or the client was closed meanwhile; repeating it with the same token is harmless
    ClosedError           the client was closed before
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

import grpc
from grpc import aio

from redfence import ClosedError, OutcomeUnknownError, from_rpc_error
from redfence_proto.storage.v1 import storage_pb2_grpc
from redfence_storage.client_messages import (
    DeleteResult,
    FenceResult,
    GetResult,
    KeyPage,
    PutResult,
    Token,
    delete_request,
    fence_request,
    get_request,
    list_keys_request,
    put_request,
)

AnswerT = TypeVar("AnswerT")

# A local write takes a few milliseconds; five seconds leave room for a disk that is busy.
TIMEOUT_S_DEFAULT = 5.0

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A peer that froze is noticed within 15 s instead of 30 s and more; without the ping timeout it is not.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A storage that was restarted is found again within about a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_CLOSED = "the client is closed; make a new one"


class AsyncStorageClient:
    """Calls the storage from one event loop; every method raises a `redfence.RedfenceError` when the call fails.

    Cancellation: cancelling a call gives up its answer; the storage may carry it out all the same.
    """

    def __init__(self, target: str, *, timeout_s: float = TIMEOUT_S_DEFAULT) -> None:
        """Connect lazily.

        Args:
            target: HOST:PORT of the storage.
            timeout_s: how long each call may take before it ends in `OutcomeUnknownError`.
        """
        self._channel = aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._stub = storage_pb2_grpc.StorageServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; the outcome of a call that is still under way is unknown."""
        self._closed = True
        await self._channel.close()

    async def put(self, resource: str, *, key: str, value: bytes, token: Token) -> PutResult:
        """Set a key's value; on disk when this returns. Raises `StaleTokenError` if a higher token was seen."""
        request = put_request(resource, key=key, value=value, token=token)
        return PutResult.of(await self._call(self._stub.Put, request))

    async def get(self, resource: str, *, key: str, token: Token | None = None) -> GetResult:
        """Read a key; with a token, shut out every lower one first. Raises `NotFoundError`, `StaleTokenError`."""
        request = get_request(resource, key=key, token=token)
        return GetResult.of(await self._call(self._stub.Get, request))

    async def delete(self, resource: str, *, key: str, token: Token) -> DeleteResult:
        """Remove a key, which need not exist. Raises `StaleTokenError` if a higher token was seen."""
        request = delete_request(resource, key=key, token=token)
        return DeleteResult.of(await self._call(self._stub.Delete, request))

    async def fence(self, resource: str, *, token: Token) -> FenceResult:
        """Shut out every lower token. Raises `StaleTokenError` if a higher one was seen."""
        request = fence_request(resource, token=token)
        return FenceResult.of(await self._call(self._stub.Fence, request))

    async def list_keys(self, resource: str, *, page_size: int = 0, page_token: str = "") -> KeyPage:
        """Return one page of keys; a `page_size` of 0 leaves it to the storage."""
        request = list_keys_request(resource, page_size=page_size, page_token=page_token)
        return KeyPage.of(await self._call(self._stub.ListKeys, request))

    async def _call(self, method: Callable[..., Awaitable[AnswerT]], request: Any) -> AnswerT:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except aio.UsageError as error:  # what grpc says of a closed channel
            raise ClosedError(_CLOSED) from error
        except asyncio.CancelledError as error:
            # When the channel is closed meanwhile, grpc raises this in a task that nobody has cancelled.
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise OutcomeUnknownError("the client was closed during the call") from error
            raise


class StorageClient:
    """Calls the storage from any thread; every method raises a `redfence.RedfenceError` when the call fails."""

    def __init__(self, target: str, *, timeout_s: float = TIMEOUT_S_DEFAULT) -> None:
        """Connect lazily.

        Args:
            target: HOST:PORT of the storage.
            timeout_s: how long each call may take before it ends in `OutcomeUnknownError`.
        """
        self._channel = grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._stub = storage_pb2_grpc.StorageServiceStub(self._channel)
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; the outcome of a call that is still under way is unknown."""
        self._channel.close()

    def put(self, resource: str, *, key: str, value: bytes, token: Token) -> PutResult:
        """Set a key's value; on disk when this returns. Raises `StaleTokenError` if a higher token was seen."""
        request = put_request(resource, key=key, value=value, token=token)
        return PutResult.of(self._call(self._stub.Put, request))

    def get(self, resource: str, *, key: str, token: Token | None = None) -> GetResult:
        """Read a key; with a token, shut out every lower one first. Raises `NotFoundError`, `StaleTokenError`."""
        request = get_request(resource, key=key, token=token)
        return GetResult.of(self._call(self._stub.Get, request))

    def delete(self, resource: str, *, key: str, token: Token) -> DeleteResult:
        """Remove a key, which need not exist. Raises `StaleTokenError` if a higher token was seen."""
        request = delete_request(resource, key=key, token=token)
        return DeleteResult.of(self._call(self._stub.Delete, request))

    def fence(self, resource: str, *, token: Token) -> FenceResult:
        """Shut out every lower token. Raises `StaleTokenError` if a higher one was seen."""
        request = fence_request(resource, token=token)
        return FenceResult.of(self._call(self._stub.Fence, request))

    def list_keys(self, resource: str, *, page_size: int = 0, page_token: str = "") -> KeyPage:
        """Return one page of keys; a `page_size` of 0 leaves it to the storage."""
        request = list_keys_request(resource, page_size=page_size, page_token=page_token)
        return KeyPage.of(self._call(self._stub.ListKeys, request))

    def _call(self, method: Callable[..., AnswerT], request: Any) -> AnswerT:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except ValueError as error:  # what grpc says of a closed channel
            raise ClosedError(_CLOSED) from error
