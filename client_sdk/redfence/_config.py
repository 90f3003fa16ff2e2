"""What can be tuned in a client; every default has its reason beside it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from redfence._errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client behaves towards its servers. All values are positive integers.

    Attributes:
        rpc_timeout_ms: how long a call may stay unanswered beyond its own wait, and how long a call waits for any
            server to be reachable; also how long a silent server has to show that it is there. Lower: a short outage is
            raised to the caller. Higher: it takes longer to learn that nobody is there.
        connect_timeout_ms: how long one address may take to accept a connection before the next one is tried.
        reconnect_backoff_ms_min: the first pause after all addresses failed; it doubles with each failure.
        reconnect_backoff_ms_max: the longest such pause. It should be well below the shortest ttl in use, for no
            lease is renewed meanwhile.
        close_timeout_ms: how long closing the client may take to release what it still holds.
    """

    rpc_timeout_ms: int = 5_000
    connect_timeout_ms: int = 2_000
    reconnect_backoff_ms_min: int = 50
    reconnect_backoff_ms_max: int = 1_000
    close_timeout_ms: int = 5_000

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value <= 0:
                raise InvalidArgumentError(f"{field.name} must be a positive integer, not {value!r}")
        if self.reconnect_backoff_ms_min > self.reconnect_backoff_ms_max:
            raise InvalidArgumentError("reconnect_backoff_ms_min must not exceed reconnect_backoff_ms_max")
