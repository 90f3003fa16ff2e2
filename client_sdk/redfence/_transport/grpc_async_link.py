"""Links over gRPC for asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc import aio

from redfence._errors import RedfenceError, UnavailableError, from_rpc_error
from redfence._transport.grpc_channel import CHANNEL_OPTIONS, Metadata
from redfence._transport.links import Method
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc


class GrpcAsyncConnector:
    """Opens a channel and a session for each link.

    Args:
        credentials: for TLS; None: plaintext.
        metadata: sent with every call.
    """

    def __init__(self, *, credentials: grpc.ChannelCredentials | None, metadata: Metadata) -> None:
        self._credentials = credentials
        self._metadata = tuple(metadata)

    async def connect(self, address: str, /, *, timeout_ms: int) -> GrpcAsyncLink:
        """Open a session with the server at `address`.

        Cancellation: the channel is closed.

        Raises:
            UnavailableError: nobody accepted the connection in time.
        """
        if self._credentials is None:
            channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            channel = aio.secure_channel(address, self._credentials, options=CHANNEL_OPTIONS)
        try:
            # Not `wait_for`: that of Python 3.11 loses a cancellation which comes just as the connection is taken or refused.
            async with asyncio.timeout(timeout_ms / 1000):
                await _until_ready(channel, address)
        except BaseException as exc:
            await channel.close()
            if isinstance(exc, TimeoutError):
                raise UnavailableError(
                    f"{address} did not accept a connection within {timeout_ms} ms"
                ) from exc
            raise
        return GrpcAsyncLink(channel, self._metadata)


async def _until_ready(channel: aio.Channel, address: str) -> None:
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            # Waiting on would mean gRPC's own back-off; another address may be well.
            raise UnavailableError(f"{address} refused the connection")
        await channel.wait_for_state_change(state)


class GrpcAsyncLink:
    """One channel with one session on it."""

    def __init__(self, channel: aio.Channel, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self._channel = channel
        self._metadata = metadata
        lock = lock_pb2_grpc.LockServiceStub(channel)
        admin = lock_pb2_grpc.AdminServiceStub(channel)
        self._methods: dict[Method, Any] = {
            "GetLock": lock.GetLock,
            "CheckToken": lock.CheckToken,
            "ClusterStatus": admin.ClusterStatus,
        }
        self._stream: Any = lock.Session(metadata=metadata)
        self._aborted = False

    async def send(self, request: lock_pb2.SessionRequest, /) -> None:
        """Write a message.

        Cancellation: the stream is broken.
        """
        try:
            await self._stream.write(request)
        except (aio.AioRpcError, asyncio.InvalidStateError) as exc:
            raise _translated(exc) from exc

    async def receive(self) -> lock_pb2.SessionResponse | None:
        """Return the next message, or None at the end.

        Cancellation: the stream is broken.
        """
        try:
            response = await self._stream.read()
        except aio.AioRpcError as exc:
            if self._aborted:
                return None
            raise _translated(exc) from exc
        except asyncio.CancelledError:
            if self._cancelled_by_us():
                return None
            raise
        return None if response is aio.EOF else response

    def _cancelled_by_us(self) -> bool:
        """Whether a CancelledError came of `abort`: gRPC raises it in a task that nobody has cancelled."""
        task = asyncio.current_task()
        return self._aborted and not (task and task.cancelling())

    async def call(self, method: Method, request: Any, /, *, timeout_ms: int) -> Any:
        """Make a single call.

        Cancellation: the call is cancelled.
        """
        try:
            return await self._methods[method](request, timeout=timeout_ms / 1000, metadata=self._metadata)
        except aio.AioRpcError as exc:
            raise _translated(exc) from exc
        except asyncio.CancelledError as exc:
            if self._cancelled_by_us():
                raise UnavailableError("the connection was closed during the call") from exc
            raise

    def abort(self) -> None:
        """End the stream at once."""
        self._aborted = True
        self._stream.cancel()

    async def close(self) -> None:
        """End the stream and the channel.

        Cancellation: the channel is closed all the same.
        """
        try:
            self.abort()
            # gRPC has a task of its own on this loop that waits for the status; let it end before the loop does.
            await self._stream.code()
        finally:
            await self._channel.close()


def _translated(error: BaseException) -> RedfenceError:
    if isinstance(error, aio.AioRpcError):
        return from_rpc_error(error)
    return UnavailableError("the stream was already closed")
