"""The result of `redfence doctor`: findings, and the diagnosis that they make up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """The severity of a finding, the worst first."""

    SERIOUS = "serious"
    """An operator has to act: a node is lost to the cluster, or a promise is in danger."""
    WARNING = "warning"
    """It repairs itself, or it will do harm later."""
    NOTE = "note"
    """It does no harm by itself."""


class Kind(Enum):
    """The subject of a finding. Programs read the values, so they never change."""

    UNREACHABLE = "unreachable"
    DENIED = "denied"
    UNINTELLIGIBLE = "unintelligible"
    REFUSED = "refused"
    LOADING = "loading"
    TOO_OLD = "too_old"
    REPLICA = "replica"
    HAS_REPLICAS = "has_replicas"
    CLUSTER_MODE = "cluster_mode"
    SAME_PROCESS = "same_process"
    NOT_DURABLE = "not_durable"
    NOT_YET_DURABLE = "not_yet_durable"
    SETTINGS_HIDDEN = "settings_hidden"
    LOG_WRITE_FAILED = "log_write_failed"
    LOG_REWRITE_FAILED = "log_rewrite_failed"
    SNAPSHOT_FAILED = "snapshot_failed"
    SLOW_DISK = "slow_disk"
    EVICTS = "evicts"
    EVICTION_POLICY = "eviction_policy"
    MEMORY_SHORT = "memory_short"
    NO_MEMORY_LIMIT = "no_memory_limit"
    NOT_FORMED = "not_formed"
    NOT_EMPTY = "not_empty"
    EMPTY = "empty"
    FORMING = "forming"
    OTHER_CLUSTER = "other_cluster"
    RESIZED = "resized"
    WRONG_PLACE = "wrong_place"
    REPLACED = "replaced"
    FORGOT = "forgot"
    QUARANTINED = "quarantined"
    RESTARTED = "restarted"
    GRANTS_REFUSED = "grants_refused"
    NO_RUN_ID = "no_run_id"
    TTL_DIFFERS = "ttl_differs"
    CLOCK_STEPS = "clock_steps"
    SLOW = "slow"
    UNSTEADY = "unsteady"
    NO_QUORUM = "no_quorum"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a node or of the cluster.

    Attributes:
        what: a sentence that does not name the node.
        keeps_out: the node does not vote as long as this lasts.
        node: the node's index; None if the finding concerns the cluster.
    """

    severity: Severity
    kind: Kind
    what: str
    advice: str
    keeps_out: bool = False
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, the worst first. `cluster_id` is that of most nodes, and empty if none is formed."""

    findings: tuple[Finding, ...]
    cluster_id: str
    quorum: int
    voters: frozenset[int]

    @property
    def serious(self) -> bool:
        """Tell whether any finding is serious."""
        return self.count(Severity.SERIOUS) > 0

    def count(self, severity: Severity) -> int:
        """Return how many findings are of this severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def worst_of(self, node: int) -> Severity:
        """Return the worst severity of a node's findings; a note if it has none."""
        own = [finding.severity for finding in self.findings if finding.node == node]
        return min(own, key=list(Severity).index, default=Severity.NOTE)
