"""Choose the peers that a fence may read and that must take its floor. Pure.

fence.py says what a trusted peer is, and why a peer without a vote may have to take the floor as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from redfence_server.membership import fence
from redfence_server.membership.admin import AdminConnection, NodeSnapshot
from redfence_server.membership.admission import Admitted, Expectation, Restarted, judge
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.examination import Identity, Phase

_WITHOUT_VOTE: Final = frozenset({Phase.QUARANTINED, Phase.RESTARTED})


class Peers(NamedTuple):
    """The peers for a fence.

    Attributes:
        trusted: peers that vote or, for a process with proof, restarted with proof.
        out: the other peers except empty ones, if all of them were examined and have no vote; otherwise None.
        process_is_superseded: another process had a fence at the index since this one voted.
    """

    trusted: Sequence[AdminConnection]
    out: Sequence[AdminConnection] | None
    process_is_superseded: bool


def choose_peers(
    process: AdminConnection,
    peers: Sequence[AdminConnection],
    *,
    memory: ClusterMemory,
    assume_durable: bool,
    accept_empty: bool,
) -> Peers:
    """Return the peers for a fence, and record in `memory` what the nodes of the cluster know of each other.

    Args:
        process: without a vote, examined just now.
        peers: the nodes at all other indices, examined just now.
        memory: of this server.
        assume_durable: the operator asserts that a restarted node forgets nothing.
        accept_empty: this server runs the nodes itself, so no other process has the index of an empty node.
    """
    own = process.identity
    trusted = [each for each in peers if _is_trusted(each.snapshot, own, memory, durable=assume_durable)]
    if not trusted:
        return Peers((), None, process_is_superseded=False)
    members = [process, *(peer for peer in peers if _is_member(peer.snapshot, process.identity))]
    known = [member.identity for member in members]
    for identity in known:
        memory.learn(identity)
    # One of them may know that another was superseded.
    newest = [member for member in members if _is_newest(member.identity, known, memory)]
    trusted = [peer for peer in trusted if peer in newest]
    others = [peer for peer in peers if peer not in trusted]
    are_out = all(
        peer.identity.phase in _WITHOUT_VOTE if peer in newest else accept_empty and _is_empty(peer.snapshot)
        for peer in others
    )
    out = [peer for peer in others if not _is_empty(peer.snapshot)] if are_out else None
    return Peers(trusted, out, fence.is_superseded(process.identity, known))


def _is_trusted(peer: NodeSnapshot, process: Identity, memory: ClusterMemory, *, durable: bool) -> bool:
    """Tell whether a peer votes, or both it and the process restarted with proof."""
    if peer.found is None:
        return False
    expected = Expectation(
        index=peer.index,
        node_count=process.node_count,
        cluster_id=process.cluster_id,
        assume_durable=durable,
        floor=memory.nodes[peer.index].floor,
    )
    match judge(expected, peer.found):
        case Admitted():
            return True
        case Restarted(noted=True):
            return process.phase is Phase.RESTARTED
    return False


def _is_member(snapshot: NodeSnapshot, process: Identity) -> bool:
    """Tell whether a peer belongs to the cluster of this process, at its own index."""
    identity = snapshot.found.identity if snapshot.found is not None else None
    return identity is not None and (identity.cluster_id, identity.node_count, identity.index) == (
        process.cluster_id,
        process.node_count,
        snapshot.index,
    )


def _is_newest(identity: Identity, known: Sequence[Identity], memory: ClusterMemory) -> bool:
    """Tell whether this process is the last one at its index, as far as the other members know."""
    if identity.phase is Phase.RESTARTED and fence.is_superseded(identity, known):
        return False
    return identity.floor >= memory.nodes[identity.index].floor


def _is_empty(snapshot: NodeSnapshot) -> bool:
    return snapshot.found is not None and snapshot.found.identity is None and not snapshot.found.key_count
