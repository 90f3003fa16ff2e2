"""What it takes to start a cluster again of whose nodes more than a minority have forgotten. Pure; cluster_recovery.py does it.

Nobody is left then who knows every number that was granted: a grant stands on f + 1 nodes, and all of those may be among the f + 1 that
forgot. So the floor comes from outside: from the operator, who can ask the storage for the highest token it has seen, or from the clock.

Why the clock. Numbers grow more slowly than the microseconds since 1970. A number is minted from what a node knows, so the greatest
one grows by one at a time, and each step takes a script on a node, which is some ten microseconds. A rejoin adds 2^20, about as much as a
second; a place has at most one in a quarantine, which lasts longer than the greatest ttl, and no more than f places are out at once. So
unless nodes are lost without a pause in a cluster whose greatest ttl is below f seconds, less was minted since the last recovery, at t0,
than the microseconds from t0 to now; and so t0 + 2^20 + that is less than now + 2^20. A new cluster begins at 0, half a century
behind the clock. It does not hold if the clock is behind where it was at the last recovery, or if a floor was given by hand that is
still ahead of the clock. But what can be read counts as well: for harm to come of it, every node that knows must be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from redfence_proto import bounds
from redfence_server.cluster_judgement import ClusterJudgement
from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.node_admission import Admitted, Judgement, Reason, Rejected
from redfence_server.node_examination import Phase
from redfence_server.node_visit import Look
from redfence_server.rejoin import CHANGES_JUMP, NUMBERS_JUMP

FLOOR_MAX: Final = bounds.FENCING_TOKEN_MAX - 2**20 * NUMBERS_JUMP
"""A greater floor leaves no room for tokens above it: each return of a node takes a jump."""
_WALL_US_MIN: Final = 1_735_689_600_000_000
"""The beginning of 2025. A clock that tells an earlier time was never set, and is behind what a former recovery may have read."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the operator asks for.

    Attributes:
        floor: above which tokens go on; None takes it from the clock.
        ttl_ms_max: of a cluster of which nothing is left; None if not told.
        assume_durable: the operator's word that a node which restarted has forgotten nothing, as the servers have it.
    """

    floor: int | None
    ttl_ms_max: int | None
    assume_durable: bool = False


@dataclass(frozen=True, slots=True)
class Recovery:
    """All nodes that could be looked at are to be taken out, and after a quarantine to be given the floor.

    Attributes:
        cluster_id: the old one, or a new one if no node remembers it.
        is_new: it is a new one.
        floor: every number starts above it.
        changes: what each node begins with.
        nodes: those that could be looked at.
        away: those that could not.
        is_avoidable: with those that are away, if they come back and have forgotten nothing, a quorum would vote without this.
    """

    cluster_id: str
    is_new: bool
    ttl_ms_max: int
    floor: int
    changes: int
    nodes: tuple[int, ...]
    away: tuple[int, ...]
    is_avoidable: bool


@dataclass(frozen=True, slots=True)
class Leftover:
    """A quorum votes already; these nodes are still out because a recovery broke off, and are to rejoin.

    Attributes:
        nodes: those.
    """

    cluster_id: str
    ttl_ms_max: int
    nodes: tuple[int, ...]


def plan(
    looks: Sequence[Look], request: Request, *, wall_us: int, new_cluster_id: str
) -> Recovery | Leftover:
    """Decide what recovering these nodes takes, from what they say of themselves.

    Args:
        looks: one for each place, by index.
        request: what is asked for.
        wall_us: the microseconds since 1970.
        new_cluster_id: to be taken if no node remembers one.

    Raises:
        NodeRejectedError: a node is in the way, too few can be reached, or there is nothing to recover; the message names the nodes.
        ConfigError: the floor is too low or too high, or the greatest ttl is missing or another.
    """
    judged = ClusterJudgement(looks, assume_durable=request.assume_durable, familiar=True)
    for look in looks:
        _refuse_unfit(look, judged.judge(look))
    away = [look for look in looks if look.found is None]
    if len(looks) - len(away) < judged.quorum:
        told = "; ".join(f"{look.name}: {look.problem}" for look in away)
        raise NodeRejectedError(f"fewer than a quorum of {judged.quorum} nodes can be reached: {told}")
    voting = judged.voting()
    if len(voting) >= judged.quorum:
        return _leftover(looks, judged, voting)
    if _was_never_formed(looks, judged):
        raise NodeRejectedError(
            f"nothing to recover: cluster {judged.cluster_id} was never formed to the end; run `redfence cluster init` again"
        )
    return Recovery(
        cluster_id=judged.cluster_id or new_cluster_id,
        is_new=not judged.cluster_id,
        ttl_ms_max=_ttl_ms_max(judged, request),
        floor=_floor(request.floor, known=greatest_number(looks), wall_us=wall_us),
        # The clock here as well, for a server that runs may remember more changes than any node does. Nothing but its patience
        # hangs on it: it would quarantine a node that shows fewer once more.
        changes=max(_greatest_changes(looks) + CHANGES_JUMP, wall_us),
        nodes=tuple(look.index for look in looks if look.found is not None),
        away=tuple(look.index for look in away),
        is_avoidable=len(voting) + len(away) >= judged.quorum,
    )


def greatest_number(looks: Sequence[Look]) -> int:
    """Return the greatest number that can still be read from any node: minted, learnt, or a floor of any place."""
    numbers = [0]
    for look in looks:
        if look.found is not None:
            numbers.append(look.found.high or 0)
            if (identity := look.found.identity) is not None:
                numbers += [identity.floor, *identity.known_floors.values()]
    return max(numbers)


def known_floor(place: int, looks: Sequence[Look]) -> int:
    """Return the least floor that a node needs at a place, as far as any other node knows."""
    known = [look.known for look in looks if look.known is not None]
    return max((identity.known_floors.get(place, 0) for identity in known), default=0)


def _greatest_changes(looks: Sequence[Look]) -> int:
    changes = [0]
    for look in looks:
        if look.found is not None and (identity := look.found.identity) is not None:
            changes += [identity.changes, *identity.known_changes.values()]
    return max(changes)


# What a node is excused that is to be given a new beginning.
_EXCUSED = frozenset({Reason.NOT_FORMED, Reason.FORMING, Reason.RECOVERING})


def _refuse_unfit(look: Look, judgement: Judgement | None) -> None:
    """Refuse a node that a recovery must not, or need not, touch."""
    look.refuse_strangers()
    if isinstance(judgement, Rejected) and judgement.reason not in _EXCUSED:
        raise NodeRejectedError(f"{look.name}: {judgement.detail}")


def _was_never_formed(looks: Sequence[Look], judged: ClusterJudgement) -> bool:
    """Tell whether no quorum of the cluster can ever have voted."""
    phases = {identity.phase for identity in judged.members.values()}
    if Phase.ASSEMBLED in phases and any(look.found and look.found.identity is None for look in looks):
        return False  # who is empty had its place, and may have voted there (cluster_forming.py)
    return bool(phases) and phases <= {Phase.FORMING, Phase.ASSEMBLED}


def _leftover(looks: Sequence[Look], judged: ClusterJudgement, voting: Sequence[int]) -> Leftover:
    nodes = tuple(index for index, identity in judged.members.items() if identity.phase is Phase.RECOVERING)
    if not nodes:
        names = ", ".join(looks[index].name for index in voting)
        raise NodeRejectedError(
            f"nothing to recover: a quorum votes ({names}); the others come back by themselves, or `redfence cluster status` "
            "says what is in their way"
        )
    return Leftover(judged.cluster_id, judged.ttl_ms_max, nodes)


def _ttl_ms_max(judged: ClusterJudgement, request: Request) -> int:
    if not judged.cluster_id:
        if request.ttl_ms_max is None:
            raise ConfigError(
                "max_ttl: no node remembers the cluster's greatest ttl; give it with --max-ttl, and no less than it was"
            )
        return request.ttl_ms_max
    if request.ttl_ms_max not in {None, judged.ttl_ms_max}:
        raise ConfigError(
            f"max_ttl: the cluster was formed with {judged.ttl_ms_max} ms and not with {request.ttl_ms_max} ms; leave it out"
        )
    return judged.ttl_ms_max


def _floor(asked: int | None, *, known: int, wall_us: int) -> int:
    if asked is None:
        if wall_us < _WALL_US_MIN:
            raise ConfigError(
                "floor: this machine's clock was never set, so it is no measure; set it, or give a number"
            )
        asked = max(known, wall_us) + NUMBERS_JUMP
    if asked <= known:
        raise ConfigError(
            f"floor: {asked} is not above {known}, the greatest number that can still be read; give {known + 1} at the least, and more "
            "than the highest token that any storage has seen"
        )
    if asked > FLOOR_MAX:
        raise ConfigError(f"floor: {asked} leaves too few of the numbers below 2^53; {FLOOR_MAX} is the most")
    return asked


def state_of(judgement: Judgement | None) -> str:
    """Return a word for what comes of a node."""
    match judgement:
        case None:
            return "unreachable"
        case Admitted():
            return "votes"
        case Rejected(reason):
            return reason.name.lower()
    return type(judgement).__name__.lower()
