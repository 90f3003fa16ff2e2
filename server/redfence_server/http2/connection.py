"""Turn the bytes of a connection into calls; each call runs as a task of its own."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Final, Protocol

import grpc
import ngh2
import structlog

from redfence_server.http2 import wire
from redfence_server.http2.buffered import BufferedBytes
from redfence_server.http2.call import Call
from redfence_server.http2.context import NO_ROOM, Method
from redfence_server.http2.liveness import Action, Liveness
from redfence_server.http2.output import Output
from redfence_server.http2.peer import Peer
from redfence_server.http2.places import Places
from redfence_server.http2.settings import ConnectionSettings
from redfence_server.http2.unread import Unread
from redfence_server.sharing.budget import Budget
from redfence_server.sharing.peer import peer_of

# A peer may send so much before methods have read it. A stream has HTTP/2's 64 KiB, so 63 streams whose
# methods do not read leave room for the others.
_WINDOW_BYTES: Final = 4 * 1024 * 1024
# How many at once, and then how many a second. A cancelled call is normal: a caller's deadline cancels it.
# The library's own limits, (1000, 33) for resets and (10000, 330) for glitches, would end such a connection.
# A call that is reset costs no more than one that is answered.
_RESETS: Final = (100_000, 20_000)
# What Python and the library keep for a call, and for each of its headers, besides the bytes of the headers.
_CALL_BYTES: Final = 2_500
_HEADER_BYTES: Final = 100
# 16 KiB have about 100 calls. Higher: a flood of calls delays other connections.
_BUFFER: Final = memoryview(bytearray(16 * 1024))
# A connection whose last read reset so many calls gets a buffer of about 15 calls, so that a flood delays
# others less.
_RESETS_OF_A_FLOOD: Final = 8
_BUFFER_IN_A_FLOOD: Final = _BUFFER[: 2 * 1024]


def http2_settings(settings: ConnectionSettings) -> ngh2.Configuration:
    """Return what the library needs of the settings."""
    return ngh2.Configuration(
        auto_window_update=False,
        # Larger headers end the connection; up to here the call ends with a status. Headers that never end
        # keep up to 80 KB for each connection, and no budget counts them.
        max_inbound_header_list_size=4 * settings.metadata_bytes_max,
        max_inbound_header_count=128,
        stream_reset_rate_limit=_RESETS,
        glitch_rate_limit=_RESETS,
    )


class Owner(Protocol):
    """Gives a connection the limits and the methods of its server."""

    settings: ConnectionSettings
    http2_settings: ngh2.Configuration
    places: Places
    buffered_bytes: Budget

    def method(self, path: str) -> Method | None:
        """Return the method with this path, or None."""

    def opened(self, connection: Connection) -> None:
        """Note that calls may come."""

    def closed(self, connection: Connection) -> None:
        """Forget the connection."""


class Connection(asyncio.BufferedProtocol):
    """Serves the calls of one connection.

    It reads a bounded part in each turn of the event loop, so that a flood delays other connections little.

    Attributes:
        out: sends; it is there once the connection is.
        carrier: the transport below TLS, if there is TLS.
    """

    out: Output
    carrier: asyncio.Transport | None = None

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._http2 = ngh2.Connection(ngh2.Role.SERVER, owner.http2_settings)
        self._liveness = Liveness(owner.settings.liveness, self._loop.time())
        self._calls: dict[int, Call] = {}
        # The calls that the peer reset in the last read.
        self._resets = 0
        self._transport: asyncio.Transport | None = None
        self._alarm: asyncio.TimerHandle | None = None

    # --- the server's side

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of the methods that still run."""
        return [call.task for call in self._calls.values() if call.task is not None]

    def end_calls(self, code: grpc.StatusCode, details: str) -> None:
        """End every call with this status."""
        for call in list(self._calls.values()):
            call.end(code, details)

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the peer."""
        if not self._owner.places.take(self, transport):
            return
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        carrier = self.carrier or transport
        peer = Peer.of(transport)
        buffered = BufferedBytes(self._owner.buffered_bytes, peer_of(peer.address))
        self.out = Output(
            self._http2,
            transport,
            unread=Unread(self._http2, {transport, carrier}, buffered),
            peer=peer,
            buffered=buffered,
            liveness=self._liveness,
            on_reset=self._lose,
            loop=self._loop,
        )
        # `pause_writing` comes whenever the socket is full, so a connection keeps no more than one write.
        carrier.set_write_buffer_limits(high=0)
        self._owner.opened(self)
        # asyncio sets it only for some sockets; without it an answer can wait 40 ms for the peer's ACK.
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            # gRPC's servers end such a connection as well: the client may mean another protocol.
            self.out.abort()
            return
        settings = self._owner.settings
        self._http2.initiate_connection(
            {
                ngh2.Setting.MAX_CONCURRENT_STREAMS: settings.streams_max,
                ngh2.Setting.MAX_HEADER_LIST_SIZE: settings.metadata_bytes_max,
            }
        )
        self._http2.set_local_window_size(_WINDOW_BYTES)
        self.out.flush()
        self._check_liveness()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  (asyncio's)
        """Return the buffer for the next bytes; all connections share it, because each read ends at once."""
        return _BUFFER if self._resets < _RESETS_OF_A_FLOOD else _BUFFER_IN_A_FLOOD

    def buffer_updated(self, nbytes: int) -> None:
        """Carry out what the peer sent."""
        if self.out.closed:
            return
        self._liveness.heard(self._loop.time())
        self._resets = 0
        try:
            self._http2.receive_data(_BUFFER[:nbytes])
        except ngh2.NGH2Error:
            # The library can say no more to this peer.
            self.out.abort()
            return
        try:
            for event in self._http2.events():
                handle = self._HANDLERS.get(type(event))
                if handle is not None:
                    handle(self, event)
        except Exception as defect:
            structlog.get_logger().error("internal_error", where="http2", exc_info=defect)
            self.out.abort()
            return
        self.out.flush_soon()

    def pause_writing(self) -> None:
        """Stop both ways: a peer that does not read its answers gets no more work done."""
        if self._transport is None:  # within the handshake of TLS
            return
        self.out.paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on. The peer has read some, so it lives, although the server has read nothing from it."""
        if self._transport is None:
            return
        self._liveness.heard(self._loop.time())
        self._transport.resume_reading()
        self.out.paused = False
        self.out.flush_soon()

    def connection_lost(self, _: Exception | None) -> None:
        """Cancel every call."""
        if self._transport is None:
            return
        # With TLS both transports refer to this connection: a cycle.
        self._transport = None
        self.out.end()
        if self._alarm is not None:
            self._alarm.cancel()
        for stream_id in list(self._calls):
            self._lose(stream_id)
        self.out.buffered.close()
        self._owner.closed(self)
        self._owner.places.leave(self)

    # --- events of the peer

    def _on_request(self, event: ngh2.RequestReceived) -> None:
        stream_id, headers = event.stream_id, dict(event.headers)
        if headers.get(b":method") != b"POST":
            self._refuse(event, ((b":status", b"405"),))
            return
        if not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            self._refuse(event, ((b":status", b"415"),))
            return
        settings = self._owner.settings
        try:
            timeout_s, encoding, size = wire.check_request(
                event.headers, bytes_max=settings.metadata_bytes_max
            )
        except wire.CallError as error:
            self._refuse(event, wire.status_only(error.code, error.details, error.metadata))
            return
        path = headers[b":path"].decode("latin-1")
        method = self._owner.method(path)
        if method is None:
            details = f"{path} is no method of this server"
            self._refuse(event, wire.status_only(grpc.StatusCode.UNIMPLEMENTED, details))
            return
        size += _CALL_BYTES + _HEADER_BYTES * len(event.headers)
        if not self.out.buffered.add(size):
            self._refuse(event, wire.status_only(*NO_ROOM))
            return
        if not self._calls:
            self._liveness.busy()
        self._calls[stream_id] = call = Call(
            self.out,
            stream_id,
            method,
            loop=self._loop,
            timeout_s=timeout_s,
            reader=wire.MessageReader(bytes_max=settings.message_bytes_max, encoding=encoding),
            headers=event.headers,
            own_bytes=size,
        )
        self._follow(stream_id, call.start_stream())
        if event.end_stream:
            self._on_request_end(event)

    def _on_data(self, event: ngh2.DataReceived) -> None:
        call = self._calls.get(event.stream_id)
        if call is None:
            # The rest of a request that has its answer.
            self.out.taken(event.stream_id, len(event.data))
            return
        if event.data:
            call.feed(event.data)
        if event.end_stream:
            self._on_request_end(event)

    def _on_request_end(
        self, event: ngh2.RequestReceived | ngh2.DataReceived | ngh2.TrailersReceived
    ) -> None:
        call = self._calls.get(event.stream_id)
        if call is not None:
            self._follow(event.stream_id, call.feed_end())

    def _on_stream_end(self, event: ngh2.StreamReset | ngh2.StreamClosed) -> None:
        self._resets += type(event) is ngh2.StreamReset
        self.out.forget(event.stream_id)
        self._lose(event.stream_id)

    def _on_ping(self, _: ngh2.PingReceived) -> None:
        if not self.out.closed and not self._liveness.allows_ping(self._loop.time()):
            self.out.goaway(ngh2.ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")
            self.out.close()

    def _on_settings(self, _: ngh2.SettingsReceived) -> None:
        self._liveness.greeted()
        self._check_liveness()

    _HANDLERS: ClassVar[Mapping[type[ngh2.Event], Callable[[Connection, Any], None]]] = {
        ngh2.RequestReceived: _on_request,
        ngh2.DataReceived: _on_data,
        ngh2.TrailersReceived: _on_request_end,
        ngh2.StreamReset: _on_stream_end,
        ngh2.StreamClosed: _on_stream_end,
        ngh2.SettingsReceived: _on_settings,
        ngh2.PingReceived: _on_ping,
    }

    def _refuse(self, event: ngh2.RequestReceived, headers: tuple[wire.Header, ...]) -> None:
        self.out.send_headers(event.stream_id, headers, end=True)
        if not event.end_stream:
            self.out.stop_request(event.stream_id)

    # --- calls

    def _follow(self, stream_id: int, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.add_done_callback(partial(self._forget, stream_id))

    def _lose(self, stream_id: int) -> None:
        call = self._calls.get(stream_id)
        if call is not None:
            call.lose()
            if call.task is None:
                self._forget(stream_id, None)

    def _forget(self, stream_id: int, _: asyncio.Task[None] | None) -> None:
        call = self._calls.pop(stream_id)
        call.close()
        self.out.buffered.remove(call.own_bytes)
        if not self._calls:
            self._liveness.idle(self._loop.time())

    # --- time

    def _check_liveness(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        action, again_at = self._liveness.check(self._loop.time())
        match action:
            case Action.DROP:
                self.out.abort()
                return
            case Action.CLOSE:
                self.out.goaway()
                self.out.close()
                # Unless the peer reads the last bytes.
                timeout_s = self._owner.settings.liveness.ping_timeout_s
                self._alarm = self._loop.call_later(timeout_s, self.out.abort)
                return
            case Action.PING:
                self.out.ping()
        self._alarm = self._loop.call_at(again_at, self._check_liveness)
