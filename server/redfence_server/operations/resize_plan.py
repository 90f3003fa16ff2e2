"""Plan to give a cluster another list of nodes: more, fewer or others. Pure.

The cluster ends, and its successor begins above its tokens (operations/resizing.py). The id of the successor
is made from the id of the cluster and the new list. So a repeated command continues the same resize, and a
command with another list cannot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.locking.quorum import majority
from redfence_server.membership.admin import NodeSnapshot
from redfence_server.membership.admission import Admitted, Rejected, Restarted, judge_process
from redfence_server.membership.cluster_judgement import ClusterJudgement
from redfence_server.membership.examination import Identity, Phase

_ID_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Resize:
    """The plan of a resize.

    Attributes:
        cluster_id: of the cluster that ends.
        successor_id: of the cluster that takes its place.
        to_retire: the old nodes that the resize takes out of the cluster, in this order; empty if an earlier
            run of the command has already done so.
        away: the new nodes that could not be examined; there are none unless an earlier run broke off.
        is_done: the successor votes already.
    """

    cluster_id: str
    successor_id: str
    ttl_ms_max: int
    to_retire: tuple[int, ...]
    away: tuple[int, ...]
    is_done: bool


def plan(old: Sequence[NodeSnapshot], new: Sequence[NodeSnapshot], *, assume_durable: bool) -> Resize:
    """Return the plan that leads from the old list of nodes to the new one, from a snapshot for each index.

    Raises:
        ConfigError: the two lists are the same.
        NodeRejectedError: fewer than a quorum of the old nodes votes or has left for this very list, or a new
            node is not fit; the message names the nodes.
    """
    addresses = [snapshot.address for snapshot in new]
    if addresses == [snapshot.address for snapshot in old]:
        raise ConfigError("to: the new list of nodes is the same as the old one")
    left = {each.index: identity for each in old if (identity := _left_for(each, addresses))}
    # A node that left for another list counts for neither.
    staying = [None if each.index in left or _has_left(each, len(old)) else each.found for each in old]
    judged = ClusterJudgement(staying, assume_durable=assume_durable, previously_admitted=True)
    judgements = {i: judged.judge(i, found) for i, found in enumerate(staying)}
    votes = {i for i, judgement in judgements.items() if isinstance(judgement, Admitted)}
    proven = {i for i, judgement in judgements.items() if isinstance(judgement, Restarted)}
    if len(votes | proven | left.keys()) == len(old):
        # One of them may be a copy of older data, which shows proof too. All others cover what it lacks.
        votes |= proven
    cluster_id = next((each.predecessor for each in left.values()), judged.cluster_id)
    if len(votes | left.keys()) < majority(len(old)):
        problems = (
            f"{each.name}: {_why_not(each, judged)}" for each in old if each.index not in votes | left.keys()
        )
        raise NodeRejectedError(
            f"fewer than a quorum of {majority(len(old))} old nodes votes ({'; '.join(problems)}); "
            "bring them back first, if need be by `redfence cluster recover`"
        )
    successor_id = successor(cluster_id, addresses)
    _refuse_unfit(old, new, cluster_id=cluster_id, successor_id=successor_id, is_begun=bool(left))
    has_moved = any(each.phase is not Phase.RETIRED for each in left.values())
    return Resize(
        cluster_id,
        successor_id,
        ttl_ms_max=max(each.max_ttl_ms for each in (*judged.members.values(), *left.values())),
        to_retire=() if has_moved else tuple(sorted(votes | left.keys())),
        away=tuple(each.index for each in new if each.found is None),
        is_done=_has_begun(new, successor_id, assume_durable=assume_durable),
    )


def successor(cluster_id: str, addresses: Sequence[str]) -> str:
    """Return the id of the cluster that takes the place of a cluster, on the nodes at these addresses."""
    return hashlib.sha256("\n".join((cluster_id, *addresses)).encode()).hexdigest()[:_ID_DIGITS]


def _identity(snapshot: NodeSnapshot) -> Identity | None:
    return snapshot.found.identity if snapshot.found is not None else None


def _left_for(snapshot: NodeSnapshot, addresses: Sequence[str]) -> Identity | None:
    """Return the identity of a node that has left its cluster for this list of nodes; otherwise None."""
    identity = _identity(snapshot)
    if identity is None or not identity.predecessor:
        return None
    return identity if identity.cluster_id == successor(identity.predecessor, addresses) else None


def _has_left(snapshot: NodeSnapshot, node_count: int) -> bool:
    """Tell whether a node has left a cluster of so many nodes for some list."""
    identity = _identity(snapshot)
    if identity is None or not identity.predecessor:
        return False
    return identity.phase is Phase.RETIRED or identity.node_count != node_count


def _why_not(snapshot: NodeSnapshot, judged: ClusterJudgement) -> str:
    identity = _identity(snapshot)
    if identity is not None and _has_left(snapshot, judged.node_count):
        return f"it left for another list of nodes, as cluster {identity.cluster_id}"
    judgement = judged.judge(snapshot.index, snapshot.found)
    return snapshot.problem or getattr(judgement, "detail", "") or type(judgement).__name__.lower()


def _refuse_unfit(
    old: Sequence[NodeSnapshot],
    new: Sequence[NodeSnapshot],
    *,
    cluster_id: str,
    successor_id: str,
    is_begun: bool,
) -> None:
    """Refuse a new node that is not empty, not of the cluster, or not fit to be a node."""
    old_ones = {each.found.run_id for each in old if each.found is not None} | {each.address for each in old}
    runs: dict[str, int] = {}
    for snapshot in new:
        if snapshot.found is None:
            if not is_begun:
                raise NodeRejectedError(f"the new {snapshot.name}: {snapshot.problem}")
            continue
        snapshot.refuse_strangers()
        match judge_process(snapshot.found, runs):
            case Rejected(_, detail):
                raise NodeRejectedError(f"the new {snapshot.name}: {detail}")
        runs[snapshot.found.run_id] = snapshot.index
        identity = snapshot.found.identity
        if identity is None:
            continue
        is_old = cluster_id in {identity.cluster_id, identity.predecessor} and not {
            snapshot.found.run_id,
            snapshot.address,
        }.isdisjoint(old_ones)
        is_new = (identity.cluster_id, identity.node_count, identity.index) == (
            *(successor_id, len(new)),
            snapshot.index,
        )
        if not is_old and not is_new:
            raise NodeRejectedError(
                f"the new {snapshot.name}: it belongs to cluster {identity.cluster_id}, and is none of "
                "the old nodes: name it among these as well, or empty it (FLUSHALL)"
            )


def _has_begun(new: Sequence[NodeSnapshot], successor_id: str, *, assume_durable: bool) -> bool:
    """Tell whether the successor votes.

    Raises:
        NodeRejectedError: it has voted, and does not now. Its tokens may be greater than any that its nodes
            show, so a resize must not begin it again.
    """
    members = [
        identity for each in new if (identity := _identity(each)) and identity.cluster_id == successor_id
    ]
    if not any(each.phase in {Phase.READY, Phase.RESTARTED} or each.voted_floor for each in members):
        return False
    shown = [snapshot.found for snapshot in new]
    judged = ClusterJudgement(shown, assume_durable=assume_durable, previously_admitted=True)
    if len(judged.voting()) >= judged.quorum:
        return True
    raise NodeRejectedError(
        f"the resize to cluster {successor_id} came to its end, but no quorum votes; "
        "`redfence cluster recover` with the new list of nodes can start the cluster again"
    )
