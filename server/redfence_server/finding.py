"""What `redfence doctor` says: findings, and the diagnosis that they make up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Severity(Enum):
    """How much a finding matters, the worst first."""

    SERIOUS = "serious"
    """Somebody has to act: a node is lost to the cluster, or a promise of the cluster is in danger."""
    WARNING = "warning"
    """It mends itself, or will do harm on an occasion to come."""
    NOTE = "note"
    """It does no harm by itself."""


_RANK: Final[Mapping[Severity, int]] = {severity: rank for rank, severity in enumerate(Severity)}


class Kind(Enum):
    """What a finding is about. The values are for programs, and do not change."""

    UNREACHABLE = "unreachable"
    DENIED = "denied"
    UNINTELLIGIBLE = "unintelligible"
    REFUSED = "refused"
    LOADING = "loading"
    TOO_OLD = "too_old"
    REPLICA = "replica"
    HAS_REPLICAS = "has_replicas"
    PROMOTED = "promoted"
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
    EVICTED = "evicted"
    MEMORY_SHORT = "memory_short"
    NO_MEMORY_LIMIT = "no_memory_limit"
    NOT_FORMED = "not_formed"
    NOT_EMPTY = "not_empty"
    EMPTY = "empty"
    FORMING = "forming"
    RECOVERING = "recovering"
    OTHER_CLUSTER = "other_cluster"
    WRONG_PLACE = "wrong_place"
    REPLACED = "replaced"
    FORGOT = "forgot"
    QUARANTINED = "quarantined"
    TTL_DIFFERS = "ttl_differs"
    CLOCK_STEPS = "clock_steps"
    CLOCK_OFFSET = "clock_offset"
    CLOCK_SPREAD = "clock_spread"
    SLOW = "slow"
    UNSTEADY = "unsteady"
    NO_QUORUM = "no_quorum"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is the matter.

    Attributes:
        node: the node's index; None if it concerns the cluster.
        what: a sentence that does not name the node.
        advice: what to do.
        keeps_out: the node does not vote as long as it lasts.
    """

    node: int | None
    severity: Severity
    kind: Kind
    what: str
    advice: str
    keeps_out: bool = False

    @property
    def rank(self) -> int:
        """0 for the worst severity."""
        return _RANK[self.severity]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found.

    Attributes:
        findings: the worst first.
        cluster_id: which most of the formed nodes belong to; empty if none is formed.
        quorum: how many nodes must vote.
        voters: the indices of those that can.
    """

    findings: tuple[Finding, ...]
    cluster_id: str
    quorum: int
    voters: frozenset[int]

    @property
    def serious(self) -> bool:
        """Tell whether anything is."""
        return any(finding.severity is Severity.SERIOUS for finding in self.findings)

    def count(self, severity: Severity) -> int:
        """Return how many findings are of this severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def worst_of(self, node: int) -> Severity:
        """Return the worst severity of a node's findings; a note if it has none."""
        own = [finding.severity for finding in self.findings if finding.node == node]
        return min(own, key=_RANK.__getitem__, default=Severity.NOTE)


def serious(node: int | None, kind: Kind, what: str, advice: str, *, keeps_out: bool = True) -> Finding:
    """Return a finding on which somebody has to act; as a rule the node is lost until then."""
    return Finding(node, Severity.SERIOUS, kind, what, advice, keeps_out)


def warning(node: int | None, kind: Kind, what: str, advice: str, *, keeps_out: bool = False) -> Finding:
    """Return a finding that mends itself, or will do harm on an occasion to come."""
    return Finding(node, Severity.WARNING, kind, what, advice, keeps_out)


def note(node: int | None, kind: Kind, what: str, advice: str) -> Finding:
    """Return a finding that does no harm by itself."""
    return Finding(node, Severity.NOTE, kind, what, advice)
