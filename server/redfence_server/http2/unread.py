"""Count what the peer of a connection has not read yet."""

from __future__ import annotations

import asyncio
from typing import Final

import ngh2

from redfence_server.http2.buffered import BufferedBytes

# The library keeps about so many bytes for an ended call, besides its answer.
_ENDED_BYTES: Final = 1_200

ENDED: Final = (ngh2.StreamUnavailableError, ngh2.ConnectionStateError, ngh2.ConnectionClosingError)
"""A stream or the connection may have ended before the event that tells it has come here."""


class Unread:
    """Counts what the library has queued and what the socket has not taken.

    Args:
        transports: that of the connection and, with TLS, that of the socket.
        buffered: counts it.
    """

    __slots__ = ("_buffered", "_count", "_http2", "_transports")

    def __init__(
        self, http2: ngh2.Connection, transports: set[asyncio.Transport], buffered: BufferedBytes
    ) -> None:
        self._http2 = http2
        self._transports = transports
        self._buffered = buffered
        self._count = 0

    def queued(self, stream_id: int) -> int:
        """Return how many bytes of a call are queued."""
        try:
            return self._http2.queued_body_size(stream_id)
        except ENDED:
            return 0

    def count(self, ended: int) -> bool:
        """Count anew, with `ended` calls whose whole answer has not left.

        Return False, and change nothing, if the peer may not have so much.
        """
        kept = self._http2.queued_body_size() + ended * _ENDED_BYTES
        for transport in self._transports:
            kept += transport.get_write_buffer_size()
        more = kept - self._count
        if more > 0:
            if not self._buffered.add(more):
                return False
        elif more < 0:
            self._buffered.remove(-more)
        self._count = kept
        return True
