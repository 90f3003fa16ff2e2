"""Carry a connection over TLS with asyncio's own protocol."""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from typing import Final

from redfence_server.http2.connection import Connection
from redfence_server.http2.places import Places

_UNLIMITED: Final = 2**40


class TlsConnection(sslproto.SSLProtocol):
    """Does the handshake of a connection, then encrypts what it sends.

    `loop.create_server(ssl=...)` would do so too. But it shows a connection only after the handshake, so a
    peer could open any number of silent ones. A failed handshake would also leave 100 KB in reference cycles,
    and the garbage collector runs rarely.

    Args:
        connection: gets the peer's bytes.
        places: the connection has one from the start of the handshake.
        handshake_s: how long the handshake may take.
        shutdown_s: how long the peer may take to answer the end of the connection.
    """

    # By default asyncio allocates 256 KiB for each connection. The longest TLS record has 16 KiB.
    max_size = 32 * 1024

    def __init__(
        self,
        connection: Connection,
        context: ssl.SSLContext,
        *,
        places: Places,
        handshake_s: float,
        shutdown_s: float,
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            connection,
            context,
            None,  # type: ignore[arg-type]  # typeshed wants one
            server_side=True,
            ssl_handshake_timeout=handshake_s,  # type: ignore[arg-type]  # typeshed wants an int
            ssl_shutdown_timeout=shutdown_s,
        )
        # By default asyncio reads 256 KiB ahead while the connection does not read.
        self._set_read_buffer_limits(high=self.max_size)  # type: ignore[attr-defined]  # not in typeshed
        # Only the socket pauses the connection.
        self._set_write_buffer_limits(high=_UNLIMITED)  # type: ignore[attr-defined]
        self._connection = connection
        self._places = places
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake, if the peer may have one more connection."""
        assert isinstance(transport, asyncio.Transport)
        self._connection.carrier = transport
        if self._places.take(self._connection, transport):
            super().connection_made(transport)

    def pause_writing(self) -> None:
        """Pause the connection, too; asyncio alone would let it encrypt 512 KiB more."""
        self._is_full = True
        super().pause_writing()
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Write what TLS has kept; let the connection go on unless that fills the socket again."""
        self._is_full = False
        super().resume_writing()
        if not self._is_full:
            self._connection.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the connection, and free everything."""
        super().connection_lost(exc)
        self._places.leave(self._connection)
        self._connection.carrier = None
        if exc is not None:
            # The frames of a failed handshake hold the error, which holds them.
            exc.__traceback__ = None
