"""Prepare a process to take a node index in a cluster, and so end the vote of the process that has it.

The new process gets the identity of its index, in quarantine, and the fence is raised for it (membership/fence.py). From then on the
process that was at the index before counts nowhere, also if it cannot be reached from here, or is wiped and comes back under
its old URL. The lock servers that are told the new URL find the fence complete, wait, and give the new process the vote.

If the command breaks off, repeating it finishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum, auto

from redfence_server.errors import ConfigError, NodeRejectedError
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
from redfence_server.membership.visit import (
    AdminConnection,
    AdminSettings,
    NodeAssignment,
    NodeSnapshot,
    visit,
    visits,
)
from redfence_server.randomness import Randomness
from redfence_server.redis_io.dial import NodeUrl


class Newcomer(Enum):
    """What the new node is now."""

    TO_PREPARE = auto()
    """Empty, or of an earlier time: it gets its identity, in quarantine."""
    PREPARED = auto()
    """It is in quarantine at its index."""
    VOTES = auto()
    """It votes at its index."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the replacement takes.

    Attributes:
        ends_vote: the old node votes now.
        spare: how many of the other nodes may be lost before the new one votes.
        peers: the other nodes that vote, by index.
    """

    seat: NodeAssignment
    newcomer: Newcomer
    ends_vote: bool
    spare: int
    peers: tuple[int, ...]


def plan(looks: Sequence[NodeSnapshot], new: NodeSnapshot, *, assume_durable: bool) -> Plan:
    """Decide what it takes to give the new node its index.

    There is one look for each index, as the servers have the nodes: at the new node's index the old node, or the new one.

    Raises:
        NodeRejectedError: the new node cannot take the index, or too few of the others vote. The message names the nodes.
    """
    new.refuse_strangers()
    place = new.index
    others = [look for look in looks if look.index != place]
    # What the old node knows does not count: it may be any node that was ever at this index.
    shown = [look.found if look.index != place else None for look in looks]
    judged = ClusterJudgement(shown, assume_durable=assume_durable, previously_admitted=True)
    judgements = [(look, judged.judge(look.index, look.found)) for look in others]
    for look, judgement in judgements:
        if isinstance(judgement, Rejected) and judgement.reason in _WRONG_LIST:
            raise NodeRejectedError(f"{look.name}: {judgement.detail}")
    peers = tuple(look.index for look, judgement in judgements if isinstance(judgement, Admitted))
    if len(peers) < judged.quorum:
        told = "; ".join(
            f"{look.name}: {_why_not(look, judgement)}"
            for look, judgement in judgements
            if not isinstance(judgement, Admitted)
        )
        raise NodeRejectedError(
            f"fewer than a quorum of {judged.quorum} other nodes votes, and they alone can bring a node in ({told or 'there are no others'}); "
            "if they have forgotten, run `redfence cluster recover`"
        )
    old = None if _is_same(looks[place], new) else looks[place]
    old_votes = old is not None and isinstance(judged.judge(place, old.found), Admitted)
    return Plan(
        seat=NodeAssignment(judged.cluster_id, place, len(looks), judged.ttl_ms_max),
        newcomer=_newcomer(new, judged.judge(place, new.found), old_votes=old_votes),
        ends_vote=old_votes,
        spare=len(peers) - judged.quorum,
        peers=peers,
    )


# The list of nodes is not that of one cluster.
_WRONG_LIST = frozenset({Reason.OTHER_CLUSTER, Reason.WRONG_PLACE, Reason.SAME_PROCESS})


def _newcomer(new: NodeSnapshot, judgement: Judgement | None, *, old_votes: bool) -> Newcomer:
    match judgement:
        case Admitted() if not old_votes:
            return Newcomer.VOTES
        # It shows the identity of the index, but no server has admitted it since its start, or the old node shows the same
        # identity: it may be a copy.
        case Admitted() | Restarted() | Forgot() | Rejected(Reason.REPLACED | Reason.FORMING):
            return Newcomer.TO_PREPARE
        case Quarantined():
            return Newcomer.PREPARED
    raise NodeRejectedError(f"the new {new.name}: {_why_not(new, judgement)}")


def _is_same(old: NodeSnapshot, new: NodeSnapshot) -> bool:
    one_process = old.found is not None and new.found is not None and old.found.run_id == new.found.run_id
    return one_process or old.address == new.address


def _why_not(look: NodeSnapshot, judgement: Judgement | None) -> str:
    match judgement:
        case Forgot(detail) | Rejected(_, detail):
            return detail
        case Quarantined():
            return "quarantined"
        case Restarted():
            return "it restarted, and a lock server has not given it its vote yet"
    return look.problem


async def replace_node(
    place: int,
    new: NodeUrl,
    nodes: Sequence[NodeUrl],
    *,
    visiting: AdminSettings,
    assume_durable: bool,
    randomness: Randomness,
    confirm: Callable[[Plan], bool],
) -> Plan | None:
    """Prepare `new` for the index `place` and end the vote of the node there, if `confirm` agrees to the plan.

    `nodes` are those of the servers; `new` may be the one at that index, wiped. Return the plan, or None if it was not confirmed.
    Repeating it is harmless.

    Cancellation: the new node is prepared or not; repeat it.

    Raises:
        NodeRejectedError: a node is in the way, or was changed by a server or another operator.
        ConfigError: the new node is another one of the cluster.
    """
    for index, each in enumerate(nodes):
        if each.address == new.address and index != place:
            raise ConfigError(f"node: {new.address} is node {index} of the cluster")
    async with visits(nodes, visiting) as visited, AsyncExitStack() as stack:
        is_there = nodes[place].address == new.address
        newcomer = visited[place] if is_there else await visit(place, new, stack, visiting)
        planned = plan([each.look for each in visited], newcomer.look, assume_durable=assume_durable)
        if not confirm(planned):
            return None
        await _carry_out(planned, newcomer, visited, randomness)
        return planned


async def _carry_out(
    planned: Plan, newcomer: AdminConnection, visited: Sequence[AdminConnection], randomness: Randomness
) -> None:
    place, old = planned.seat.index, visited[planned.seat.index]
    peers = [visited[index] for index in planned.peers]
    if planned.newcomer is Newcomer.TO_PREPARE:
        known = max((peer.identity.known_floors.get(place, 0) for peer in peers), default=0)
        await newcomer.take_vote(
            planned.seat, phase=Phase.QUARANTINED, quarantine=randomness.hex_id(), floor=known
        )
        await newcomer.look_again()
        if newcomer.look.found is None:
            raise NodeRejectedError(f"{newcomer.look.name}: {newcomer.look.problem}")
    if planned.newcomer is not Newcomer.VOTES:
        token_seen = old.look.found.high or 0 if old.look.found is not None else 0
        try:
            await raise_fence(newcomer, peers, token_seen=token_seen, randomness=randomness)
        except FenceError as error:
            raise NodeRejectedError(f"{newcomer.look.name}: {error}; run the command again") from error
