"""Form a cluster: give every node of a new quorum its identity, once.

There are three passes: every node becomes `forming`, then every node `assembled`, then every node `ready`. So
a crash between the passes differs from nodes that were wiped later. An empty node beside one that is past
`forming` has lost its memory. It must not get a fresh identity: it would vote as if it had forgotten nothing.
If all others are `forming`, no node has ever voted. (With two passes, a quorum could be ready, grant and be
wiped while the rest still forms.) If all nodes are empty, the two cases look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.membership.admin import (
    AdminConnection,
    AdminSettings,
    NodeAssignment,
    NodeSnapshot,
    connect_all,
)
from redfence_server.membership.admission import Rejected
from redfence_server.membership.cluster_judgement import ClusterJudgement
from redfence_server.membership.examination import Identity, Phase
from redfence_server.randomness import Randomness
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import NodeUrl


@dataclass(frozen=True, slots=True)
class Plan:
    """The nodes to write to, in three passes up to `ready`: `to_form` is empty if the cluster is formed."""

    cluster_id: str
    to_form: tuple[int, ...]


def plan(
    snapshots: Sequence[NodeSnapshot],
    *,
    new_cluster_id: str,
    ttl_ms_max: int,
    leaves_wiped: bool = False,
    least_token: int = 0,
) -> Plan:
    """Return the nodes to form, from one snapshot for each index.

    With `leaves_wiped`, an empty node beside formed ones stays as it is: the server will adopt it
    (NodeJoining). A node that is formed already must show `least_token` or more.

    Raises:
        NodeRejectedError: these nodes cannot form one cluster; the message names the node.
        ConfigError: the cluster exists with another greatest ttl, or with smaller tokens.
    """
    shown = [snapshot.found for snapshot in snapshots]
    judged = ClusterJudgement(shown, assume_durable=False, previously_admitted=False)
    identities = [_identity_of_fit(snapshot, judged) for snapshot in snapshots]
    begun = all(each is None or each.phase is Phase.FORMING for each in identities)
    for snapshot, identity in zip(snapshots, identities, strict=True):
        if identity is None and not begun and not leaves_wiped:
            raise NodeRejectedError(
                f"{snapshot.name}: it is empty, but others belong to cluster {judged.cluster_id} already: "
                "it was wiped or replaced, and must not vote as if it remembered; bring it in by "
                f"`redfence cluster replace {snapshot.index} URL`, or by `redfence cluster recover` "
                "if fewer than a quorum of the others votes"
            )
        if identity is not None and identity.max_ttl_ms != ttl_ms_max:
            raise ConfigError(
                f"max_ttl: {snapshot.name} was formed with {identity.max_ttl_ms} ms and not with "
                f"{ttl_ms_max} ms"
            )
    # A quarantined node was formed; so was an empty one, unless forming has only begun.
    unformed = [begun if each is None else each.phase in _UNFORMED for each in identities]
    for snapshot, is_unformed in zip(snapshots, unformed, strict=True):
        if not is_unformed:
            _refuse_smaller(snapshot, least_token)
    return Plan(
        judged.cluster_id or new_cluster_id, tuple(index for index, each in enumerate(unformed) if each)
    )


def _refuse_smaller(snapshot: NodeSnapshot, least_token: int) -> None:
    """Refuse a formed node whose greatest token is below the least: its cluster began without that floor."""
    token = snapshot.found.max_token if snapshot.found is not None else None
    if token is not None and token < least_token:
        raise ConfigError(
            f"floor: {snapshot.name} was formed before, and its greatest token is {token}, below "
            f"{least_token}; leave the floor out, or form empty nodes"
        )


_UNFORMED = frozenset({Phase.FORMING, Phase.ASSEMBLED})


def _identity_of_fit(snapshot: NodeSnapshot, judged: ClusterJudgement) -> Identity | None:
    """Return the identity of a node, None if it is empty; refuse a node that is not fit to be formed."""
    if snapshot.found is None:
        raise NodeRejectedError(f"{snapshot.name}: {snapshot.problem}")
    match judged.judge(snapshot.index, snapshot.found):
        case Rejected(reason, detail) if reason.misconfigured:
            raise NodeRejectedError(f"{snapshot.name}: {detail}")
    identity = snapshot.found.identity
    if identity is not None and identity.phase is Phase.RETIRED:
        raise NodeRejectedError(
            f"{snapshot.name}: it left cluster {identity.predecessor} for cluster {identity.cluster_id}: "
            "if that resize broke off, repeat `redfence cluster resize`"
        )
    snapshot.refuse_strangers()
    return snapshot.found.identity


async def form(
    nodes: Sequence[NodeUrl],
    *,
    keys: scripts.Keyspace,
    ttl_ms_max: int,
    randomness: Randomness,
    dial_timeout_ms: int = 2_000,
    leaves_wiped: bool = False,
    floor: int = 0,
    least_token: int | None = None,
) -> str:
    """Form the nodes into one cluster and return its id; harmless to repeat, also after a crash midway.

    The order of the nodes sets their indices. Tokens begin above `floor`. For `leaves_wiped` and
    `least_token` see `plan`; a cluster that is formed already needs the floor itself unless told otherwise.

    Cancellation: as a crash midway.

    Raises:
        NodeRejectedError: a node cannot be reached, is not fit or not empty, or belongs to something else.
        ConfigError: the cluster exists with another greatest ttl, or with smaller tokens.
    """
    async with connect_all(nodes, AdminSettings(keys, dial_timeout_ms)) as members:
        snapshots = [each.snapshot for each in members]
        decided = plan(
            snapshots,
            new_cluster_id=randomness.hex_id(),
            ttl_ms_max=ttl_ms_max,
            leaves_wiped=leaves_wiped,
            least_token=floor if least_token is None else least_token,
        )
        for snapshot in snapshots:
            _warn(snapshot, ttl_ms_max=ttl_ms_max, node_count=len(nodes))
        for state in (Phase.FORMING, Phase.ASSEMBLED, Phase.READY):
            for index in decided.to_form:
                assigned = NodeAssignment(decided.cluster_id, index, len(nodes), ttl_ms_max)
                await _form(members[index], assigned, state, randomness, floor=floor)
    return decided.cluster_id


async def _form(
    node: AdminConnection, assigned: NodeAssignment, state: Phase, randomness: Randomness, *, floor: int
) -> None:
    found = node.snapshot.found
    assert found is not None, "a plan has only examined nodes"
    answer = await node.step(
        "form",
        *(assigned.cluster_id, assigned.index, assigned.node_count, assigned.ttl_ms_max),
        *(randomness.hex_id(), found.run_id, state.value),
        *("0" if found.durability_gap else "1", found.evicted, floor),
    )
    if answer == "not_empty":
        raise NodeRejectedError(
            f"{node.snapshot.name}: it holds keys already; a cluster is formed on empty nodes"
        )
    # A second operator, or the run that this one finishes, brought on a node that is ahead. If two operators
    # found the same empty nodes, a node of the other cluster must stop the later operator before it takes any
    # more.
    if answer == "other" or (answer == "ahead" and state is Phase.READY):
        raise NodeRejectedError(
            f"{node.snapshot.name}: somebody else changed its identity; run the command again"
        )


def _warn(snapshot: NodeSnapshot, *, ttl_ms_max: int, node_count: int) -> None:
    """Warn of a node that is not durable, before its first restart shows it, and of a quarantined node."""
    assert snapshot.found is not None, "a plan has only examined nodes"
    log = structlog.get_logger().bind(node_index=snapshot.index, node_address=snapshot.address)
    if snapshot.found.durability_gap:
        consequence = (
            f"after a restart it is quarantined for {ttl_ms_max / 1000:g} s, the greatest ttl"
            if node_count > 1
            else "after a restart it votes only after `redfence cluster recover`, because it has no peers"
        )
        log.warning("node_not_durable", gap=snapshot.found.durability_gap, consequence=consequence)
    identity = snapshot.found.identity
    if identity is not None and identity.phase is Phase.QUARANTINED:
        log.warning(
            "node_not_ready",
            state=identity.phase.value,
            consequence="it comes back by itself when the others vote",
        )
