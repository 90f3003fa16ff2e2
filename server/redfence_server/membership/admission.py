"""Decide whether a node may vote: on every new connection, before any command, and at every heartbeat. Pure.

Tokens stay ordered only if nodes remember them. A restart breaks every connection, and a server examines each
new connection, so it notices every restart. Every new run of a process passes the fence (membership/fence.py)
before it votes. By its settings and those of the run before, a run may prove that it forgot nothing.

Servers quarantine a node without proof. It comes back by fence, wait and vote. A server rejects a node that
only an operator can repair; this binds no other server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from redfence_server.membership.examination import Findings, Identity, Phase, version_number
from redfence_server.redis_io import scripts


class Reason(Enum):
    """Why a server rejects a node until an operator repairs it."""

    NOT_FORMED = auto()
    """It has no identity, and this server did not admit it before."""
    FORMING = auto()
    """`redfence cluster init` did not finish on its cluster."""
    OTHER_CLUSTER = auto()
    """It belongs to another cluster."""
    RESIZED = auto()
    """A resize took it out of the expected cluster, or out of any that this list of nodes can be."""
    WRONG_PLACE = auto()
    """Its index or the size of its cluster is not the configured one, or the configuration names it twice."""
    SAME_PROCESS = auto()
    """It is the same process as another node, so both would fail together."""
    NO_RUN_ID = auto()
    """Its INFO shows no run_id, so no server could notice a restart."""
    REPLACED = auto()
    """Another node, or a later state of this one, has voted at its index since."""
    REPLICA = auto()
    """It is a replica, so its primary decides its data."""
    TOO_OLD = auto()
    """Its version lacks what the scripts need."""
    EVICTS = auto()
    """It drops keys when its memory is full."""
    NOT_DURABLE = auto()
    """It was formed durable, and its settings are not durable any more."""
    SETTINGS_HIDDEN = auto()
    """It was formed durable, and this user may not read its settings."""

    @property
    def misconfigured(self) -> bool:
        """Tell whether the configuration is wrong, so that a server should not start."""
        return self in _MISCONFIGURED


_MISCONFIGURED = frozenset(
    {
        *(Reason.OTHER_CLUSTER, Reason.WRONG_PLACE, Reason.SAME_PROCESS),
        *(Reason.REPLICA, Reason.TOO_OLD, Reason.EVICTS, Reason.NO_RUN_ID),
    }
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """A server's knowledge of a node index before it examines the node there.

    Attributes:
        cluster_id: None until this server admitted a first node.
        assume_durable: the operator asserts that a restarted node has forgotten nothing.
        floor: the least floor that a process there needs to vote.
        token: the greatest token that this server has seen from the node with that floor.
        gap_seen: this server has seen the present run with settings that may lose answered commands.
        previously_admitted: this server admitted a process with that floor; an older one has forgotten.
        runs: the run ids of the other nodes' processes, each with its index.
    """

    index: int
    node_count: int
    cluster_id: str | None
    assume_durable: bool
    floor: int = 0
    token: int = 0
    previously_admitted: bool = False
    gap_seen: bool = False
    runs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The node votes, under this identity."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class Restarted:
    """The node's new run proved that it forgot nothing: it votes as soon as it has passed the fence.

    Attributes:
        noted: the node's identity says so; otherwise a server must take its vote first.
    """

    identity: Identity
    noted: bool


@dataclass(frozen=True, slots=True)
class Forgot:
    """The node may have forgotten locks or tokens, so a server must quarantine it."""

    detail: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The node is in the quarantine that its identity names; it votes after fence and wait."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class Rejected:
    """The node must not vote until an operator repairs it."""

    reason: Reason
    detail: str


Judgement = Admitted | Restarted | Forgot | Quarantined | Rejected


def judge(expected: Expectation, found: Findings) -> Judgement:
    """Decide whether a node may vote."""
    identity = found.identity
    if unfit := judge_process(found, expected.runs):
        return unfit
    if identity is None:
        return _judge_unformed(expected, found)
    return (
        _judge_assignment(expected, identity, found)
        or _judge_phase(expected, identity, found)
        or _judge_memory(expected, identity, found)
        or _judge_run(expected, identity, found)
    )


def judge_process(found: Findings, runs: Mapping[str, int]) -> Rejected | None:
    """Return why a process cannot be a node; `runs` maps the run ids of the other nodes to their indices."""
    if found.is_replica:
        return Rejected(Reason.REPLICA, "it is a replica; every node must be an independent primary")
    if version_number(found.version) < scripts.REDIS_VERSION_MIN:
        return Rejected(Reason.TOO_OLD, f"it is version {found.version}; 6.2 is the least")
    if found.eviction:
        return Rejected(
            Reason.EVICTS,
            f"it would drop keys when its memory is full ({found.eviction}); set maxmemory-policy noeviction",
        )
    if not found.run_id:
        return Rejected(
            Reason.NO_RUN_ID,
            "its INFO shows no run_id, so servers would miss a restart; use a server whose INFO shows it",
        )
    same = runs.get(found.run_id)
    if same is not None:
        return Rejected(
            Reason.SAME_PROCESS,
            f"it is the same process as node {same}; every node must be a server of its own",
        )
    return None


def _judge_unformed(expected: Expectation, found: Findings) -> Forgot | Rejected:
    """Decide whether a node without an identity was wiped or was never formed."""
    if found.key_count:
        return Rejected(
            Reason.NOT_FORMED,
            f"it has no cluster identity and yet holds {found.key_count} keys: if no program needs them, "
            "empty it (FLUSHALL), and it comes back by itself",
        )
    if expected.cluster_id is None:
        return Rejected(Reason.NOT_FORMED, "it has no cluster identity: never formed, or wiped")
    if not expected.previously_admitted:
        return Rejected(
            Reason.NOT_FORMED,
            "it is empty, and this server has not seen it before: if it was wiped, or replaces another node, "
            f"run `redfence cluster replace {expected.index} URL`",
        )
    return Forgot("it is empty: it was wiped")


def _judge_assignment(expected: Expectation, identity: Identity, found: Findings) -> Rejected | None:
    """Return why this is not the node that is configured here."""
    if identity.phase is Phase.RETIRED and identity.cluster_id == expected.cluster_id:
        return Rejected(
            Reason.REPLACED,
            "it was away when its cluster was resized: once the resize is done, run "
            f"`redfence cluster replace {expected.index} URL`",
        )
    if _is_resized(expected, identity):
        return Rejected(
            Reason.RESIZED,
            f"cluster {identity.predecessor} was resized and goes on as cluster {identity.cluster_id}: give "
            "this server the new list of nodes and restart it; if the resize broke off, repeat "
            "`redfence cluster resize`",
        )
    if expected.cluster_id is not None and identity.cluster_id != expected.cluster_id:
        return Rejected(
            Reason.OTHER_CLUSTER, f"it belongs to cluster {identity.cluster_id}, not to {expected.cluster_id}"
        )
    if identity.node_count != expected.node_count:
        return Rejected(
            Reason.WRONG_PLACE,
            f"it was formed as one of {identity.node_count} nodes, but {expected.node_count} are configured",
        )
    if identity.index != expected.index:
        cause = (
            "it was a replica of that one and has its data; empty it (FLUSHALL), and it comes back by itself"
            if found.promoted
            else "the nodes are in another order, or one is named twice"
        )
        return Rejected(
            Reason.WRONG_PLACE,
            f"it was formed as node {identity.index}, but is configured as node {expected.index}: {cause}",
        )
    return None


def _is_resized(expected: Expectation, identity: Identity) -> bool:
    """Tell whether the node left the expected cluster, or a cluster of so many nodes as are expected."""
    if identity.phase is Phase.RETIRED:
        return True
    is_other_size = identity.node_count != expected.node_count
    return bool(identity.predecessor) and (
        identity.predecessor == expected.cluster_id or (expected.cluster_id is None and is_other_size)
    )


def _judge_phase(
    expected: Expectation, identity: Identity, found: Findings
) -> Forgot | Quarantined | Rejected | None:
    """Return why the node's phase or floor keeps it from voting."""
    if identity.phase in {Phase.FORMING, Phase.ASSEMBLED}:
        return Rejected(
            Reason.FORMING, "its cluster was not formed to the end: run `redfence cluster init` again"
        )
    if identity.floor < expected.floor:
        if expected.previously_admitted:
            return Forgot(
                "its data is older than its last return to the cluster: an old snapshot was restored"
            )
        return Rejected(
            Reason.REPLACED,
            "another process was given its index since: name that one; or, to give this one the index again, "
            f"run `redfence cluster replace {expected.index} URL`",
        )
    if identity.phase is Phase.QUARANTINED:
        # A new run may hold an older copy of the data, from an older quarantine, whose fence does not count.
        same_run = _is_same_run(identity, found)
        return Quarantined(identity) if same_run else Forgot("it restarted in quarantine")
    return None


def _judge_memory(expected: Expectation, identity: Identity, found: Findings) -> Forgot | Rejected | None:
    """Return why the node has forgotten tokens or keys, or why this server cannot tell."""
    if found.max_token is None:
        return Forgot("it has lost `high`, its greatest token")
    if identity.floor == expected.floor and found.max_token < expected.token:
        return Forgot(
            "its data is older than what it has answered: its greatest token is "
            f"{found.max_token}, and it has answered {expected.token} "
            "(an old snapshot, a cut file, or a disk that lost confirmed writes)"
        )
    same_run = _is_same_run(identity, found)
    evicted = found.evicted - (identity.evicted if same_run else 0)
    if evicted > 0:
        return Forgot(f"it has dropped {evicted} keys because its memory was full")
    if found.promoted and not same_run:
        return Forgot(
            "it was a replica in this run, or began with data of a node that had one: it may lack answers"
        )
    if found.settings_hidden and identity.durable and not expected.assume_durable:
        # This is no evidence against the node: a user with more rights can see that it lost nothing. A
        # quarantine would bind every server, so this server only rejects the node.
        return Rejected(
            Reason.SETTINGS_HIDDEN,
            "it was durable, and this user may not read whether its settings still are: grant the user "
            "+config|get, or set assume_durable",
        )
    return None


def _judge_run(
    expected: Expectation, identity: Identity, found: Findings
) -> Admitted | Restarted | Forgot | Rejected:
    gap = found.durability_gap
    if _is_same_run(identity, found):
        # A running process has forgotten nothing. But a process whose settings are not durable any more must
        # not vote: after a crash it would read older data, settings included, and would seem durable. That is
        # so until the append-only file that was switched on again is complete.
        if expected.gap_seen and found.log_incomplete:
            gap = gap or "its append-only file is not rewritten yet"
        if identity.durable and gap and not expected.assume_durable:
            return Rejected(Reason.NOT_DURABLE, f"it was durable and is not any more: {gap}")
        return Restarted(identity, noted=True) if identity.phase is Phase.RESTARTED else Admitted(identity)
    # The settings of the run that ended count for this restart; those of the present run for the next one.
    if expected.assume_durable or (identity.durable and not gap):
        return Restarted(identity, noted=False)
    problem = gap or "the run that ended did not write every answered command to disk"
    return Forgot(f"it restarted and cannot prove that it forgot nothing: {problem}")


def _is_same_run(identity: Identity, found: Findings) -> bool:
    if found.promoted:
        return identity.run_id == found.run_id
    # An hour after its last replica has gone, a promoted process no longer shows that it was promoted.
    return identity.run_id.partition("/")[0] == found.run_id
