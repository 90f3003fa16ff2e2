"""Probes a silent server at which acquires wait, and leaves it when it does not answer. No I/O.

gRPC's pings detect a server that is frozen or cut off. They do not detect a server that hangs while its
gRPC library still answers pings. They do not detect a proxy that keeps the stream open after the server
is gone. A client that only waits there would wait until the end of its wait.

So the client sends a probe to a silent server: a cancel that names itself. It finds nothing, changes
nothing and always gets an answer. Any message from the server counts as an answer, so a server that
sends messages gets no probe.
"""

from __future__ import annotations

import math

from redfence._config import Timeouts
from redfence._core.calls import ProbeCall
from redfence._core.link_state import LinkState
from redfence._core.outbox import Outbox

# How long a server may be silent before the client probes it. A lower value costs each server more per
# idle client. A higher value lets callers wait longer at a dead server. With the rpc timeout the client
# detects a hang after 20 s. gRPC's pings take 15 s for the failures that they can detect.
PROBE_AFTER_MS = 15_000
# A client that checks for the answer this late was itself suspended, and the answer may be received but
# not yet read.
LATE_MS_MAX = 1_000


class Probe:
    """Sends at most one probe at a time, and only while acquires wait at the server.

    Args:
        outbox: knows whether acquires wait at the server, and queues the probe.
        link: knows when the server last replied; the client leaves it if the probe gets no answer.
        timeouts: the rpc timeout is the time limit for the answer.
    """

    __slots__ = ("_call", "_closed", "_link", "_outbox", "_probed_at_ms", "_timeouts", "_timer_at_ms")

    def __init__(self, *, outbox: Outbox, link: LinkState, timeouts: Timeouts) -> None:
        self._outbox = outbox
        self._link = link
        self._timeouts = timeouts
        self._call: ProbeCall | None = None
        # When the last probe was sent; it is unanswered while the link has no later reply.
        self._probed_at_ms = -math.inf
        self._timer_at_ms = math.inf
        self._closed = False

    def waits_changed(self, now_ms: float) -> None:
        """Start or stop the probe timer, after acquires were sent or answered."""
        if self._closed or not self._outbox.has_waits_in_flight:
            self._timer_at_ms = math.inf
        elif self._timer_at_ms == math.inf:
            self._timer_at_ms = now_ms + PROBE_AFTER_MS

    def answered(self) -> None:
        """Record that the probe was answered."""
        self._call = None

    def end(self) -> None:
        """Send no more probes on this stream."""
        self._call = None
        self._timer_at_ms = math.inf

    def close(self) -> None:
        """Send no more probes on any stream."""
        self._closed = True
        self.end()

    def next_alarm_ms(self) -> float:
        """Return when to call `on_timer`; infinite if there is no alarm."""
        return self._timer_at_ms

    def on_timer(self, now_ms: float) -> None:
        """If the timer is due, send a probe, or leave a server that did not answer the last one."""
        late_ms = now_ms - self._timer_at_ms
        if late_ms < 0:
            return
        if self._link.no_reply_since(self._probed_at_ms):
            if late_ms <= LATE_MS_MAX:
                self._link.reconnect(now_ms)
            self._timer_at_ms = now_ms + self._timeouts.rpc_timeout_ms
        elif now_ms < self._link.last_reply_at_ms + PROBE_AFTER_MS:
            self._timer_at_ms = self._link.last_reply_at_ms + PROBE_AFTER_MS
        elif not self._outbox.has_room:
            # A probe that cannot be sent proves nothing. Releases and renewals have their own timeouts.
            self._timer_at_ms = now_ms + PROBE_AFTER_MS
        else:
            self._send(now_ms)

    def _send(self, now_ms: float) -> None:
        if self._call is None:
            self._call = ProbeCall()
            self._outbox.put_first(self._call)
        self._probed_at_ms = now_ms
        self._timer_at_ms = now_ms + self._timeouts.rpc_timeout_ms
