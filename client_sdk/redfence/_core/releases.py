"""Sends the releases of a client, and reports when all that must end before closing has ended. No I/O.

When a stream breaks, the client sends the release again, because repeating it is harmless. The rpc
timeout bounds each release, also one that no caller waits for.
"""

from __future__ import annotations

import logging

from redfence._config import Timeouts
from redfence._core.alarms import Alarms
from redfence._core.calls import AcquireCall, ReleaseCall, Timed, Waiter, fail, resolve
from redfence._core.link_state import LinkState
from redfence._core.outbox import Outbox
from redfence._errors import OutcomeUnknownError, RedfenceError
from redfence._messages.server_errors import from_wire
from redfence_proto.v1 import lock_pb2

_log = logging.getLogger("redfence")


class Releases:
    """Keeps the unanswered releases, and the abandoned acquires whose release is still to be sent."""

    def __init__(self, *, outbox: Outbox, alarms: Alarms[Timed], link: LinkState, timeouts: Timeouts) -> None:
        self._outbox = outbox
        self._alarms = alarms
        self._link = link
        self._timeouts = timeouts
        self._pending: dict[ReleaseCall | AcquireCall, None] = {}
        self._idle_waiters: list[Waiter] = []

    @property
    def pending(self) -> bool:
        """Whether a release is unanswered or still to be sent."""
        return bool(self._pending)

    def start(
        self,
        resource: str,
        lease_id: str,
        *,
        now_ms: float,
        waiter: Waiter | None = None,
        traceparent: str = "",
    ) -> None:
        """Queue a release; `waiter` gets whether the lease was still held, or the error."""
        call = ReleaseCall(resource, lease_id, waiter, traceparent)
        self._pending[call] = None
        self._outbox.put_first(call)
        self._alarms.set(call, now_ms + self._timeouts.rpc_timeout_ms)

    def expect(self, acquire: AcquireCall) -> None:
        """Count an abandoned acquire as pending, because its release follows its answer."""
        self._pending[acquire] = None

    def answered(self, call: ReleaseCall, result: lock_pb2.SessionResult, *, now_ms: float) -> None:
        """Give the caller the outcome; if the server is draining, queue the release again."""
        if call.settled:
            return
        if result.WhichOneof("result") == "release":
            self.end(call)
            if call.waiter is not None:
                resolve(call.waiter, result.release.outcome == lock_pb2.RELEASE_OUTCOME_RELEASED)
        elif result.error.reason == lock_pb2.ERROR_REASON_DRAINING:
            self._outbox.put_first(call)
            self._link.leave_after_answers(now_ms)
        else:
            self._fail(call, from_wire(result.error))

    def overdue(self, call: ReleaseCall, *, now_ms: float) -> None:
        """Fail a release that got no answer in time, and leave this link."""
        self._link.reconnect(now_ms)
        self._fail(call, self._link.no_answer(f"the release of {call.resource!r}", sent=True))

    def end(self, call: ReleaseCall | AcquireCall) -> None:
        """Mark a call as ended; resolve the idle waiters if it was the last pending one."""
        call.settled = True
        self._alarms.clear(call)
        if self._pending.pop(call, call) is None and not self._pending:
            for waiter in self._idle_waiters:
                resolve(waiter, None)

    def when_idle(self, waiter: Waiter) -> None:
        """Resolve `waiter` as soon as nothing is pending."""
        if self._pending:
            self._idle_waiters.append(waiter)
        else:
            resolve(waiter, None)

    def stop(self) -> None:
        """Fail every pending release and end every abandoned acquire. No caller waits after this."""
        for call in list(self._pending):
            if isinstance(call, ReleaseCall):
                self._fail(call, _stopped(call.resource))
            else:
                self.end(call)

    def _fail(self, call: ReleaseCall, error: RedfenceError) -> None:
        self.end(call)
        if call.waiter is None:
            _log.warning("release_failed resource=%r error=%r", call.resource, str(error))
        else:
            fail(call.waiter, error)


def _stopped(resource: str) -> RedfenceError:
    return OutcomeUnknownError(
        f"the client was closed before the release of {resource!r} was answered; "
        "the lease ends by its ttl at the latest"
    )
