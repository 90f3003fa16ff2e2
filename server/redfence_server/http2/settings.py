"""Define the choice of the transport and the limits of a connection; import no package of either choice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Transport(StrEnum):
    """Names the code that serves HTTP/2: the library grpcio, or a faster server on the event loop."""

    GRPCIO = "grpcio"
    FAST = "fast"


@dataclass(frozen=True, slots=True)
class LivenessSettings:
    """Times in seconds.

    Attributes:
        handshake_s: how long a new connection may take to speak HTTP/2.
        ping_after_s: how long the peer may be silent before the server pings it.
        ping_timeout_s: how long the peer may stay silent after that ping.
        idle_s: how long a connection may have no call.
        peer_ping_interval_s: a ping of the peer is early within this time after its last one.
        early_pings_max: the most early pings between two answers of the server.
    """

    handshake_s: float
    ping_after_s: float
    ping_timeout_s: float
    idle_s: float
    peer_ping_interval_s: float
    early_pings_max: int


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """The limits of each connection.

    Attributes:
        message_bytes_max: the longest request message.
        metadata_bytes_max: the largest headers of a request, as HTTP/2 counts them.
        streams_max: the most calls at the same time.
        liveness: pings and idle time.
    """

    message_bytes_max: int
    metadata_bytes_max: int
    streams_max: int
    liveness: LivenessSettings
