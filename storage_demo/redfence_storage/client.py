"""Typed clients of the storage, one for asyncio and one for threads: same methods, same order, same results and errors.

    with StorageClient("127.0.0.1:50052") as storage:
        storage.fence("orders/42", token=lease)
        storage.put("orders/42", key="state", value=b"paid", token=lease)

A token is a number or a lease: anything with a `token`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, cast

import grpc

from redfence_proto.storage.v1 import storage_pb2_grpc
from redfence_storage.client_errors import FailedCall, from_call
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


class AsyncStorageClient:
    """Calls the storage from one event loop; every method raises a `StorageClientError` when the call fails.

    Cancellation: cancelling a call gives up its answer; the storage may carry it out all the same.
    """

    def __init__(self, target: str, *, timeout_s: float = TIMEOUT_S_DEFAULT) -> None:
        """Connect lazily.

        Args:
            target: HOST:PORT of the storage.
            timeout_s: how long each call may take before it ends in `OutcomeUnknownError`.
        """
        self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._stub = storage_pb2_grpc.StorageServiceStub(self._channel)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; the outcome of a call that is still under way is unknown."""
        await self._channel.close()

    async def put(self, resource: str, *, key: str, value: bytes, token: Token) -> PutResult:
        """Set a key's value; on disk when this returns. Raises `StaleTokenError` if a higher token was seen."""
        request = put_request(resource, key=key, value=value, token=token)
        with _translated_errors():
            return PutResult.of(await self._stub.Put(request, timeout=self._timeout_s))

    async def get(self, resource: str, *, key: str, token: Token | None = None) -> GetResult:
        """Read a key; with a token, shut out every lower one first. Raises `KeyNotFoundError`, `StaleTokenError`."""
        request = get_request(resource, key=key, token=token)
        with _translated_errors():
            return GetResult.of(await self._stub.Get(request, timeout=self._timeout_s))

    async def delete(self, resource: str, *, key: str, token: Token) -> DeleteResult:
        """Remove a key, which need not exist. Raises `StaleTokenError` if a higher token was seen."""
        request = delete_request(resource, key=key, token=token)
        with _translated_errors():
            return DeleteResult.of(await self._stub.Delete(request, timeout=self._timeout_s))

    async def fence(self, resource: str, *, token: Token) -> FenceResult:
        """Shut out every lower token. Raises `StaleTokenError` if a higher one was seen."""
        request = fence_request(resource, token=token)
        with _translated_errors():
            return FenceResult.of(await self._stub.Fence(request, timeout=self._timeout_s))

    async def list_keys(self, resource: str, *, page_size: int = 0, page_token: str = "") -> KeyPage:
        """Return one page of keys; a `page_size` of 0 leaves it to the storage."""
        request = list_keys_request(resource, page_size=page_size, page_token=page_token)
        with _translated_errors():
            return KeyPage.of(await self._stub.ListKeys(request, timeout=self._timeout_s))


class StorageClient:
    """Calls the storage from any thread; every method raises a `StorageClientError` when the call fails."""

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
        with _translated_errors():
            return PutResult.of(self._stub.Put(request, timeout=self._timeout_s))

    def get(self, resource: str, *, key: str, token: Token | None = None) -> GetResult:
        """Read a key; with a token, shut out every lower one first. Raises `KeyNotFoundError`, `StaleTokenError`."""
        request = get_request(resource, key=key, token=token)
        with _translated_errors():
            return GetResult.of(self._stub.Get(request, timeout=self._timeout_s))

    def delete(self, resource: str, *, key: str, token: Token) -> DeleteResult:
        """Remove a key, which need not exist. Raises `StaleTokenError` if a higher token was seen."""
        request = delete_request(resource, key=key, token=token)
        with _translated_errors():
            return DeleteResult.of(self._stub.Delete(request, timeout=self._timeout_s))

    def fence(self, resource: str, *, token: Token) -> FenceResult:
        """Shut out every lower token. Raises `StaleTokenError` if a higher one was seen."""
        request = fence_request(resource, token=token)
        with _translated_errors():
            return FenceResult.of(self._stub.Fence(request, timeout=self._timeout_s))

    def list_keys(self, resource: str, *, page_size: int = 0, page_token: str = "") -> KeyPage:
        """Return one page of keys; a `page_size` of 0 leaves it to the storage."""
        request = list_keys_request(resource, page_size=page_size, page_token=page_token)
        with _translated_errors():
            return KeyPage.of(self._stub.ListKeys(request, timeout=self._timeout_s))


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        # The base class is empty; what calls raise, blocking or not, is the finished call as well.
        raise from_call(cast(FailedCall, error)) from error
