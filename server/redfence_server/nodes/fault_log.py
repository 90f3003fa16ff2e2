"""Log the failures of a node's commands once for each fault, not once for each command."""

from __future__ import annotations

from typing import Final

import structlog

from redfence_server.clock import Clock

# A fault has ended after this time without a failure. Lower: rare failures begin and end many faults.
_QUIET_MS: Final = 5_000
# A fault changes at each new kind of error. Further kinds are only counted, so the log stays bounded.
_KINDS_MAX: Final = 8
# A fault that goes on is logged again after this time, so that an operator sees that it has not ended.
_REMINDER_MS: Final = 60_000


class FaultLog:
    """Logs when a node begins to answer with errors, when the kind of the errors changes, and when they end.

    Between, it logs the last error once a minute, with the count so far.

    Args:
        on_failure: the log event of a beginning, a change and a reminder.
        on_recovery: the log event of an end.

    Attributes:
        problem: the last error since the examination before the last one; empty if there was none.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        on_failure: str = "node_command_failed",
        on_recovery: str = "node_commands_recovered",
    ) -> None:
        self._clock = clock
        self._log = log
        self._on_failure = on_failure
        self._on_recovery = on_recovery
        self.problem = ""
        # The kinds of error in the present fault; empty while there is no fault.
        self._kinds: set[str] = set()
        self._failure_count = 0
        self._began_ms = self._last_ms = self._logged_ms = 0.0
        self._is_recent = False

    def failed(self, problem: str) -> None:
        """Note an error; its first word is its kind."""
        self._last_ms = self._clock.now_ms()
        self._is_recent = True
        self.problem = problem
        if not self._kinds:
            self._began_ms, self._failure_count = self._last_ms, 0
        self._failure_count += 1
        kind = problem.partition(" ")[0]
        is_new = kind not in self._kinds and len(self._kinds) < _KINDS_MAX
        if is_new or self._last_ms - self._logged_ms >= _REMINDER_MS:
            if is_new:
                self._kinds.add(kind)
            self._logged_ms = self._last_ms
            self._log.warning(self._on_failure, problem=problem, **self._so_far())

    def examined(self, refusal: str) -> None:
        """Note an examination, and the error with which the node would refuse a mint, if there is one."""
        if refusal:
            self.failed(refusal)
        elif not self._is_recent:
            self.problem = ""
            if self._kinds and self._clock.now_ms() - self._last_ms >= _QUIET_MS:
                self._kinds.clear()
                # The level of the loss, because an operator who saw the loss waits for this.
                self._log.warning(self._on_recovery, **self._so_far())
        self._is_recent = False

    def _so_far(self) -> dict[str, float]:
        lasted_ms = self._last_ms - self._began_ms
        return {"failures": self._failure_count, "lasted_s": round(lasted_ms / 1000, 1)}
