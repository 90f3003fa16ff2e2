"""Write what one turn of the event loop queues for a connection at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import ngh2

from redfence_server.http2 import wire
from redfence_server.http2.buffered import BufferedBytes
from redfence_server.http2.liveness import Liveness
from redfence_server.http2.peer import Peer

# A stream or the connection may have ended before the event that tells it has come here.
_ENDED: Final = (ngh2.StreamUnavailableError, ngh2.ConnectionStateError, ngh2.ConnectionClosingError)
# A method that writes a stream waits while more of its bytes than this are queued.
_STREAM_QUEUE_BYTES: Final = 64 * 1024
_ENHANCE_YOUR_CALM: Final = 11


class Output:
    """Queues the answers of a connection's calls. After the connection's end, every method does nothing.

    Args:
        transport: asyncio's or uvloop's, which have no common class.

    Attributes:
        peer: the other end of the connection.
        buffered: what the connection makes the server keep.
        closed: the connection has ended, or ends once its last bytes have left.
    """

    def __init__(
        self,
        http2: ngh2.Connection,
        transport: Any,
        *,
        peer: Peer,
        buffered: BufferedBytes,
        liveness: Liveness,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.peer = peer
        self.buffered = buffered
        self.closed = False
        self._http2 = http2
        self._transport = transport
        self._liveness = liveness
        self._loop = loop
        self._flushes = False
        self._paused = False
        # Ended calls whose request has not ended: the peer is told to stop, once it has the answer.
        self._to_reset: set[int] = set()
        self._waiting_for_room: dict[int, asyncio.Future[None]] = {}

    # --- calls

    def send_headers(self, stream_id: int, headers: tuple[wire.Header, ...], *, end: bool = False) -> None:
        """Begin the answer of a call; `end` also ends it."""
        self._send(partial(self._http2.send_response, stream_id, headers, end_stream=end))

    def send_message(self, stream_id: int, frame: bytes) -> None:
        """Queue one message of a call."""
        self._send(partial(self._http2.send_data, stream_id, frame))

    def send_trailers(self, stream_id: int, trailers: tuple[wire.Header, ...]) -> None:
        """End the answer of a call."""
        self._send(partial(self._http2.send_trailers, stream_id, trailers))

    def stop_request(self, stream_id: int) -> None:
        """Tell the peer to send no more of the request, once it has the answer."""
        self._to_reset.add(stream_id)

    def forget(self, stream_id: int) -> None:
        """Note that the stream is closed both ways."""
        self._to_reset.discard(stream_id)

    async def room(self, stream_id: int) -> bool:
        """Return once at most 64 KiB of the call are queued.

        Returns:
            False if the peer leaves too much unread: the call was reset, and what was queued is gone.
        """
        queued = self._queued(stream_id)
        if queued <= _STREAM_QUEUE_BYTES:
            return True
        if not self.buffered.add(queued):
            # A client of gRPC shows this code as RESOURCE_EXHAUSTED.
            self._try(partial(self._http2.reset_stream, stream_id, _ENHANCE_YOUR_CALM))
            return False
        self._waiting_for_room[stream_id] = room = self._loop.create_future()
        try:
            await room
        finally:
            del self._waiting_for_room[stream_id]
            self.buffered.remove(queued)
        return True

    def taken(self, stream_id: int, byte_count: int) -> None:
        """Let the peer send so many more bytes."""
        if byte_count:
            self._try(partial(self._http2.acknowledge_received_data, byte_count, stream_id))

    # --- the connection

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        self._try(self._http2.ping)

    def goaway(self, error_code: int = 0, reason: bytes = b"") -> None:
        """Tell the peer that this connection takes no more calls."""
        self._try(partial(self._http2.send_goaway, error_code, debug_data=reason))

    def set_paused(self, paused: bool) -> None:  # noqa: FBT001  (named by the method)
        """Keep what is queued while the peer does not read, or go on writing."""
        self._paused = paused
        self.flush_soon()

    def close(self) -> None:
        """Write what is queued, then close the socket."""
        if not self.closed:
            self.flush()
            self.closed = True
            self._transport.close()

    def abort(self) -> None:
        """Close the socket at once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def flush_soon(self) -> None:
        """Write at the end of this turn of the loop."""
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what is queued now, as far as the peer's windows allow."""
        self._flushes = False
        if self.closed or self._paused:
            return
        self._write()
        for stream_id, room in self._waiting_for_room.items():
            if not room.done() and self._queued(stream_id) <= _STREAM_QUEUE_BYTES:
                room.set_result(None)
        if self._to_reset:
            self._reset_ended()
        if not self._http2.want_read and not self._http2.want_write:
            self.closed = True
            self._transport.close()

    def _reset_ended(self) -> None:
        for stream_id in [each for each in self._to_reset if not self._queued(each)]:
            self._to_reset.discard(stream_id)
            self._try(partial(self._http2.reset_stream, stream_id, 0))
        self._write()

    def _write(self) -> None:
        if data := self._http2.data_to_send():
            self._transport.write(data)

    def _send(self, send: Callable[[], None]) -> None:
        self._try(send)
        self._liveness.answered()

    def _try(self, queue: Callable[[], None]) -> None:
        try:  # noqa: SIM105  (each message of each call comes here, and `suppress` costs a microsecond)
            queue()
        except _ENDED:
            pass
        self.flush_soon()

    def _queued(self, stream_id: int) -> int:
        try:
            return self._http2.queued_body_size(stream_id)
        except _ENDED:
            return 0
