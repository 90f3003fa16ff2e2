"""Write each change of a node's state to the audit log."""

from __future__ import annotations

from collections.abc import Callable

from redfence_server.access.audit import AuditLog
from redfence_server.locking.node import NodeState
from redfence_server.nodes.cluster import ClusterView


class NodeAudit:
    """Writes a line to the audit log for each change of a node's state."""

    def __init__(self, audit: AuditLog, view: Callable[[], ClusterView]) -> None:
        self._audit = audit
        self._view = view
        self._states: dict[int, NodeState] = {}

    def note(self) -> None:
        """Compare the states with those that were written last."""
        for index, report in enumerate(self._view().nodes):
            if self._states.get(index) is not report.state:
                self._states[index] = report.state
                self._audit.record(
                    "node",
                    report.state.name.lower(),
                    node_index=index,
                    node_address=report.address,
                    detail=report.detail,
                )
