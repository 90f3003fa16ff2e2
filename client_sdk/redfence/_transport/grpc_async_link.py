"""Opens links over gRPC for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc import aio

from redfence._errors import RedfenceError, UnavailableError
from redfence._messages.server_errors import from_rpc_error
from redfence._tracing import client_span
from redfence._transport.bearer import BearerToken
from redfence._transport.fork import check_fork, note_channel
from redfence._transport.grpc_channel import (
    CHANNEL_OPTIONS,
    CallMetadata,
    Metadata,
    call_error,
    channel_credentials,
    check_metadata,
    watch_error,
)
from redfence._transport.links import Method
from redfence._transport.reach import Reach
from redfence._transport.stream_status import StreamStatus
from redfence._transport.tls import Protection
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc


class GrpcAsyncConnector:
    """Opens a channel and a session for each link.

    Args:
        protection: how connections are protected; None is plain text.
        metadata: gRPC metadata that every call carries.
        token: the bearer token that every call carries, or None.
    """

    def __init__(
        self, *, protection: Protection, metadata: Metadata, token: BearerToken | None = None
    ) -> None:
        self._protection = protection
        self._metadata = CallMetadata(check_metadata(metadata), token)
        self._reach = Reach(protection)

    async def connect(self, address: str, /, *, timeout_ms: int) -> GrpcAsyncLink:
        """Open a session with the server at `address`.

        Cancellation: closes the channel.

        Raises:
            UnavailableError: no server accepted the connection in time, or a file of TLS cannot be used.
            ClosedError: a fork has broken gRPC in this process.
        """
        check_fork()
        credentials = channel_credentials(address, self._protection)
        if credentials is None:
            channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            channel = aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        note_channel(channel)
        try:
            # `wait_for` of Python 3.11 loses a cancellation that comes at the moment of the
            # connection's result.
            async with asyncio.timeout(timeout_ms / 1000):
                is_ready = await _is_ready(channel)
        except TimeoutError:
            is_ready = False
        except BaseException:
            await channel.close()
            raise
        try:
            if is_ready:
                return GrpcAsyncLink(channel, self._metadata)
        except BaseException:
            await channel.close()
            raise
        await channel.close()
        raise self._reach.error(address)


async def _is_ready(channel: aio.Channel) -> bool:
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            # Do not wait for gRPC's own backoff, because another address may be healthy.
            return False
        await channel.wait_for_state_change(state)
    return True


class GrpcAsyncLink:
    """A link on its own channel, with one session stream."""

    def __init__(self, channel: aio.Channel, metadata: CallMetadata) -> None:
        self._channel = channel
        self._metadata = metadata
        lock = lock_pb2_grpc.LockServiceStub(channel)
        admin = lock_pb2_grpc.AdminServiceStub(channel)
        self._methods: dict[Method, Any] = {
            "GetLock": lock.GetLock,
            "CheckToken": lock.CheckToken,
            "ClusterStatus": admin.ClusterStatus,
            "ForceRelease": admin.ForceRelease,
            "ListLocks": admin.ListLocks,
            "ListSessions": admin.ListSessions,
        }
        self._watch_locks: Any = admin.WatchLocks
        self._stream: Any = lock.Session(metadata=metadata.now())
        self._status = StreamStatus(self._stream)
        self._aborted = False

    async def send(self, request: lock_pb2.SessionRequest, /) -> None:
        """Write a message to the stream.

        Cancellation: breaks the stream.
        """
        try:
            await self._stream.write(request)
        except (aio.AioRpcError, asyncio.InvalidStateError) as exc:
            raise _translated(exc) from exc

    async def receive(self) -> lock_pb2.SessionResponse | None:
        """Return the next message, or None at the end of the stream.

        Cancellation: breaks the stream.
        """
        try:
            response = await self._stream.read()
        except aio.AioRpcError as exc:
            if self._aborted:
                return None
            error = await self._status.of(exc)
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            if self._cancelled_by_us():
                return None
            raise
        return None if response is aio.EOF else response

    def _cancelled_by_us(self) -> bool:
        """Return whether `abort` caused a CancelledError; gRPC raises it in a task that was not cancelled."""
        task = asyncio.current_task()
        return self._aborted and not (task and task.cancelling())

    async def call(self, method: Method, request: Any, /, *, timeout_ms: int) -> Any:
        """Make a unary call.

        Cancellation: cancels the call.
        """
        try:
            with client_span(method, getattr(request, "resource", "")) as traceparent:
                metadata = self._metadata.now(traceparent)
                return await self._methods[method](request, timeout=timeout_ms / 1000, metadata=metadata)
        except aio.AioRpcError as exc:
            raise call_error(exc, method, timeout_ms=timeout_ms) from exc
        except asyncio.CancelledError as exc:
            if self._cancelled_by_us():
                raise UnavailableError("the connection was closed during the call") from exc
            raise

    async def watch(
        self, request: lock_pb2.WatchLocksRequest, /
    ) -> AsyncGenerator[lock_pb2.WatchLocksResponse, None]:
        """Yield the messages of a watch of locks.

        Cancellation: ends the watch.
        """
        stream = self._watch_locks(request, metadata=self._metadata.now())
        try:
            async for message in stream:
                yield message
        except aio.AioRpcError as exc:
            raise watch_error(exc) from exc
        except (asyncio.CancelledError, aio.UsageError) as exc:
            if self._cancelled_by_us():
                raise UnavailableError("the connection was closed during the watch") from exc
            raise
        finally:
            stream.cancel()

    def abort(self) -> None:
        """End the stream at once."""
        self._aborted = True
        self._stream.cancel()

    async def close(self) -> None:
        """End the stream and the channel.

        Cancellation: still closes the channel.
        """
        try:
            self.abort()
            # A task of gRPC on this loop waits for the status. It must end before the loop does.
            await self._stream.code()
        finally:
            await self._channel.close()


def _translated(error: BaseException) -> RedfenceError:
    if isinstance(error, aio.AioRpcError):
        return from_rpc_error(error)
    return UnavailableError("the stream was already closed")
