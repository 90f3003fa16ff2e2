"""Defines the options of a client, with the reason for each default."""

from __future__ import annotations

from dataclasses import dataclass, fields

from redfence._errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Sets the timeouts and pauses of a client. All values are positive integers, in milliseconds.

    Attributes:
        rpc_timeout_ms: how long a call may stay unanswered beyond its own wait, how long a call
            waits for a reachable server, and how long a silent server may take to answer a probe. A
            lower value raises short outages to the caller. A higher value delays the error when all
            servers are down.
        connect_timeout_ms: how long one address may take to accept a connection, before the client
            tries the next.
        reconnect_backoff_ms_min: the first pause after all addresses failed; it doubles with each failure.
        reconnect_backoff_ms_max: the longest such pause. Keep it well below the shortest ttl in
            use, because the client renews no lease during a pause.
        close_timeout_ms: how long closing the client may take to release its leases.
    """

    rpc_timeout_ms: int = 5_000
    connect_timeout_ms: int = 2_000
    reconnect_backoff_ms_min: int = 50
    reconnect_backoff_ms_max: int = 1_000
    close_timeout_ms: int = 5_000

    def __post_init__(self) -> None:
        """Raise InvalidArgumentError for an option that is not a positive integer, or for a bad range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value <= 0:
                raise InvalidArgumentError(f"{field.name} must be a positive integer, not {value!r}")
        if self.reconnect_backoff_ms_min > self.reconnect_backoff_ms_max:
            raise InvalidArgumentError(
                f"reconnect_backoff_ms_min is {self.reconnect_backoff_ms_min}; "
                f"it must not exceed reconnect_backoff_ms_max ({self.reconnect_backoff_ms_max})"
            )
