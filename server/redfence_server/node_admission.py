"""Whether a node may vote: judged on every new connection, before any command. Pure; node_examination.py gathers what it needs.

A token is worth as much as the memory of the nodes behind it. A restart breaks every connection, so whoever looks at each new
connection cannot miss one. What speaks for a node is its own identity (which cluster and place, under which run of its process it was
admitted), the settings by which it writes to disk, and what *others* remember of it: how many changes it has made, and the floor it
was given when it last came back. A node that shows less than anybody remembers has forgotten, whatever its settings say: an old
snapshot, a cut file, a disk that lied, another machine under the same name.

A node that forgot is quarantined, for all servers, and comes back by a rejoin (rejoin.py). One that only an operator can mend is rejected,
by each server for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from redfence_server import scripts
from redfence_server.node_examination import Findings, Identity, Phase, version_number


class Reason(Enum):
    """Why a node is turned away until somebody mends it."""

    NOT_FORMED = auto()
    """It has no identity, and it is not known to be the node that was here before."""
    FORMING = auto()
    """Its cluster was not formed to the end."""
    RECOVERING = auto()
    """An operator's recovery was not carried out to the end."""
    OTHER_CLUSTER = auto()
    """It belongs to another cluster."""
    WRONG_PLACE = auto()
    """It has another index, or its cluster another size, than configured; or it is configured twice."""
    SAME_PROCESS = auto()
    """It is the same process as another node: they would fail together."""
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
    """It was formed durable, and whoever looks may not read whether its settings still are so."""

    @property
    def misconfigured(self) -> bool:
        """Tell whether the configuration is wrong, so that a server had better not start."""
        return self in _MISCONFIGURED


_MISCONFIGURED = frozenset(
    {
        *(Reason.OTHER_CLUSTER, Reason.WRONG_PLACE, Reason.SAME_PROCESS),
        *(Reason.REPLICA, Reason.TOO_OLD, Reason.EVICTS),
    }
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is known of a place before its node is looked at.

    Attributes:
        cluster_id: None until a first node was admitted.
        assume_durable: the operator's word that a node which restarted has forgotten nothing.
        floor: the least floor the node must have.
        changes: how many changes it has made, at least, if it has that floor.
        familiar: what voted last at this place is what is looked at here, so if it is gone or older it has forgotten.
        runs: of the other nodes' processes, each with its index.
    """

    index: int
    node_count: int
    cluster_id: str | None
    assume_durable: bool
    floor: int = 0
    changes: int = 0
    familiar: bool = False
    runs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The node may vote under this identity.

    Attributes:
        restarted: whether this is a new run of its process, which note_run.lua has to note first.
        durable: whether that run loses nothing at a crash.
    """

    identity: Identity
    restarted: bool
    durable: bool


@dataclass(frozen=True, slots=True)
class Forgot:
    """The node may have forgotten what it promised: it must be quarantined."""

    detail: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The node is in the quarantine that its identity names; it can come back by a rejoin."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class Rejected:
    """The node must not vote until somebody mends what is wrong."""

    reason: Reason
    detail: str


Judgement = Admitted | Forgot | Quarantined | Rejected


def judge(expected: Expectation, found: Findings) -> Judgement:
    """Decide whether a node may vote."""
    identity = found.identity
    return (
        judge_process(found, expected.runs)
        or (_judge_nameless(expected, found) if identity is None else None)
        or (_judge_seat(expected, identity, found) if identity is not None else None)
        or (_judge_life(expected, identity) if identity is not None else None)
        or _judge_memory(expected, found)
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
    if not expected.familiar:
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


def _judge_life(expected: Expectation, identity: Identity) -> Forgot | Quarantined | Rejected | None:
    """Decide in which phase of its life it is, and whether it is what voted here last."""
    match identity.phase:
        case Phase.FORMING | Phase.ASSEMBLED:
            return Rejected(
                Reason.FORMING, "its cluster was not formed to the end: run `redfence cluster init` again"
            )
        case Phase.RECOVERING:
            return Rejected(
                Reason.RECOVERING,
                "it is being recovered; if nobody is at it, run `redfence cluster recover` again",
            )
        case Phase.RETIRED:
            return Rejected(
                Reason.REPLACED, "it was replaced by another node: name that one, and wipe this one"
            )
    if identity.floor < expected.floor:
        if expected.familiar:
            return Forgot(
                "its data is older than its last return to the cluster: an old snapshot was restored"
            )
        return Rejected(
            Reason.REPLACED,
            "another node, or a later state of this one, has voted at its place since: name that one; or, if this one is to "
            f"take the place again, run `redfence cluster replace {expected.index} URL`",
        )
    return Quarantined(identity) if identity.phase is Phase.QUARANTINED else None


def _judge_memory(expected: Expectation, found: Findings) -> Admitted | Forgot | Rejected:  # noqa: PLR0911  (one return per rule reads best)
    """Decide whether the node that was formed may have forgotten anything, or be about to."""
    identity = found.identity
    assert identity is not None, "a node without an identity is judged before"
    if found.high is None:
        return Forgot("it has lost `high`, its greatest number")
    if identity.floor == expected.floor and identity.changes < expected.changes:
        return Forgot(
            f"its data is older than what it has answered: it shows {identity.changes} changes of at least {expected.changes} "
            "(an old snapshot, a cut file, or a disk that lost what it had confirmed)"
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
        # No evidence against the node: a user with more rights can see that it lost nothing. So it is not for this one to
        # quarantine it, which would bind everybody.
        return Rejected(
            Reason.SETTINGS_HIDDEN,
            "it was durable, and this user may not read its settings, which tell whether it still is: grant the user +config|get, or "
            "set assume_durable",
        )
    if same_run:
        return _judge_same_run(expected, found, identity)
    # What counts for the past is how the run wrote that ended; how this one writes counts for the next restart.
    gap = found.durability_gap
    if expected.assume_durable or (identity.durable and not gap):
        return Admitted(identity, restarted=True, durable=not gap)
    problem = gap or "the run that ended did not write every answered command to disk"
    return Forgot(f"it restarted and cannot prove that it forgot nothing: {problem}")


def _is_same_run(identity: Identity, found: Findings) -> bool:
    if found.promoted:
        return identity.run_id == found.run_id
    # An hour after its last replica has gone, a process that was promoted no longer shows that it was.
    return identity.run_id.partition("/")[0] == found.run_id


def _judge_same_run(expected: Expectation, found: Findings, identity: Identity) -> Admitted | Rejected:
    # A process that runs has forgotten nothing. But one that was durable and is not any more must not vote from now on: at
    # its next start it could have forgotten this very change together with the tokens, and would seem durable again
    # (test_a_node_that_stops_being_durable_does_not_vote_again).
    if identity.durable and found.durability_gap and not expected.assume_durable:
        return Rejected(Reason.NOT_DURABLE, f"it was durable and is not any more: {found.durability_gap}")
    return Admitted(identity, restarted=False, durable=identity.durable)
