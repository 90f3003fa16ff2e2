"""Whether a server at which acquires wait, and which has nothing to say, is still there. No I/O.

A server that is frozen or cut off is noticed by gRPC's pings. One that hangs while its gRPC goes on answering them is not, nor
is a proxy that keeps a stream behind which nobody is: who only waits there would do so for as long as was asked for.

So a silent server is asked for a sign of life: a cancel that names itself. It finds nothing, changes nothing and is always
answered. Whatever is heard counts as that sign, so a server that answers anything else is asked nothing.
"""

from __future__ import annotations

import math

from redfence._config import ClientOptions
from redfence._core.calls import ProbeCall
from redfence._core.link_state import LinkState
from redfence._core.outbox import Outbox

# How long a server may be silent before it is asked. Lower: every idle client costs its server more. Higher: callers wait
# longer for nobody. With the rpc timeout a hang is noticed after 20 s; what pings can notice, they notice in 15 s.
PROBE_AFTER_MS = 15_000
# A client that comes this late to see about the answer was itself suspended: the answer may lie there, not yet read.
LATE_MS_MAX = 1_000


class Probe:
    """At most one question under way on a link, and none while nothing waits there.

    Args:
        outbox: what waits at the server, and where the question goes.
        link: when the server was heard; it is left if it does not answer.
        options: the rpc timeout is how long it has for that.
    """

    __slots__ = ("_call", "_closed", "_link", "_options", "_outbox", "_probed_at_ms", "_timer_at_ms")

    def __init__(self, *, outbox: Outbox, link: LinkState, options: ClientOptions) -> None:
        self._outbox = outbox
        self._link = link
        self._options = options
        self._call: ProbeCall | None = None
        # It counts until something is heard.
        self._probed_at_ms = -math.inf
        self._timer_at_ms = math.inf
        self._closed = False

    def waits_changed(self, now_ms: float) -> None:
        """See whether acquires wait at the server, after any may have been sent or answered."""
        if self._closed or not self._outbox.has_waits_in_flight:
            self._timer_at_ms = math.inf
        elif self._timer_at_ms == math.inf:
            self._timer_at_ms = now_ms + PROBE_AFTER_MS

    def answered(self) -> None:
        """Note that the question was answered."""
        self._call = None

    def end(self) -> None:
        """Ask nothing more on this stream."""
        self._call = None
        self._timer_at_ms = math.inf

    def close(self) -> None:
        """Ask nothing more on any stream."""
        self._closed = True
        self.end()

    def next_alarm_ms(self) -> float:
        """Return when `on_timer` has to be called; infinite if never."""
        return self._timer_at_ms

    def on_timer(self, now_ms: float) -> None:
        """Ask, or leave a server that was asked and said nothing, if it is time."""
        late_ms = now_ms - self._timer_at_ms
        if late_ms < 0:
            return
        if self._link.no_reply_since(self._probed_at_ms):
            if late_ms <= LATE_MS_MAX:
                self._link.reconnect(now_ms)
            self._timer_at_ms = now_ms + self._options.rpc_timeout_ms
        elif now_ms < self._link.last_reply_at_ms + PROBE_AFTER_MS:
            self._timer_at_ms = self._link.last_reply_at_ms + PROBE_AFTER_MS
        elif not self._outbox.has_room:
            # Unsent, it would prove nothing. What ends or saves a lease has a bound of its own.
            self._timer_at_ms = now_ms + PROBE_AFTER_MS
        else:
            self._ask(now_ms)

    def _ask(self, now_ms: float) -> None:
        if self._call is None:
            self._call = ProbeCall()
            self._outbox.put_first(self._call)
        self._probed_at_ms = now_ms
        self._timer_at_ms = now_ms + self._options.rpc_timeout_ms
