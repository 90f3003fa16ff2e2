"""The state that the link to a node is in, since when and why. A change is counted, passed on, and logged once."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from redfence_server.clock import Clock
from redfence_server.locking.node import NodeState


class LinkState:
    """Begins as JOINING. `detail` says why the node is in its state since `since_ms`; it is empty when all is well."""

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
        """Note the state of a node in this run."""
        before, self.state, self.detail = self.state, state, detail
        if state is not before:
            self.since_ms = self._clock.now_ms()
            self.change_count += 1
            self._on_change()
        # A node that stays away is dialled again and again; that is told once.
        if state is NodeState.JOINING or state is self._logged:
            return
        logged, self._logged = self._logged, state
        if state is NodeState.READY and logged is None:
            self._log.info("node_ready", run_id=run_id)
        elif state is NodeState.READY:
            # At the level of its loss: an operator who was told of the loss waits for this.
            self._log.warning("node_recovered", run_id=run_id)
        else:
            self._log.warning("node_unavailable", state=state.name.lower(), detail=detail)
