"""What a client knows of its link: whether there is one, when its server was last heard, and when to leave it. Pure."""

from __future__ import annotations

import math

from redfence._errors import OutcomeUnknownError, RedfenceError, UnavailableError

# A draining server answers what is under way; it gets no longer than this, for no lease is renewed meanwhile.
DRAIN_MS_MAX = 1000
# A server that seems cut off is left for another one no more often than this, or all of them would be tried in a circle.
LEAVE_INTERVAL_MS = 1000


class LinkState:
    """The present link, or the lack of one.

    Attributes:
        up: whether a stream to a server is open.
        address_count: how many servers there are to choose from.
        last_reply_at_ms: when the server last said something; opening the stream counts.
        last_error: why there was no link, or why the last one ended.
    """

    __slots__ = (
        "_leave_at_ms",
        "_leave_reported",
        "_left_at_ms",
        "address_count",
        "last_error",
        "last_reply_at_ms",
        "up",
    )

    def __init__(self, *, address_count: int) -> None:
        self.up = False
        self.address_count = address_count
        self.last_reply_at_ms = -math.inf
        self.last_error: RedfenceError | None = None
        self._leave_at_ms = math.inf
        self._leave_reported = False
        self._left_at_ms = -math.inf

    def opened(self, now_ms: float) -> None:
        """Note that a stream is open."""
        self.up = True
        self.last_reply_at_ms = now_ms

    def closed(self) -> None:
        """Note that it is gone."""
        self.up = False
        self._leave_at_ms = math.inf
        self._leave_reported = False

    def observe_reply(self, now_ms: float) -> None:
        """Note that the server said something."""
        self.last_reply_at_ms = now_ms

    def no_reply_since(self, at_ms: float) -> bool:
        """Tell whether not a word has come since that instant."""
        return at_ms > self.last_reply_at_ms

    @property
    def takes_commands(self) -> bool:
        """Whether anything may be sent."""
        return self.up and not self.leaving

    @property
    def leaving(self) -> bool:
        """Whether this link takes no more commands."""
        return self._leave_at_ms < math.inf

    def must_leave(self, now_ms: float) -> bool:
        """Tell whether the time for answers is over."""
        return now_ms >= self._leave_at_ms

    def next_alarm_ms(self) -> float:
        """Return when `on_timer` has to be called; infinite if never."""
        # The departure rings once. Ringing until the driver has left would keep a driver with threads from leaving:
        # its timer would never let go of the lock (test_the_instant_to_leave_rings_once).
        return math.inf if self._leave_reported else self._leave_at_ms

    def on_timer(self, now_ms: float) -> None:
        """Note that the driver was told, if it is time to leave."""
        self._leave_reported = now_ms >= self._leave_at_ms

    def leave_after_answers(self, now_ms: float, *, grace_ms: float = DRAIN_MS_MAX) -> None:
        """Leave as soon as nothing is unanswered, after the grace at the latest: the server is ending this link."""
        self._leave_by(now_ms + min(grace_ms, DRAIN_MS_MAX))

    def switch_server(self, now_ms: float) -> None:
        """Go to another server, if there is one and we did not just come from there."""
        if self.address_count > 1:
            self.reconnect(now_ms)

    def reconnect(self, now_ms: float) -> None:
        """Make a new link, elsewhere if possible: this one carries no answers."""
        if self.up and now_ms - self._left_at_ms >= LEAVE_INTERVAL_MS:
            self._left_at_ms = now_ms
            self._leave_by(now_ms)

    def _leave_by(self, at_ms: float) -> None:
        self._leave_at_ms = min(self._leave_at_ms, at_ms)

    def no_answer(self, what: str, *, sent: bool) -> RedfenceError:
        """Return the error of a call that was not answered in time, with the reason if one is known."""
        because = f": {self.last_error}" if self.last_error else ""
        error: RedfenceError
        if sent:
            error = OutcomeUnknownError(f"no answer in time to {what}; it may have taken effect{because}")
        else:
            error = UnavailableError(f"no server could be reached in time for {what}{because}")
        error.__cause__ = self.last_error
        return error
