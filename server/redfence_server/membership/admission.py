"""Decide whether a node may vote: judged on every new connection, before any command, and at every heartbeat. Pure.

A token is worth as much as the memory of the nodes behind it. A restart breaks every connection, so a server that looks
at each new connection cannot miss one. Every new run of a process passes the fence (membership/fence.py) before it votes. Proof that
it forgot nothing, from the settings of the run that ended and of this one, only spares it the wait after the fence.

A node without proof is quarantined, for all servers, and comes back by fence, wait and vote. A node that only an
operator can mend is rejected, by each server for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from redfence_server.membership.examination import Findings, Identity, Phase, version_number
from redfence_server.redis_io import scripts


class Reason(Enum):
    """Why a node is turned away until an operator mends it."""

    NOT_FORMED = auto()
    """It has no identity, and it is not known to be the node that was here before."""
    FORMING = auto()
    """Its cluster was not formed to the end."""
    OTHER_CLUSTER = auto()
    """It belongs to another cluster."""
    WRONG_PLACE = auto()
    """It has another index, or its cluster another size, than configured; or it is configured twice."""
    SAME_PROCESS = auto()
    """It is the same process as another node: they would fail together."""
    NO_RUN_ID = auto()
    """Its INFO shows no run_id, so a restart could not be told."""
    REPLACED = auto()
    """Another node, or a later state of it, has voted at its place since."""
    REPLICA = auto()
    """It is a replica: it does not decide what it stores."""
    TOO_OLD = auto()
    """Its version lacks what the scripts need."""
    EVICTS = auto()
    """It drops keys when its memory is full."""
    NOT_DURABLE = auto()
    """It was formed durable and its settings are not so any more."""
    SETTINGS_HIDDEN = auto()
    """It was formed durable, and this user may not read whether its settings still are."""

    @property
    def misconfigured(self) -> bool:
        """Tell whether the configuration is wrong, so that a server had better not start."""
        return self in _MISCONFIGURED


_MISCONFIGURED = frozenset(
    {
        *(Reason.OTHER_CLUSTER, Reason.WRONG_PLACE, Reason.SAME_PROCESS),
        *(Reason.REPLICA, Reason.TOO_OLD, Reason.EVICTS, Reason.NO_RUN_ID),
    }
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is known of a node index before the node there is examined.

    Attributes:
        cluster_id: None until a first node was admitted.
        assume_durable: the operator's word that a node which restarted has forgotten nothing.
        floor: the least floor that a process there needs to vote.
        token: the greatest token that this server has seen from the node with that floor.
        gap_seen: this server has seen that the present run might lose what it answered.
        previously_admitted: this server admitted a process there with that floor, so an empty or older one has forgotten.
        runs: the runs of the other nodes' processes, each with its index.
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
    """A new run that proved that it forgot nothing: it votes as soon as it has passed the fence.

    Attributes:
        noted: the node's identity says so; if not, a server has to take the node out first.
    """

    identity: Identity
    noted: bool


@dataclass(frozen=True, slots=True)
class Forgot:
    """The node may have forgotten what it promised: a server has to quarantine it."""

    detail: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The node is in the quarantine that its identity names: it votes after fence and wait."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class Rejected:
    """The node must not vote until an operator mends what is wrong."""

    reason: Reason
    detail: str


Judgement = Admitted | Restarted | Forgot | Quarantined | Rejected


def judge(expected: Expectation, found: Findings) -> Judgement:
    """Decide whether a node may vote."""
    identity = found.identity
    if unfit := judge_process(found, expected.runs):
        return unfit
    if identity is None:
        return _judge_nameless(expected, found)
    return (
        _judge_seat(expected, identity, found)
        or _judge_life(expected, identity, found)
        or _judge_memory(expected, identity, found)
        or _judge_run(expected, identity, found)
    )


def judge_process(found: Findings, runs: Mapping[str, int]) -> Rejected | None:
    """Decide whether the process is fit to be a node, beside those of other nodes: their runs, each with its index."""
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
            "its INFO shows no run_id, so a restart could not be noticed; use a server that shows it in INFO server",
        )
    twin = runs.get(found.run_id)
    if twin is not None:
        return Rejected(
            Reason.SAME_PROCESS,
            f"it is the same process as node {twin}; every node must be a server of its own",
        )
    return None


def _judge_nameless(expected: Expectation, found: Findings) -> Forgot | Rejected:
    """Decide what a node without an identity is."""
    if found.key_count:
        return Rejected(
            Reason.NOT_FORMED,
            f"it has no cluster identity and yet holds {found.key_count} keys: if they are of no use to anybody, empty it "
            "(FLUSHALL), and it comes back by itself",
        )
    if expected.cluster_id is None:
        return Rejected(Reason.NOT_FORMED, "it has no cluster identity: never formed, or wiped")
    if not expected.previously_admitted:
        return Rejected(
            Reason.NOT_FORMED,
            "it is empty, and this server has not seen it before: if it was wiped, or replaces the node that was here, run "
            f"`redfence cluster replace {expected.index} URL`",
        )
    return Forgot("it is empty: it was wiped")


def _judge_seat(expected: Expectation, identity: Identity, found: Findings) -> Rejected | None:
    """Decide whether this is the node that is configured here."""
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
            "it was a replica of that one and shows its data; empty it (FLUSHALL), and it comes back by itself"
            if found.promoted
            else "the nodes are in another order, or one is named twice"
        )
        return Rejected(
            Reason.WRONG_PLACE,
            f"it was formed as node {identity.index}, but is configured as node {expected.index}: {cause}",
        )
    return None


def _judge_life(
    expected: Expectation, identity: Identity, found: Findings
) -> Forgot | Quarantined | Rejected | None:
    """Decide in which phase of its life the node is, and whether it is what voted here last."""
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
            "another process was given its index since: name that one; or, if this one is to take the place again, run "
            f"`redfence cluster replace {expected.index} URL`",
        )
    if identity.phase is Phase.QUARANTINED:
        # A new run may be an older copy of the data, in an older quarantine: its fence would not count.
        same_run = _is_same_run(identity, found)
        return Quarantined(identity) if same_run else Forgot("it restarted in quarantine")
    return None


def _judge_memory(expected: Expectation, identity: Identity, found: Findings) -> Forgot | Rejected | None:
    """Decide whether the node has forgotten anything, or cannot show that it has not."""
    if found.high is None:
        return Forgot("it has lost `high`, its greatest token")
    if identity.floor == expected.floor and found.high < expected.token:
        return Forgot(
            f"its data is older than what it has answered: its greatest token is {found.high}, and it has answered "
            f"{expected.token} (an old snapshot, a cut file, or a disk that lost what it had confirmed)"
        )
    same_run = _is_same_run(identity, found)
    evicted = found.evicted - (identity.evicted if same_run else 0)
    if evicted > 0:
        return Forgot(f"it has dropped {evicted} keys because its memory was full")
    if found.promoted and not same_run:
        return Forgot(
            "it was a replica in this run, or began with the data of a node that had one: what was answered last may be missing"
        )
    if found.settings_hidden and identity.durable and not expected.assume_durable:
        # No evidence against the node: a user with more rights can see that it lost nothing. So this server does not
        # quarantine it, which would bind every server.
        return Rejected(
            Reason.SETTINGS_HIDDEN,
            "it was durable, and this user may not read its settings, which tell whether it still is: grant the user "
            "+config|get, or set assume_durable",
        )
    return None


def _judge_run(
    expected: Expectation, identity: Identity, found: Findings
) -> Admitted | Restarted | Forgot | Rejected:
    gap = found.durability_gap
    if _is_same_run(identity, found):
        # A process that runs has forgotten nothing. But a durable one that is not durable any more must not vote. After a
        # crash it would seem durable again: what it reads then is older than the change. That lasts until the file
        # that was switched on again is complete.
        if expected.gap_seen and found.log_incomplete:
            gap = gap or "its append-only file is not rewritten yet"
        if identity.durable and gap and not expected.assume_durable:
            return Rejected(Reason.NOT_DURABLE, f"it was durable and is not any more: {gap}")
        return Restarted(identity, noted=True) if identity.phase is Phase.RESTARTED else Admitted(identity)
    # How the run that ended wrote counts for the past; how this one writes counts for the next restart.
    if expected.assume_durable or (identity.durable and not gap):
        return Restarted(identity, noted=False)
    problem = gap or "the run that ended did not write every answered command to disk"
    return Forgot(f"it restarted and cannot prove that it forgot nothing: {problem}")


def _is_same_run(identity: Identity, found: Findings) -> bool:
    if found.promoted:
        return identity.run_id == found.run_id
    # An hour after its last replica has gone, a process that was promoted no longer shows that it was.
    return identity.run_id.partition("/")[0] == found.run_id
