"""Prepare a node to take a place in a cluster, and end the vote of the one that has it.

The new node gets the identity of its place, in quarantine; the servers that are told its URL bring it in by a rejoin (rejoin.py). That is
what keeps tokens apart whatever is done here, or left undone: by the time that the new node votes, every server that talks to one of the
nodes which vouched for it knows its floor, and counts nothing of lesser floor at its place, be it alive or not.

The others vouch first, as in a rejoin. From then on nothing that was at the place before can count anywhere, also where it cannot be
reached from here, or is wiped and comes back under its old URL. And the quarantine of the new one begins only then, so by its end the leases that the old
one voted for have ended as well. To retire the old node makes that plain to servers that still have it in their list.

Should it break off in between, the place is empty, and repeating it finishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from enum import Enum, auto

from redfence_server.cluster_judgement import ClusterJudgement
from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.node_admission import Admitted, Forgot, Judgement, Quarantined, Reason, Rejected
from redfence_server.node_examination import Phase
from redfence_server.node_visit import Look, Seat, Visit, Visiting, visit, visits
from redfence_server.randomness import Randomness
from redfence_server.redis_dial import NodeUrl
from redfence_server.rejoin import CHANGES_JUMP, NUMBERS_JUMP


class Newcomer(Enum):
    """What the new node is now."""

    TO_PREPARE = auto()
    """Empty, or of an earlier time: it gets its identity, in quarantine."""
    PREPARED = auto()
    """It is in quarantine at its place."""
    VOTES = auto()
    """It has the place."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the replacement takes.

    Attributes:
        seat: the place.
        newcomer: what the new node is.
        retires: the old node answers and is to be told that it is replaced.
        ends_vote: it votes now.
        spare: how many of the other nodes may be lost before the new one votes.
        vouchers: the other nodes that vote, by index.
    """

    seat: Seat
    newcomer: Newcomer
    retires: bool
    ends_vote: bool
    spare: int
    vouchers: tuple[int, ...]


def plan(looks: Sequence[Look], new: Look, *, assume_durable: bool) -> Plan:
    """Decide what it takes to give the new node its place.

    Args:
        looks: one for each place, by index, as the servers have them; at the new node's place the old one, or the new one itself.
        new: the new node.
        assume_durable: as the servers have it.

    Raises:
        NodeRejectedError: the new node cannot take the place, or too few of the others vote. The message names the nodes.
    """
    new.refuse_strangers()
    place = new.index
    others = [look for look in looks if look.index != place]
    # What the old node knows does not count: it may be any that was ever at this place.
    unknown = replace(looks[place], found=None, known=None)
    nodes = [*others[:place], unknown, *others[place:]]
    judged = ClusterJudgement(nodes, assume_durable=assume_durable, familiar=True)
    judgements = [(look, judged.judge(look)) for look in others]
    for look, judgement in judgements:
        if isinstance(judgement, Rejected) and judgement.reason in _WRONG_LIST:
            raise NodeRejectedError(f"{look.name}: {judgement.detail}")
    vouchers = tuple(look.index for look, judgement in judgements if isinstance(judgement, Admitted))
    if len(vouchers) < judged.quorum:
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
    old_votes = old is not None and isinstance(judged.judge(old), Admitted)
    return Plan(
        seat=Seat(judged.cluster_id, place, len(looks), judged.ttl_ms_max),
        newcomer=_newcomer(new, judged.judge(new), old_votes=old_votes),
        retires=old is not None and _is_retirable(old, judged),
        ends_vote=old_votes,
        spare=len(vouchers) - judged.quorum,
        vouchers=vouchers,
    )


# What shows that the list of nodes is not that of a cluster.
_WRONG_LIST = frozenset({Reason.OTHER_CLUSTER, Reason.WRONG_PLACE, Reason.SAME_PROCESS})


def _newcomer(new: Look, judgement: Judgement | None, *, old_votes: bool) -> Newcomer:
    match judgement:
        case Admitted(restarted=False) if not old_votes:
            return Newcomer.VOTES
        # It shows the identity of the place, but nobody has let it in since it was started, or the old node shows the same:
        # it may be a copy.
        case Admitted() | Forgot() | Rejected(Reason.REPLACED | Reason.FORMING):
            return Newcomer.TO_PREPARE
        case Quarantined():
            return Newcomer.PREPARED
    raise NodeRejectedError(f"the new {new.name}: {_why_not(new, judgement)}")


def _is_same(old: Look, new: Look) -> bool:
    one_process = old.found is not None and new.found is not None and old.found.run_id == new.found.run_id
    return one_process or old.address == new.address


def _is_retirable(old: Look, judged: ClusterJudgement) -> bool:
    identity = old.found.identity if old.found is not None and not old.found.is_replica else None
    return (
        identity is not None
        and (identity.cluster_id, identity.index) == (judged.cluster_id, old.index)
        and identity.phase is not Phase.RETIRED
    )


def _why_not(look: Look, judgement: Judgement | None) -> str:
    match judgement:
        case Forgot(detail) | Rejected(_, detail):
            return detail
        case Quarantined():
            return "quarantined"
    return look.problem


async def replace_node(
    place: int,
    new: NodeUrl,
    nodes: Sequence[NodeUrl],
    *,
    visiting: Visiting,
    assume_durable: bool,
    randomness: Randomness,
    confirm: Callable[[Plan], bool],
) -> bool:
    """Prepare `new` for a place and retire the node there; return whether it was confirmed. Repeating it is harmless.

    Args:
        place: of the node to replace, from 0.
        new: the node that takes its place; it may be the one that is there, wiped.
        nodes: as the servers have them.
        visiting: how to reach them.
        assume_durable: as the servers have it.
        randomness: for ids.
        confirm: told what is to be done, before anything is; whether to do it.

    Cancellation: the new node is prepared or not, and the old one retired or not; repeat it.

    Raises:
        NodeRejectedError: a node is in the way, or was changed by somebody else.
        ConfigError: there is no such place, or the new node is another one of the cluster.
    """
    if not 0 <= place < len(nodes):
        raise ConfigError(f"node: there is no node {place}; they are 0 to {len(nodes) - 1}")
    for index, each in enumerate(nodes):
        if each.address == new.address and index != place:
            raise ConfigError(f"node: {new.address} is node {index} of the cluster")
    async with visits(nodes, visiting) as visited, AsyncExitStack() as stack:
        is_there = nodes[place].address == new.address
        newcomer = visited[place] if is_there else await visit(place, new, stack, visiting)
        planned = plan([each.look for each in visited], newcomer.look, assume_durable=assume_durable)
        if not confirm(planned):
            return False
        await _carry_out(planned, newcomer, visited, randomness)
        return True


async def _carry_out(
    planned: Plan, newcomer: Visit, visited: Sequence[Visit], randomness: Randomness
) -> None:
    if planned.newcomer is Newcomer.TO_PREPARE:
        floor = await _vouch(planned, [visited[index] for index in planned.vouchers], randomness)
        await newcomer.take_vote(
            planned.seat, phase=Phase.QUARANTINED, quarantine=randomness.hex_id(), floor=floor
        )
    if planned.retires:
        old = visited[planned.seat.index]
        await old.take_vote(planned.seat, phase=Phase.RETIRED, quarantine=randomness.hex_id())


async def _vouch(planned: Plan, others: Sequence[Visit], randomness: Randomness) -> int:
    """Have the others void what is at the place now, by the floor that is returned: steps 1 and 3 of a rejoin."""
    place = planned.seat.index
    found = [other.look.found for other in others]
    identities = [each.identity for each in found if each is not None and each.identity is not None]
    assert len(identities) == len(others), "who votes was looked at and has an identity"
    floor = max((each.high or 0) for each in found if each is not None) + NUMBERS_JUMP
    changes = max(identity.known_changes.get(place, 0) for identity in identities) + CHANGES_JUMP
    for other, identity in zip(others, identities, strict=True):
        told = (identity.admission, randomness.hex_id(), place, floor, changes)
        if await other.step("vouch", *told) != "vouched":
            raise NodeRejectedError(
                f"{other.look.name}: it was changed by somebody else meanwhile, a server or another operator; look, and repeat"
            )
    return floor
