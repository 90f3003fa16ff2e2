"""Keep the state of the link to a node; count, report and log each change."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from redfence_server.clock import Clock
from redfence_server.locking.node import NodeState


class LinkState:
    """Holds the state since `since_ms`, at first JOINING; `detail` says why, or is empty if all is well."""

    def __init__(
        self, *, clock: Clock, log: structlog.typing.FilteringBoundLogger, on_change: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._log = log
        self._on_change = on_change
        self._logged: NodeState | None = None
        self.state = NodeState.JOINING
        self.detail = "connecting for the first time"
        self.since_ms = clock.now_ms()
        self.change_count = 0

    def become(self, state: NodeState, detail: str, *, run_id: str) -> None:
        """Take a new state; log it unless it was the last one logged."""
        before, self.state, self.detail = self.state, state, detail
        if state is not before:
            self.since_ms = self._clock.now_ms()
            self.change_count += 1
            self._on_change()
        # An unavailable node is dialled again and again, but logged once.
        if state is NodeState.JOINING or state is self._logged:
            return
        logged, self._logged = self._logged, state
        if state is NodeState.READY and logged is None:
            self._log.info("node_ready", run_id=run_id)
        elif state is NodeState.READY:
            # The level of the loss, because an operator who saw the loss waits for this.
            self._log.warning("node_recovered", run_id=run_id)
        else:
            self._log.warning("node_unavailable", state=state.name.lower(), detail=detail)
