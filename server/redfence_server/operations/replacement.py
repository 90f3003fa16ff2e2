"""Prepare a process to take a node index in a cluster, and so end the vote of the process that has it.

The new process gets the identity of its index, in quarantine, and the command raises the fence for it
(membership/fence.py). From then on no server counts the process that was at the index before, even if it is
out of reach, or wiped under its old URL. Lock servers with the new URL wait, and give the new one its vote.

If the command breaks off, repeating it finishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum, auto

from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.membership.admin import (
    AdminConnection,
    AdminSettings,
    NodeAssignment,
    NodeSnapshot,
    connect,
    connect_all,
)
from redfence_server.membership.admission import (
    Admitted,
    Forgot,
    Judgement,
    Quarantined,
    Reason,
    Rejected,
    Restarted,
)
from redfence_server.membership.cluster_judgement import ClusterJudgement
from redfence_server.membership.examination import Phase
from redfence_server.membership.fence import FenceError, raise_fence
from redfence_server.randomness import Randomness
from redfence_server.redis_io.dial import NodeUrl


class Newcomer(Enum):
    """The state of the new node."""

    TO_PREPARE = auto()
    """Empty, or of an earlier time: it gets its identity, in quarantine."""
    PREPARED = auto()
    """It is in quarantine at its index."""
    VOTES = auto()
    """It votes at its index."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a replacement.

    Attributes:
        ends_vote: the old node votes now.
        spare: this many of the other nodes may be lost before the new one votes.
        peers: the other nodes that vote, by index.
    """

    assignment: NodeAssignment
    newcomer: Newcomer
    ends_vote: bool
    spare: int
    peers: tuple[int, ...]


def plan(snapshots: Sequence[NodeSnapshot], new: NodeSnapshot, *, assume_durable: bool) -> Plan:
    """Return the plan that gives the new node its index.

    `snapshots` has one snapshot for each index, in the servers' order. The one at the new node's index
    shows the old node or the new one.

    Raises:
        NodeRejectedError: the new node cannot take the index, another node does not belong in the list,
            or fewer than a quorum of other nodes vote. The message names the nodes.
    """
    new.refuse_strangers()
    node_index = new.index
    others = [snapshot for snapshot in snapshots if snapshot.index != node_index]
    # Ignore the old node's knowledge: it may be any node that was ever at this index.
    shown = [snapshot.found if snapshot.index != node_index else None for snapshot in snapshots]
    judged = ClusterJudgement(shown, assume_durable=assume_durable, previously_admitted=True)
    judgements = [(snapshot, judged.judge(snapshot.index, snapshot.found)) for snapshot in others]
    for snapshot, judgement in judgements:
        if isinstance(judgement, Rejected) and judgement.reason in _WRONG_LIST:
            raise NodeRejectedError(f"{snapshot.name}: {judgement.detail}")
    peers = tuple(snapshot.index for snapshot, judgement in judgements if isinstance(judgement, Admitted))
    if len(peers) < judged.quorum:
        problems = "; ".join(
            f"{snapshot.name}: {_why_not(snapshot, judgement)}"
            for snapshot, judgement in judgements
            if not isinstance(judgement, Admitted)
        )
        raise NodeRejectedError(
            f"fewer than a quorum of {judged.quorum} other nodes votes, and only they can bring a node in "
            f"({problems or 'there are no others'}); if they have forgotten, run `redfence cluster recover`"
        )
    old = None if _is_same(snapshots[node_index], new) else snapshots[node_index]
    old_votes = old is not None and isinstance(judged.judge(node_index, old.found), Admitted)
    return Plan(
        assignment=NodeAssignment(judged.cluster_id, node_index, len(snapshots), judged.ttl_ms_max),
        newcomer=_newcomer(new, judged.judge(node_index, new.found), old_votes=old_votes),
        ends_vote=old_votes,
        spare=len(peers) - judged.quorum,
        peers=peers,
    )


# The list of nodes is not that of one cluster.
_WRONG_LIST = frozenset({Reason.OTHER_CLUSTER, Reason.RESIZED, Reason.WRONG_PLACE, Reason.SAME_PROCESS})


def _newcomer(new: NodeSnapshot, judgement: Judgement | None, *, old_votes: bool) -> Newcomer:
    match judgement:
        case Admitted() if not old_votes:
            return Newcomer.VOTES
        # It shows the identity of the index, but may be a copy: no server has admitted it since its start, or
        # the old node shows the same identity.
        case Admitted() | Restarted() | Forgot() | Rejected(Reason.REPLACED | Reason.FORMING):
            return Newcomer.TO_PREPARE
        case Quarantined():
            return Newcomer.PREPARED
    raise NodeRejectedError(f"the new {new.name}: {_why_not(new, judgement)}")


def _is_same(old: NodeSnapshot, new: NodeSnapshot) -> bool:
    one_process = old.found is not None and new.found is not None and old.found.run_id == new.found.run_id
    return one_process or old.address == new.address


def _why_not(snapshot: NodeSnapshot, judgement: Judgement | None) -> str:
    match judgement:
        case Forgot(detail) | Rejected(_, detail):
            return detail
        case Quarantined():
            return "quarantined"
        case Restarted():
            return "it restarted, and a lock server has not given it its vote yet"
    return snapshot.problem


async def replace_node(
    node_index: int,
    new: NodeUrl,
    nodes: Sequence[NodeUrl],
    *,
    admin: AdminSettings,
    assume_durable: bool,
    randomness: Randomness,
    confirm: Callable[[Plan], None],
) -> Plan:
    """Prepare `new` for an index, end the vote of the node there, and return the plan of it.

    `nodes` are those of the servers; `new` may be the one at that index, wiped. Repeating it is harmless. If
    `confirm` raises at the plan, nothing was changed.

    Cancellation: the new node may or may not be prepared; repeat it.

    Raises:
        NodeRejectedError: a node is unfit, or a server or another operator changed it.
        ConfigError: the new node is another one of the cluster.
    """
    for index, each in enumerate(nodes):
        if each.address == new.address and index != node_index:
            raise ConfigError(f"node: {new.address} is node {index} of the cluster")
    async with connect_all(nodes, admin) as members, AsyncExitStack() as stack:
        is_there = nodes[node_index].address == new.address
        newcomer = members[node_index] if is_there else await connect(node_index, new, stack, admin)
        snapshots = [each.snapshot for each in members]
        planned = plan(snapshots, newcomer.snapshot, assume_durable=assume_durable)
        confirm(planned)
        await _carry_out(planned, newcomer, members, randomness)
        return planned


async def _carry_out(
    planned: Plan, newcomer: AdminConnection, members: Sequence[AdminConnection], randomness: Randomness
) -> None:
    node_index, old = planned.assignment.index, members[planned.assignment.index]
    peers = [members[index] for index in planned.peers]
    if planned.newcomer is Newcomer.TO_PREPARE:
        known = max((peer.identity.known_floors.get(node_index, 0) for peer in peers), default=0)
        await newcomer.take_vote(
            planned.assignment, phase=Phase.QUARANTINED, quarantine=randomness.hex_id(), floor=known
        )
        await newcomer.refresh()
        if newcomer.snapshot.found is None:
            raise NodeRejectedError(f"{newcomer.snapshot.name}: {newcomer.snapshot.problem}")
    if planned.newcomer is not Newcomer.VOTES:
        token_seen = old.snapshot.found.max_token or 0 if old.snapshot.found is not None else 0
        try:
            await raise_fence(newcomer, peers, token_seen=token_seen, randomness=randomness)
        except FenceError as error:
            raise NodeRejectedError(f"{newcomer.snapshot.name}: {error}; run the command again") from error
