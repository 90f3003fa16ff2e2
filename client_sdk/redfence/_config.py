"""Defines the options of a client, with the reason for each default."""

from __future__ import annotations

from dataclasses import dataclass

from redfence._errors import InvalidArgumentError
from redfence._seconds import Seconds, milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Sets the timeouts and pauses of a client, each in seconds or as a timedelta.

    Attributes:
        rpc_timeout: how long a call may stay unanswered beyond its own wait, how long a call
            waits for a reachable server, and how long a silent server may take to answer a probe. A
            lower value raises short outages to the caller. A higher value delays the error when all
            servers are down.
        connect_timeout: how long one address may take to accept a connection, before the client
            tries the next.
        reconnect_backoff_min: the first pause after all addresses failed; it doubles with each failure.
        reconnect_backoff_max: the longest such pause. Keep it well below the shortest ttl in
            use, because the client renews no lease during a pause.
        close_timeout: how long closing the client may take to release its leases.

    Raises:
        InvalidArgumentError: a value is not a length of time or rounds to 0 ms, or
            `reconnect_backoff_min` exceeds `reconnect_backoff_max`.
    """

    rpc_timeout: Seconds = 5.0
    connect_timeout: Seconds = 2.0
    reconnect_backoff_min: Seconds = 0.05
    reconnect_backoff_max: Seconds = 1.0
    close_timeout: Seconds = 5.0

    def __post_init__(self) -> None:
        """Check every option, so that the error comes where the program made it."""
        in_milliseconds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The options as the client computes with them: in whole milliseconds, and checked."""

    rpc_timeout_ms: int
    connect_timeout_ms: int
    reconnect_backoff_ms_min: int
    reconnect_backoff_ms_max: int
    close_timeout_ms: int


def in_milliseconds(options: ClientOptions) -> Timeouts:
    """Return the options in milliseconds.

    Raises:
        InvalidArgumentError: as `ClientOptions`.
    """
    timeouts = Timeouts(
        rpc_timeout_ms=_positive("rpc_timeout", options.rpc_timeout),
        connect_timeout_ms=_positive("connect_timeout", options.connect_timeout),
        reconnect_backoff_ms_min=_positive("reconnect_backoff_min", options.reconnect_backoff_min),
        reconnect_backoff_ms_max=_positive("reconnect_backoff_max", options.reconnect_backoff_max),
        close_timeout_ms=_positive("close_timeout", options.close_timeout),
    )
    if timeouts.reconnect_backoff_ms_min > timeouts.reconnect_backoff_ms_max:
        raise InvalidArgumentError(
            f"reconnect_backoff_min is {options.reconnect_backoff_min}; "
            f"it must not exceed reconnect_backoff_max ({options.reconnect_backoff_max})",
            metadata={"field": "reconnect_backoff_min"},
        )
    return timeouts


def _positive(name: str, length: Seconds) -> int:
    length_ms = milliseconds(name, length)
    if length_ms == 0:
        raise InvalidArgumentError(
            f"{name} must be at least 0.001 seconds, not {length!r}", metadata={"field": name}
        )
    return length_ms
