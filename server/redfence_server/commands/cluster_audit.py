"""Write to the audit log what a command has done to a cluster: one line for each change, at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from redfence_server.access.audit import AuditLog
from redfence_server.clock import SystemClock
from redfence_server.config import ServeConfig
from redfence_server.redis_io.dial import NodeUrl

DONE: Final = "done"
PARTLY_DONE: Final = "partly_done"
_NOT_DONE: Final = "not_done"


class ClusterChange:
    """Collects what the line says; a command fills it in as it learns it.

    Attributes:
        outcome: of a command that raises no error.
    """

    def __init__(self, nodes: Sequence[NodeUrl]) -> None:
        self.nodes = nodes
        self.cluster_id = ""
        self.floor = 0
        self.outcome = DONE

    def line(self) -> dict[str, Any]:
        """Return the fields of the line that only cluster commands write."""
        addresses = [node.address for node in self.nodes]
        return {"cluster_id": self.cluster_id, "nodes": addresses, "floor": self.floor}


@contextmanager
def audited(settings: ServeConfig, event: str, nodes: Sequence[NodeUrl]) -> Iterator[ClusterChange]:
    """Within `with`, carry out a change; the line is written at the end, also if the change fails.

    `nodes` is the list that servers have after the change.

    Raises:
        ConfigError: the audit log cannot be written; nothing was changed then.
    """
    change = ClusterChange(nodes)
    if not settings.audit_log:
        yield change
        return
    audit = AuditLog(settings.audit_log, clock=SystemClock())
    try:
        yield change
        audit.record(event, change.outcome, **change.line())
    except BaseException as error:
        # A break by Ctrl-C has no text.
        audit.record(event, _NOT_DONE, problem=str(error) or "broken off", **change.line())
        raise
    finally:
        audit.close()
