"""Show a gRPC call to the servicer's method, which takes it for a `grpc.aio.ServicerContext`.

It has only the methods that redfence's servicers use. Add one here before a servicer calls it: tests over
grpcio alone would not fail.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self

import grpc
from google.protobuf.message import DecodeError

from redfence_proto.rich_error import RichError, to_trailing_metadata
from redfence_proto.v1 import lock_pb2
from redfence_server.http2 import wire
from redfence_server.http2.output import Output

MESSAGE_BYTES: Final = 60
"""What Python keeps for a message besides its bytes."""
_NO_ROOM: Final = RichError(
    lock_pb2.ERROR_REASON_TOO_MANY_BUFFERED_BYTES,
    "the open calls and unread answers of this client fill its part of the server's memory; "
    "end some of them before the next call",
    metadata={"scope": "peer"},
    retry_after_ms=1_000,
)
NO_ROOM: Final = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    _NO_ROOM.message,
    to_trailing_metadata(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], _NO_ROOM),
)
"""The status of a call beyond its peer's part of the memory."""
_FAILED: Final = (grpc.StatusCode.UNKNOWN, "internal error in the server; see its log")


@dataclass(frozen=True, slots=True)
class Method:
    """A servicer's method, with its parser and its serializer."""

    behaviour: Callable[[Any, Any], Any]
    parse: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes]
    reads_stream: bool
    writes_stream: bool

    @classmethod
    def of(cls, handler: Any) -> Self:
        """Return the method of a handler that generated code registers."""
        assert not handler.request_streaming or handler.response_streaming, "no such method in the contract"
        return cls(
            behaviour=handler.unary_unary or handler.unary_stream or handler.stream_stream,
            parse=handler.request_deserializer,
            serialize=handler.response_serializer,
            reads_stream=handler.request_streaming,
            writes_stream=handler.response_streaming,
        )


class Context:
    """The messages and the end of one call.

    Args:
        deadline: when the caller stops waiting, on the loop's clock, or None.
        headers: those of the request.
    """

    __slots__ = (
        "_begun",
        "_body_bytes",
        "_deadline",
        "_failure",
        "_finished",
        "_headers",
        "_id",
        "_inbox",
        "_loop",
        "_method",
        "_no_more",
        "_out",
        "_untaken",
        "_wake",
    )

    def __init__(
        self,
        out: Output,
        stream_id: int,
        method: Method,
        *,
        loop: asyncio.AbstractEventLoop,
        deadline: float | None,
        headers: tuple[wire.Header, ...] = (),
    ) -> None:
        self._out = out
        self._headers = headers
        self._id = stream_id
        self._method = method
        self._loop = loop
        self._deadline = deadline
        # Whole messages that the method has not read, and the bytes that the peer may not replace yet.
        self._inbox: deque[bytes] = deque()
        self._untaken = 0
        # So many bytes of the body count as buffered.
        self._body_bytes = 0
        self._no_more = False
        self._wake: asyncio.Future[None] | None = None
        self._begun = False
        self._finished = False
        self._failure = _FAILED

    def peer(self) -> str:
        """Return the address of the connection's other end."""
        return self._out.peer.address

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return how the connection is protected, and the verified names of the client; see `Peer`."""
        return self._out.peer.auth_context

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the metadata that the caller sent."""
        return wire.request_metadata(self._headers)

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline, at least 0; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: wire.Metadata = ()) -> NoReturn:
        """End the call with this status.

        Raises:
            AbortError: always, to leave the method.
        """
        self._finish(wire.status_trailers(code, details, metadata))
        raise grpc.aio.AbortError

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status with which the call ends if the method raises, as generated code does."""
        self._failure = (code, self._failure[1])

    def set_details(self, details: str) -> None:
        """Set the text of that status."""
        self._failure = (self._failure[0], details)

    async def send_initial_metadata(self, metadata: wire.Metadata) -> None:
        """Send the headers now."""
        if not self._finished and not self._begun:
            self._begun = True
            self._out.send_headers(self._id, wire.response_headers(metadata))

    async def read(self) -> Any:
        """Return the next message, or `grpc.aio.EOF` after the last one.

        Raises:
            AbortError: the message cannot be parsed; the call has ended.
        """
        while not self._inbox:
            if self._no_more:
                return grpc.aio.EOF
            self._wake = self._loop.create_future()
            await self._wake
        data = self._inbox.popleft()
        self._body_bytes -= len(data) + MESSAGE_BYTES
        self._out.buffered.remove(len(data) + MESSAGE_BYTES)
        if self._untaken and not self._inbox:
            self._take()
        return self._parsed(data)

    async def write(self, message: Any) -> None:
        """Send one message; wait while the peer takes none. After the end of the call, do nothing."""
        if self._finished:
            return
        await self.send_initial_metadata(())
        self._out.send_message(self._id, wire.framed(self._method.serialize(message)))
        await self._out.room(self._id)

    def _parsed(self, data: bytes) -> Any:
        try:
            return self._method.parse(data)
        except DecodeError as error:
            details = f"the message cannot be parsed: {error}"
            self._finish(wire.status_trailers(grpc.StatusCode.INVALID_ARGUMENT, details, ()))
            raise grpc.aio.AbortError from error

    def _take(self) -> None:
        self._out.taken(self._id, self._untaken)
        self._untaken = 0

    def _finish(self, trailers: tuple[wire.Header, ...]) -> None:
        if self._finished:
            return
        self._close()
        if self._begun:
            self._out.send_trailers(self._id, trailers)
        else:
            self._out.send_headers(self._id, wire.response_headers() + trailers, end=True)
        if not self._no_more:
            self._out.stop_request(self._id)

    def _close(self) -> None:
        self._finished = True
        if self._untaken:
            self._take()
        self._out.buffered.remove(self._body_bytes)
        self._body_bytes = 0
        self._inbox.clear()
