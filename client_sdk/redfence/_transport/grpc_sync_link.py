"""Opens links over gRPC for threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from redfence._errors import UnavailableError
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
from redfence._transport.tls import Protection
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc

# A client that closes waits this long at most for the end of a connection attempt.
_SLICE_MS = 50


class GrpcSyncConnector:
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

    def connect(self, address: str, /, *, timeout_ms: int, is_closing: Callable[[], bool]) -> GrpcSyncLink:
        """Open a session with the server at `address`.

        Raises:
            UnavailableError: no server accepted the connection in time, or before the client began to close;
                or a file of TLS cannot be used.
            ClosedError: a fork has broken gRPC in this process.
        """
        check_fork()
        credentials = channel_credentials(address, self._protection)
        if credentials is None:
            channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        note_channel(channel)
        try:
            if _is_ready(channel, timeout_ms, is_closing):
                return GrpcSyncLink(channel, self._metadata)
        except BaseException:
            channel.close()
            raise
        channel.close()
        raise self._reach.error(address)


def _is_ready(channel: grpc.Channel, timeout_ms: int, is_closing: Callable[[], bool]) -> bool:
    settled = threading.Event()
    seen: list[grpc.ChannelConnectivity] = []

    def watch(state: grpc.ChannelConnectivity) -> None:
        # After a failure do not wait for gRPC's own backoff, because another address may be healthy.
        if state in {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE}:
            seen.append(state)
            settled.set()

    channel.subscribe(watch, try_to_connect=True)
    try:
        slices = math.ceil(timeout_ms / _SLICE_MS)
        for _ in range(slices):
            if is_closing() or settled.wait(timeout_ms / slices / 1000):
                break
    finally:
        channel.unsubscribe(watch)
    return seen[:1] == [grpc.ChannelConnectivity.READY]


class GrpcSyncLink:
    """A link on its own channel, with one session stream; a thread of gRPC writes the messages."""

    def __init__(self, channel: grpc.Channel, metadata: CallMetadata) -> None:
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
        # The session core bounds the number of unanswered commands, so this queue is bounded too.
        # None ends the stream.
        self._outgoing: SimpleQueue[lock_pb2.SessionRequest | None] = SimpleQueue()
        self._aborted = False
        self._stream: Any = lock.Session(self._requests(), metadata=metadata.now())

    def _requests(self) -> Iterator[lock_pb2.SessionRequest]:
        return iter(self._outgoing.get, None)

    def send(self, request: lock_pb2.SessionRequest, /) -> None:
        """Queue a message for writing; never block."""
        self._outgoing.put(request)

    def receive(self) -> lock_pb2.SessionResponse | None:
        """Return the next message, or None at the end of the stream."""
        try:
            response: lock_pb2.SessionResponse | None = next(self._stream, None)
        except grpc.RpcError as exc:
            if self._aborted:
                return None
            raise from_rpc_error(exc) from exc
        return response

    def call(self, method: Method, request: Any, /, *, timeout_ms: int) -> Any:
        """Make a unary call."""
        try:
            with client_span(method, getattr(request, "resource", "")) as traceparent:
                metadata = self._metadata.now(traceparent)
                return self._methods[method](request, timeout=timeout_ms / 1000, metadata=metadata)
        except (grpc.RpcError, ValueError) as exc:
            # grpc raises ValueError if the channel was closed before the call, and CANCELLED if
            # during the call.
            if self._aborted or not isinstance(exc, grpc.RpcError):
                raise UnavailableError("the connection was closed during the call") from exc
            raise call_error(exc, method, timeout_ms=timeout_ms) from exc

    def watch(
        self, request: lock_pb2.WatchLocksRequest, /
    ) -> Generator[lock_pb2.WatchLocksResponse, None, None]:
        """Yield the messages of a watch of locks."""
        try:
            stream = self._watch_locks(request, metadata=self._metadata.now())
        except ValueError as exc:
            raise UnavailableError("the connection was closed before the watch") from exc
        try:
            yield from stream
        except grpc.RpcError as exc:
            raise watch_error(exc) from exc
        finally:
            stream.cancel()

    def abort(self) -> None:
        """End the stream at once."""
        self._aborted = True
        self._outgoing.put(None)
        self._stream.cancel()

    def close(self) -> None:
        """End the stream and the channel."""
        self.abort()
        self._channel.close()
