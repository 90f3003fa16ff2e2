"""Plan the recovery of a cluster after more than a minority of its nodes forgot. Pure.

No set of nodes is sure to know every granted token: a grant stands on f + 1 nodes, and these may be the f + 1
that forgot. So the floor comes from outside: from the clock, or from the operator, who can ask the storage.
operations/floors.py says why the clock will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.membership.admin import NodeSnapshot
from redfence_server.membership.admission import Admitted, Judgement, Reason, Rejected, Restarted
from redfence_server.membership.cluster_judgement import ClusterJudgement
from redfence_server.membership.examination import Phase
from redfence_server.operations.floors import floor_of


@dataclass(frozen=True, slots=True)
class Request:
    """The operator's request.

    Attributes:
        floor: tokens go on above it; None takes it from the clock.
        ttl_ms_max: needed if no node remembers it; None if not given.
        assume_durable: the operator asserts that a restarted node has forgotten nothing.
    """

    floor: int | None
    ttl_ms_max: int | None
    assume_durable: bool = False


@dataclass(frozen=True, slots=True)
class Recovery:
    """The plan: take out all nodes that were examined, and give them the floor after the wait.

    Attributes:
        is_new: no node remembers the cluster, so its id is a new one.
        away: the nodes that could not be examined.
        is_avoidable: a quorum would vote without a recovery if the nodes that are away came back with their
            memory.
    """

    cluster_id: str
    is_new: bool
    ttl_ms_max: int
    floor: int
    nodes: tuple[int, ...]
    away: tuple[int, ...]
    is_avoidable: bool


def plan(
    snapshots: Sequence[NodeSnapshot], request: Request, *, wall_us: int, new_cluster_id: str
) -> Recovery:
    """Return the recovery of these nodes, from one snapshot for each index; `wall_us` counts from 1970.

    Raises:
        NodeRejectedError: a node is unfit, too few can be reached, or there is nothing to recover; it names
            the nodes.
        ConfigError: the floor is too low or too high, or the greatest ttl is missing or another.
    """
    shown = [snapshot.found for snapshot in snapshots]
    judged = ClusterJudgement(shown, assume_durable=request.assume_durable, previously_admitted=True)
    for snapshot in snapshots:
        _refuse_unfit(snapshot, judged.judge(snapshot.index, snapshot.found))
    away = [snapshot for snapshot in snapshots if snapshot.found is None]
    if len(snapshots) - len(away) < judged.quorum:
        problems = "; ".join(f"{snapshot.name}: {snapshot.problem}" for snapshot in away)
        raise NodeRejectedError(f"fewer than a quorum of {judged.quorum} nodes can be reached: {problems}")
    voting = judged.voting()
    if len(voting) >= judged.quorum:
        names = ", ".join(snapshots[index].name for index in voting)
        raise NodeRejectedError(
            f"nothing to recover: a quorum votes ({names}); the others come back by themselves, or "
            "`redfence cluster status` says why not"
        )
    if _was_never_formed(snapshots, judged):
        raise NodeRejectedError(
            f"nothing to recover: cluster {judged.cluster_id} was never formed to the end; "
            "run `redfence cluster init` again"
        )
    return Recovery(
        cluster_id=judged.cluster_id or new_cluster_id,
        is_new=not judged.cluster_id,
        ttl_ms_max=_ttl_ms_max(judged, request),
        floor=floor_of(
            request.floor, known=greatest_number(snapshots), begun=_floor_begun(snapshots), wall_us=wall_us
        ),
        nodes=tuple(snapshot.index for snapshot in snapshots if snapshot.found is not None),
        away=tuple(snapshot.index for snapshot in away),
        is_avoidable=len(judged.voting(returning=len(away))) + len(away) >= judged.quorum,
    )


def greatest_number(snapshots: Sequence[NodeSnapshot]) -> int:
    """Return the greatest number that any node shows: a token, minted or learnt, or a floor of any index."""
    numbers = [0]
    for snapshot in snapshots:
        if snapshot.found is not None:
            numbers.append(snapshot.found.max_token or 0)
            if (identity := snapshot.found.identity) is not None:
                numbers += [identity.floor, *identity.known_floors.values()]
    return max(numbers)


def known_floor(node_index: int, snapshots: Sequence[NodeSnapshot]) -> int:
    """Return the least floor that a node needs at an index, as far as any node knows."""
    known = [snapshot.found.identity for snapshot in snapshots if snapshot.found is not None]
    return max((each.known_floors.get(node_index, 0) for each in known if each is not None), default=0)


# These reasons do not matter, because the recovery gives the node a new beginning.
_EXCUSED = frozenset({Reason.NOT_FORMED, Reason.FORMING})


def _refuse_unfit(snapshot: NodeSnapshot, judgement: Judgement | None) -> None:
    """Refuse a node that a recovery must not, or need not, touch."""
    snapshot.refuse_strangers()
    if isinstance(judgement, Rejected) and judgement.reason not in _EXCUSED:
        raise NodeRejectedError(f"{snapshot.name}: {judgement.detail}")


def _was_never_formed(snapshots: Sequence[NodeSnapshot], judged: ClusterJudgement) -> bool:
    """Tell whether no quorum of the cluster can ever have voted."""
    phases = {identity.phase for identity in judged.members.values()}
    if Phase.ASSEMBLED in phases and any(each.found and each.found.identity is None for each in snapshots):
        return False  # the empty node had an identity, and may have voted (operations/forming.py)
    return bool(phases) and phases <= {Phase.FORMING, Phase.ASSEMBLED}


def _ttl_ms_max(judged: ClusterJudgement, request: Request) -> int:
    if not judged.cluster_id:
        if request.ttl_ms_max is None:
            raise ConfigError(
                "max_ttl: no node remembers the cluster's greatest ttl; give it, or more, by --max-ttl"
            )
        return request.ttl_ms_max
    if request.ttl_ms_max not in {None, judged.ttl_ms_max}:
        raise ConfigError(
            f"max_ttl: the cluster was formed with {judged.ttl_ms_max} ms and not with "
            f"{request.ttl_ms_max} ms; leave it out"
        )
    return judged.ttl_ms_max


def _floor_begun(snapshots: Sequence[NodeSnapshot]) -> int:
    """Return the floor that an earlier recovery, which broke off, has reserved; 0 if there was none."""
    found = [snapshot.found.identity for snapshot in snapshots if snapshot.found is not None]
    return max((each.reserved for each in found if each is not None), default=0)


def state_of(judgement: Judgement | None) -> str:
    """Return the word for a judgement in tables."""
    match judgement:
        case None:
            return "unreachable"
        case Admitted():
            return "votes"
        case Restarted():
            return "restarted"
        case Rejected(reason):
            return reason.name.lower()
    return type(judgement).__name__.lower()
