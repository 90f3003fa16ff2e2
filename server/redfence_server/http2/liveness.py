"""Decide when to ping a connection, when to close it, and how many pings to accept. Pure: (event, now)."""

from __future__ import annotations

from enum import Enum, auto

from redfence_server.http2.settings import LivenessSettings


class Action(Enum):
    """Tells the connection its next step."""

    WAIT = auto()
    PING = auto()
    CLOSE = auto()
    DROP = auto()


class Liveness:
    """Judges one connection. Every instant is in seconds on one monotonic clock."""

    __slots__ = (
        "_early_pings",
        "_greeted",
        "_heard_at",
        "_idle_since",
        "_peer_pinged_at",
        "_pinged_at",
        "_settings",
        "_started_at",
    )

    def __init__(self, settings: LivenessSettings, now: float) -> None:
        self._settings = settings
        self._started_at = self._heard_at = now
        self._idle_since: float | None = now
        self._greeted = False
        self._pinged_at: float | None = None
        self._peer_pinged_at: float | None = None
        self._early_pings = 0

    def greeted(self) -> None:
        """Note that the peer speaks HTTP/2."""
        self._greeted = True

    def heard(self, now: float) -> None:
        """Note that bytes came from the peer."""
        self._heard_at = now
        self._pinged_at = None

    def busy(self) -> None:
        """Note that the connection has a call."""
        self._idle_since = None

    def idle(self, now: float) -> None:
        """Note that its last call ended."""
        self._idle_since = now

    def answered(self) -> None:
        """Note that the server sent headers, a message or trailers: the peer may ping again at once."""
        self._early_pings = 0
        self._peer_pinged_at = None

    def allows_ping(self, now: float) -> bool:
        """Note a ping of the peer; return whether the connection may stay."""
        last, self._peer_pinged_at = self._peer_pinged_at, now
        if last is not None and now - last < self._settings.peer_ping_interval_s:
            self._early_pings += 1
        return self._early_pings <= self._settings.early_pings_max

    def check(self, now: float) -> tuple[Action, float]:
        """Return what to do now, and when to check again."""
        settings = self._settings
        if not self._greeted:
            handshake_ends_at = self._started_at + settings.handshake_s
            return (Action.DROP if now >= handshake_ends_at else Action.WAIT), handshake_ends_at
        if self._idle_since is not None and now >= self._idle_since + settings.idle_s:
            return Action.CLOSE, now
        if self._pinged_at is not None:
            deadline = self._pinged_at + settings.ping_timeout_s
            return (Action.DROP if now >= deadline else Action.WAIT), deadline
        ping_at = self._heard_at + settings.ping_after_s
        if now >= ping_at:
            self._pinged_at = now
            return Action.PING, now + settings.ping_timeout_s
        if self._idle_since is not None:
            return Action.WAIT, min(ping_at, self._idle_since + settings.idle_s)
        return Action.WAIT, ping_at
