"""Defines the storage's typed clients for asyncio and for threads, with the same methods, results and errors.

    with StorageClient("127.0.0.1:50052") as storage:
        storage.fence("orders/42", token=lease)
        storage.put("orders/42", key="state", value=b"paid", token=lease)

A token is a number, or an object with a `token`, such as a lease. The methods raise the SDK's errors:

    StaleTokenError       a higher token was seen (`highest_token`): the lease is over, so stop
    NotFoundError         the key does not exist
    AccessDeniedError     the credentials are refused, or do not permit this: get others, do not retry
    InvalidArgumentError  `field` is missing or out of bounds: fix the call, do not retry
    UnavailableError      no server answers, its queue is full, or the database failed; nothing was
                          acknowledged: retry with the same token
    OutcomeUnknownError   no answer in time, or the client was closed meanwhile; repeating the call
                          with the same token is harmless
    ClosedError           the client is closed
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

import grpc
from grpc import aio

from redfence import ClosedError, OutcomeUnknownError, Tls, from_rpc_error
from redfence._tracing import client_span
from redfence._transport.bearer import Token as Bearer
from redfence._transport.bearer import bearer_token
from redfence._transport.grpc_channel import CallMetadata
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

# A local write takes a few milliseconds. Five seconds allow for a busy disk.
TIMEOUT_S_DEFAULT = 5.0

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # With these settings gRPC detects a frozen server within 15 s. Without the ping timeout it
    # takes over 30 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The client reconnects to a restarted storage within about a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_CLOSED = "the client is closed; create a new one"


def _call_metadata(
    target: str, tls: Tls | None, token: Bearer | None, *, plaintext_token: bool
) -> CallMetadata:
    encrypted = tls is not None
    bearer = bearer_token(token, [target], encrypted=encrypted, plaintext_token=plaintext_token)
    return CallMetadata((), bearer)


def _span(request: Any) -> AbstractContextManager[str]:
    return client_span(type(request).__name__.removesuffix("Request"), request.resource)


class AsyncStorageClient:
    """Calls the storage from one event loop; every method raises a `redfence.RedfenceError` on failure.

    Cancellation: gives up the answer of a call; the storage may still run it.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float = TIMEOUT_S_DEFAULT,
        tls: Tls | None = None,
        token: Bearer | None = None,
        plaintext_token: bool = False,
    ) -> None:
        """Create a client that connects at the first call.

        Args:
            target: HOST:PORT of the storage.
            timeout: how many seconds each call may take before it raises `OutcomeUnknownError`.
            tls: the files by which the client speaks TLS, read now. None uses those that REDFENCE_TLS_CA,
                REDFENCE_TLS_CERT and REDFENCE_TLS_KEY name; without any of them it speaks plain text.
            token: the bearer token that each call carries, or the path of a file that has it, read for each
                call. None uses REDFENCE_BEARER_TOKEN or REDFENCE_BEARER_TOKEN_FILE, if one is set.
            plaintext_token: whether the token may go to another machine without TLS.

        Raises:
            InvalidArgumentError: a file cannot be used, or the token would leave this machine in plain text.
        """
        tls = tls or Tls.from_environment()
        self._metadata = _call_metadata(target, tls, token, plaintext_token=plaintext_token)
        if tls is None:
            self._channel = aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            self._channel = aio.secure_channel(target, tls.credentials(), options=_CHANNEL_OPTIONS)
        self._stub = storage_pb2_grpc.StorageServiceStub(self._channel)
        self._timeout_s = timeout
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; the outcome of a pending call is unknown."""
        self._closed = True
        await self._channel.close()

    async def put(self, resource: str, *, key: str, value: bytes, token: Token) -> PutResult:
        """Set a key's value; it is on disk when this returns.

        Raises:
            StaleTokenError: a higher token was seen; nothing was changed.
        """
        request = put_request(resource, key=key, value=value, token=token)
        return PutResult.of(await self._call(self._stub.Put, request))

    async def get(
        self, resource: str, *, key: str, token: Token | None = None, unfenced: bool = False
    ) -> GetResult:
        """Return a key's value, and first make the storage refuse every token lower than `token`.

        With `unfenced` instead of a token, read without that guard: never write by such an answer.

        Raises:
            InvalidArgumentError: there is neither a token nor `unfenced`, or both.
            NotFoundError: the key does not exist; a token has still taken effect.
            StaleTokenError: a higher token was seen.
        """
        request = get_request(resource, key=key, token=token, unfenced=unfenced)
        return GetResult.of(await self._call(self._stub.Get, request))

    async def delete(self, resource: str, *, key: str, token: Token) -> DeleteResult:
        """Delete a key, if it exists; the deletion is on disk when this returns.

        Raises:
            StaleTokenError: a higher token was seen; nothing was changed.
        """
        request = delete_request(resource, key=key, token=token)
        return DeleteResult.of(await self._call(self._stub.Delete, request))

    async def fence(self, resource: str, *, token: Token) -> FenceResult:
        """Make the storage refuse every token lower than `token`.

        Raises:
            StaleTokenError: a higher token was seen.
        """
        request = fence_request(resource, token=token)
        return FenceResult.of(await self._call(self._stub.Fence, request))

    async def list_keys(self, resource: str, *, page_size: int = 0, page_token: str = "") -> KeyPage:
        """Return one page of keys; a `page_size` of 0 uses the storage's default."""
        request = list_keys_request(resource, page_size=page_size, page_token=page_token)
        return KeyPage.of(await self._call(self._stub.ListKeys, request))

    async def _call(self, method: Callable[..., Awaitable[AnswerT]], request: Any) -> AnswerT:
        with _span(request) as traceparent:
            try:
                metadata = self._metadata.now(traceparent)
                return await method(request, timeout=self._timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            except aio.UsageError as error:  # grpc raises this for a closed channel
                raise ClosedError(_CLOSED) from error
            except asyncio.CancelledError as error:
                # When the channel is closed during the call, grpc raises this in a task that was not
                # cancelled.
                task = asyncio.current_task()
                if self._closed and not (task and task.cancelling()):
                    raise OutcomeUnknownError("the client was closed during the call") from error
                raise


class StorageClient:
    """Calls the storage from any thread; every method raises a `redfence.RedfenceError` on failure."""

    def __init__(
        self,
        target: str,
        *,
        timeout: float = TIMEOUT_S_DEFAULT,
        tls: Tls | None = None,
        token: Bearer | None = None,
        plaintext_token: bool = False,
    ) -> None:
        """Create a client that connects at the first call.

        Args:
            target: HOST:PORT of the storage.
            timeout: how many seconds each call may take before it raises `OutcomeUnknownError`.
            tls: the files by which the client speaks TLS, read now. None uses those that REDFENCE_TLS_CA,
                REDFENCE_TLS_CERT and REDFENCE_TLS_KEY name; without any of them it speaks plain text.
            token: the bearer token that each call carries, or the path of a file that has it, read for each
                call. None uses REDFENCE_BEARER_TOKEN or REDFENCE_BEARER_TOKEN_FILE, if one is set.
            plaintext_token: whether the token may go to another machine without TLS.

        Raises:
            InvalidArgumentError: a file cannot be used, or the token would leave this machine in plain text.
        """
        tls = tls or Tls.from_environment()
        self._metadata = _call_metadata(target, tls, token, plaintext_token=plaintext_token)
        if tls is None:
            self._channel = grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, tls.credentials(), options=_CHANNEL_OPTIONS)
        self._stub = storage_pb2_grpc.StorageServiceStub(self._channel)
        self._timeout_s = timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the outcome of a pending call is unknown."""
        self._channel.close()

    def put(self, resource: str, *, key: str, value: bytes, token: Token) -> PutResult:
        """Set a key's value; it is on disk when this returns.

        Raises:
            StaleTokenError: a higher token was seen; nothing was changed.
        """
        request = put_request(resource, key=key, value=value, token=token)
        return PutResult.of(self._call(self._stub.Put, request))

    def get(
        self, resource: str, *, key: str, token: Token | None = None, unfenced: bool = False
    ) -> GetResult:
        """Return a key's value, and first make the storage refuse every token lower than `token`.

        With `unfenced` instead of a token, read without that guard: never write by such an answer.

        Raises:
            InvalidArgumentError: there is neither a token nor `unfenced`, or both.
            NotFoundError: the key does not exist; a token has still taken effect.
            StaleTokenError: a higher token was seen.
        """
        request = get_request(resource, key=key, token=token, unfenced=unfenced)
        return GetResult.of(self._call(self._stub.Get, request))

    def delete(self, resource: str, *, key: str, token: Token) -> DeleteResult:
        """Delete a key, if it exists; the deletion is on disk when this returns.

        Raises:
            StaleTokenError: a higher token was seen; nothing was changed.
        """
        request = delete_request(resource, key=key, token=token)
        return DeleteResult.of(self._call(self._stub.Delete, request))

    def fence(self, resource: str, *, token: Token) -> FenceResult:
        """Make the storage refuse every token lower than `token`.

        Raises:
            StaleTokenError: a higher token was seen.
        """
        request = fence_request(resource, token=token)
        return FenceResult.of(self._call(self._stub.Fence, request))

    def list_keys(self, resource: str, *, page_size: int = 0, page_token: str = "") -> KeyPage:
        """Return one page of keys; a `page_size` of 0 uses the storage's default."""
        request = list_keys_request(resource, page_size=page_size, page_token=page_token)
        return KeyPage.of(self._call(self._stub.ListKeys, request))

    def _call(self, method: Callable[..., AnswerT], request: Any) -> AnswerT:
        with _span(request) as traceparent:
            try:
                metadata = self._metadata.now(traceparent)
                return method(request, timeout=self._timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            except ValueError as error:  # grpc raises this for a closed channel
                raise ClosedError(_CLOSED) from error
