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
from redfence_server.http2.unread import ENDED, Unread

# A method that writes a stream waits while more of its bytes than this are queued.
_STREAM_QUEUE_BYTES: Final = 64 * 1024
# The output writes and counts queued messages after so many bytes, even within one turn.
_FRESH_BYTES: Final = 64 * 1024
# The most bytes of one write, so a full socket leaves no more with the transport.
_WRITE_BYTES: Final = 64 * 1024


class Output:
    """Queues the answers of a connection's calls. After the connection's end, every method does nothing.

    If a peer leaves more unread than its part of the memory, the calls that wrote last are reset. A client
    of gRPC shows that as RESOURCE_EXHAUSTED. The connection ends if that frees too little.

    Args:
        transport: takes the bytes.
        unread: what the peer has not read of it.
        on_reset: gets the stream of each call that the output resets.

    Attributes:
        peer: the other end of the connection.
        buffered: what the connection makes the server keep.
        closed: the connection has ended, or ends once its last bytes have left.
        paused: the socket is full, so what is queued stays.
    """

    def __init__(
        self,
        http2: ngh2.Connection,
        transport: asyncio.Transport,
        *,
        unread: Unread,
        peer: Peer,
        buffered: BufferedBytes,
        liveness: Liveness,
        on_reset: Callable[[int], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.peer = peer
        self.buffered = buffered
        self.closed = False
        self.paused = False
        self._http2 = http2
        # `end` clears these, because they refer back to this output: a cycle.
        self._transport: Any = transport
        self._unread: Any = unread
        self._on_reset: Any = on_reset
        self._liveness = liveness
        self._loop = loop
        self._flushes = False
        # The calls that have queued a message since the last flush, and the bytes of these messages.
        self._wrote: set[int] = set()
        self._fresh = 0
        # Calls whose answer is complete, but has not left.
        self._ended: set[int] = set()
        # Ended calls whose request has not ended: the peer is told to stop, once it has the answer.
        self._to_reset: set[int] = set()
        self._waiting_for_room: dict[int, asyncio.Future[None]] = {}

    # --- calls

    def send_headers(self, stream_id: int, headers: tuple[wire.Header, ...], *, end: bool = False) -> None:
        """Begin the answer of a call; `end` also ends it."""
        if end:
            self._ended.add(stream_id)
        self._send(partial(self._http2.send_response, stream_id, headers, end_stream=end))

    def send_message(self, stream_id: int, frame: bytes) -> None:
        """Queue one message of a call."""
        if self.closed:
            return
        self._wrote.add(stream_id)
        self._send(partial(self._http2.send_data, stream_id, frame))
        self._fresh += len(frame)
        if self._fresh > _FRESH_BYTES:
            self.flush()

    def send_trailers(self, stream_id: int, trailers: tuple[wire.Header, ...]) -> None:
        """End the answer of a call."""
        self._ended.add(stream_id)
        self._send(partial(self._http2.send_trailers, stream_id, trailers))

    def stop_request(self, stream_id: int) -> None:
        """Tell the peer to send no more of the request, once it has the answer."""
        self._to_reset.add(stream_id)

    def forget(self, stream_id: int) -> None:
        """Note that the stream is closed both ways."""
        self._to_reset.discard(stream_id)

    async def room(self, stream_id: int) -> None:
        """Return once at most 64 KiB of the call are queued; after the end, wait to be cancelled."""
        if not self.closed and self._unread.queued(stream_id) <= _STREAM_QUEUE_BYTES:
            return
        self._waiting_for_room[stream_id] = room = self._loop.create_future()
        try:
            await room
        finally:
            del self._waiting_for_room[stream_id]

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

    def close(self) -> None:
        """Write what is queued, also to a full socket, then close it.

        The kernel drops the bytes that have not left if the peer has sent more than the server has read.
        """
        if not self.closed:
            while data := self._http2.data_to_send(_WRITE_BYTES):
                self._transport.write(data)
            self.closed = True
            self._transport.close()

    def abort(self) -> None:
        """Close the socket at once."""
        transport = self._transport
        self.end()
        if transport is not None:
            transport.abort()

    def end(self) -> None:
        """Note that the socket is closed."""
        self.closed = True
        self._transport = self._unread = self._on_reset = None

    def flush_soon(self) -> None:
        """Write at the end of this turn of the loop."""
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what is queued now, as far as the peer's windows and the socket allow."""
        self._flushes = False
        if self.closed:
            return
        self._write()
        if not self.paused:
            queued = self._unread.queued
            for stream_id, room in self._waiting_for_room.items():
                if not room.done() and queued(stream_id) <= _STREAM_QUEUE_BYTES:
                    room.set_result(None)
            self._ended = {each for each in self._ended if queued(each)}
            if self._to_reset:
                for stream_id in self._to_reset - self._ended:
                    self._to_reset.discard(stream_id)
                    self._try(partial(self._http2.reset_stream, stream_id, 0))
                self._write()
            if not self._http2.want_read and not self._http2.want_write:
                self.closed = True
                self._transport.close()
                return
        self._count_unread()

    def _write(self) -> None:
        while not self.paused and (data := self._http2.data_to_send(_WRITE_BYTES)):
            self._transport.write(data)

    def _count_unread(self) -> None:
        # Without a message it grows little, and by calls that have counted until now.
        if not self._unread.count(len(self._ended)) and self._wrote:
            unread = [stream_id for stream_id in self._wrote if self._unread.queued(stream_id)]
            for stream_id in unread:
                self._try(partial(self._http2.reset_stream, stream_id, ngh2.ErrorCode.ENHANCE_YOUR_CALM))
                self._on_reset(stream_id)
            # The library drops an answer once its reset has left, so also a full socket gets one part.
            self._transport.write(self._http2.data_to_send(_WRITE_BYTES))
            if not self._unread.count(len(self._ended)) and not unread:
                self.abort()
        self._wrote.clear()
        self._fresh = 0

    def _send(self, send: Callable[[], None]) -> None:
        self._try(send)
        self._liveness.answered()

    def _try(self, queue: Callable[[], None]) -> None:
        if self.closed:
            return
        try:  # noqa: SIM105  (each message of each call comes here, and `suppress` costs a microsecond)
            queue()
        except ENDED:
            pass
        self.flush_soon()
