"""Wakes the callers that wait until a server is reachable. No I/O."""

from __future__ import annotations

from redfence._core.alarms import Alarms
from redfence._core.calls import LinkCall, Timed, Waiter, fail, resolve
from redfence._core.link_state import LinkState
from redfence._errors import RedfenceError


class LinkWaiters:
    """Keeps the callers that wait for a link, each for at most the rpc timeout."""

    def __init__(self, *, alarms: Alarms[Timed], link: LinkState, rpc_timeout_ms: float) -> None:
        self._alarms = alarms
        self._link = link
        self._rpc_timeout_ms = rpc_timeout_ms
        self._calls: dict[LinkCall, None] = {}

    def __bool__(self) -> bool:
        """Return whether a caller waits."""
        return bool(self._calls)

    def add(self, waiter: Waiter, *, now_ms: float) -> None:
        """Resolve `waiter` at once if the link is up, otherwise when it comes up."""
        if self._link.up:
            waiter.set_result(None)
            return
        call = LinkCall(waiter)
        self._calls[call] = None
        self._alarms.set(call, now_ms + self._rpc_timeout_ms)

    def settle(self, error: RedfenceError | None) -> None:
        """Resolve all callers, or fail them with the error."""
        for call in self._calls:
            self._alarms.clear(call)
            if error is None:
                resolve(call.waiter, None)
            else:
                fail(call.waiter, error)
        self._calls.clear()

    def overdue(self, call: LinkCall) -> None:
        """Fail a caller whose rpc timeout is over."""
        del self._calls[call]
        fail(call.waiter, self._link.no_answer("the call", sent=False))
