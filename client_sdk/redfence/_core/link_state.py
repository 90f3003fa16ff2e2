"""Tracks the link: whether it is open, when the server last replied, and when to leave it. Pure."""

from __future__ import annotations

import math

from redfence._errors import OutcomeUnknownError, RedfenceError, UnavailableError, WrongServiceError

# How long a draining server may take to answer pending commands. The client renews no lease meanwhile.
DRAIN_MS_MAX = 1000
# The shortest time between two switches, so that a client does not rotate through all servers without end.
LEAVE_INTERVAL_MS = 1000
# A stream that is open for so long leads to a lock server, which need not have anything to say.
PROVEN_AFTER_MS = 1000


class LinkState:
    """Tracks the present link and decides when the client leaves it.

    Attributes:
        up: whether a stream to a server is open.
        address_count: how many servers the client can choose from.
        last_reply_at_ms: when the server last sent a message, or when the stream was opened.
        last_error: why the last connection failed or ended.
        lost_at_ms: when the last link to a server ended: one that sent a message or stayed for a while.
    """

    __slots__ = (
        "_leave_at_ms",
        "_leave_reported",
        "_left_at_ms",
        "_replied",
        "address_count",
        "last_error",
        "last_reply_at_ms",
        "lost_at_ms",
        "up",
    )

    def __init__(self, *, address_count: int) -> None:
        self.up = False
        self.address_count = address_count
        self.last_reply_at_ms = -math.inf
        self.last_error: RedfenceError | None = None
        self.lost_at_ms = -math.inf
        self._replied = False
        self._leave_at_ms = math.inf
        self._leave_reported = False
        self._left_at_ms = -math.inf

    def opened(self, now_ms: float) -> None:
        """Record that a stream was opened."""
        self.up = True
        self.last_reply_at_ms = now_ms
        self._replied = False

    def closed(self, now_ms: float) -> None:
        """Record that the stream has ended."""
        self.up = False
        # A proxy, or another service, opens streams too, and ends them at once.
        if self._replied or now_ms - self.last_reply_at_ms >= PROVEN_AFTER_MS:
            self.lost_at_ms = now_ms
        self._leave_at_ms = math.inf
        self._leave_reported = False

    @property
    def replied(self) -> bool:
        """Whether the server has sent a message on this link."""
        return self._replied

    def observe_reply(self, now_ms: float) -> None:
        """Record that the server sent a message."""
        self.last_reply_at_ms = now_ms
        self._replied = True

    def no_reply_since(self, at_ms: float) -> bool:
        """Return whether the server has sent nothing since that instant."""
        return at_ms > self.last_reply_at_ms

    @property
    def takes_commands(self) -> bool:
        """Whether the client may send commands on this link."""
        return self.up and not self.leaving

    @property
    def leaving(self) -> bool:
        """Whether the client is leaving this link, so that it takes no more commands."""
        return self._leave_at_ms < math.inf

    def must_leave(self, now_ms: float) -> bool:
        """Return whether the client leaves now, even if answers are missing."""
        return now_ms >= self._leave_at_ms

    def next_alarm_ms(self) -> float:
        """Return when to call `on_timer`; infinite if there is no alarm."""
        # The alarm to leave is due only once. If it stayed due, the timer thread would never release
        # the lock, and the driver could not leave (test_the_instant_to_leave_rings_once).
        return math.inf if self._leave_reported else self._leave_at_ms

    def on_timer(self, now_ms: float) -> None:
        """Record that the alarm to leave was delivered, if it is due."""
        self._leave_reported = now_ms >= self._leave_at_ms

    def leave_after_answers(self, now_ms: float, *, grace_ms: float = DRAIN_MS_MAX) -> None:
        """Leave a link that the server is ending: once all commands are answered, or when the grace ends."""
        self._leave_by(now_ms + min(grace_ms, DRAIN_MS_MAX))

    def switch_server(self, now_ms: float) -> None:
        """Leave for another server now, if there is one and the last switch is long enough ago."""
        if self.address_count > 1:
            self.reconnect(now_ms)

    def reconnect(self, now_ms: float) -> None:
        """Leave a link without answers now, and open a new one, at another server if possible."""
        if self.up and now_ms - self._left_at_ms >= LEAVE_INTERVAL_MS:
            self._left_at_ms = now_ms
            self._leave_by(now_ms)

    def _leave_by(self, at_ms: float) -> None:
        self._leave_at_ms = min(self._leave_at_ms, at_ms)

    def unusable(self) -> RedfenceError:
        """Return the error for a unary call whose links all broke before it had an answer."""
        cause = self.last_error
        return cause if isinstance(cause, WrongServiceError) else self.no_answer("the call", sent=False)

    def no_answer(self, what: str, *, sent: bool) -> RedfenceError:
        """Return the error for a call that got no answer in time, with the link's last error as its cause."""
        because = f": {self.last_error}" if self.last_error else ""
        error: RedfenceError
        if sent:
            error = OutcomeUnknownError(f"no answer in time to {what}; it may have taken effect{because}")
        else:
            error = UnavailableError(f"no server could be reached in time for {what}{because}")
        error.__cause__ = self.last_error
        return error
