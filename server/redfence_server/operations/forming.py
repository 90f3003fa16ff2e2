"""Form a cluster: give every node of a new quorum its identity, once.

There are three passes: every node becomes `forming`; only when all are, `assembled`; and only when all are that, `ready`.
So a crash between the passes can be told from nodes that were wiped later. An empty node beside one that is more than
`forming` has lost its memory, and must not get a fresh identity: it would vote as if it had forgotten nothing. Beside nodes
that are all `forming`, no node has ever voted. (With two passes, a quorum could be ready, grant and be wiped while the rest
is still forming.) If all nodes are empty, the two cases look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.membership import admission
from redfence_server.membership.examination import Findings, Identity, Phase
from redfence_server.membership.visit import AdminConnection, AdminSettings, NodeSnapshot, visits
from redfence_server.randomness import Randomness
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import NodeUrl


@dataclass(frozen=True, slots=True)
class Plan:
    """Write to the nodes `to_form`, in three passes up to `ready`; there are none if the cluster is formed."""

    cluster_id: str
    ttl_ms_max: int
    to_form: tuple[int, ...]


def plan(
    looks: Sequence[NodeSnapshot], *, new_cluster_id: str, ttl_ms_max: int, leaves_wiped: bool = False
) -> Plan:
    """Decide what forming these nodes takes, from what they say of themselves; there is one look for each index.

    With `leaves_wiped`, an empty node beside formed ones stays as it is: the server will adopt it (NodeJoining).

    Raises:
        NodeRejectedError: they cannot be formed into one cluster; the message names the node.
        ConfigError: the cluster exists with another greatest ttl.
    """
    found = _check_fit(looks)
    formed = [each.identity for each in found if each.identity is not None]
    if not formed:
        return Plan(new_cluster_id, ttl_ms_max, tuple(range(len(looks))))
    first = formed[0]
    begun = all(identity.phase is Phase.FORMING for identity in formed)
    for look, each in zip(looks, found, strict=True):
        if each.identity is not None:
            _check_seat(look, each.identity, first, node_count=len(looks))
        elif not begun and not leaves_wiped:
            raise NodeRejectedError(
                f"{look.name}: it is empty, but others belong to cluster {first.cluster_id} already: it was wiped or "
                f"replaced, and must not vote as if it remembered; `redfence cluster replace {look.index} URL` brings it in, or "
                "`redfence cluster recover` if fewer than a quorum of the others votes"
            )
    if first.max_ttl_ms != ttl_ms_max:
        raise ConfigError(
            f"max_ttl: the cluster was formed with {first.max_ttl_ms} ms and not with {ttl_ms_max} ms"
        )
    # A node that was quarantined since was formed; an empty one as well, unless forming has only begun.
    unformed = [begun if each.identity is None else each.identity.phase in _UNFORMED for each in found]
    return Plan(
        first.cluster_id, first.max_ttl_ms, tuple(index for index, each in enumerate(unformed) if each)
    )


_UNFORMED = frozenset({Phase.FORMING, Phase.ASSEMBLED})


def _check_fit(looks: Sequence[NodeSnapshot]) -> Sequence[Findings]:
    """Return what was found, if every node could be looked at and is fit to be one."""
    found: list[Findings] = []
    runs: dict[str, int] = {}
    for look in looks:
        if look.found is None:
            raise NodeRejectedError(f"{look.name}: {look.problem}")
        # Two host names, or two databases, of one server would fail together.
        if (unfit := admission.judge_process(look.found, runs)) is not None:
            raise NodeRejectedError(f"{look.name}: {unfit.detail}")
        if look.found.identity is None and look.found.key_count:
            raise NodeRejectedError(
                f"{look.name}: it holds {look.found.key_count} keys; a cluster is formed on empty nodes"
            )
        runs[look.found.run_id] = look.index
        found.append(look.found)
    return found


def _check_seat(look: NodeSnapshot, identity: Identity, first: Identity, *, node_count: int) -> None:
    if (identity.cluster_id, identity.node_count) != (first.cluster_id, node_count):
        raise NodeRejectedError(
            f"{look.name}: it belongs to cluster {identity.cluster_id} of {identity.node_count} nodes already"
        )
    if identity.index != look.index:
        raise NodeRejectedError(
            f"{look.name}: it was formed as node {identity.index}: the order is another, or it is named twice"
        )
    if identity.max_ttl_ms != first.max_ttl_ms:
        raise NodeRejectedError(
            f"{look.name}: it allows a ttl of {identity.max_ttl_ms} ms, and another node {first.max_ttl_ms} ms"
        )


async def form(
    nodes: Sequence[NodeUrl],
    *,
    keys: scripts.Keyspace,
    ttl_ms_max: int,
    randomness: Randomness,
    dial_timeout_ms: int = 2_000,
    leaves_wiped: bool = False,
) -> str:
    """Form the nodes into one cluster and return its id. Repeating it, also after a crash midway, is harmless.

    The order of the nodes is their index. `leaves_wiped` is that of `plan`.

    Cancellation: as a crash midway.

    Raises:
        NodeRejectedError: a node cannot be reached, is not fit or not empty, or belongs to something else.
        ConfigError: the cluster exists with another greatest ttl.
    """
    async with visits(nodes, AdminSettings(keys, dial_timeout_ms)) as visited:
        looks = [each.look for each in visited]
        decided = plan(
            looks, new_cluster_id=randomness.hex_id(), ttl_ms_max=ttl_ms_max, leaves_wiped=leaves_wiped
        )
        for look in looks:
            _warn(look, decided, node_count=len(nodes))
        for state in (Phase.FORMING, Phase.ASSEMBLED, Phase.READY):
            for index in decided.to_form:
                await _form(visited[index], decided, state, randomness, node_count=len(nodes))
    return decided.cluster_id


async def _form(
    visit: AdminConnection, decided: Plan, state: Phase, randomness: Randomness, *, node_count: int
) -> None:
    found = visit.look.found
    assert found is not None, "a node that could not be looked at is not planned for"
    answer = await visit.step(
        "form",
        *(decided.cluster_id, visit.look.index, node_count, decided.ttl_ms_max),
        *(randomness.hex_id(), found.run_id, state.value),
        *("0" if found.durability_gap else "1", found.evicted),
    )
    if answer == "not_empty":
        raise NodeRejectedError(
            f"{visit.look.name}: it holds keys already; a cluster is formed on empty nodes"
        )
    # A node that is ahead was brought on by a second operator, or by the run that this one finishes. One that is another
    # cluster's now was found empty by two operators, and must stop the later one before it takes any node of the first.
    if answer == "other" or (answer == "ahead" and state is Phase.READY):
        raise NodeRejectedError(
            f"{visit.look.name}: its identity was changed by somebody else; look, and repeat"
        )


def _warn(look: NodeSnapshot, decided: Plan, *, node_count: int) -> None:
    """Warn of what an operator would otherwise learn at a node's first restart, too late; and of a node that is out."""
    assert look.found is not None, "a node that could not be looked at is not planned for"
    log = structlog.get_logger().bind(node_index=look.index, node_address=look.address)
    if look.found.durability_gap:
        consequence = (
            f"after a restart it is quarantined for {decided.ttl_ms_max / 1000:g} s, the greatest ttl, and then rejoins"
            if node_count > 1
            else "after a restart it does not vote until `redfence cluster recover` is run, for there are no others to ask"
        )
        log.warning("node_not_durable", gap=look.found.durability_gap, consequence=consequence)
    identity = look.found.identity
    if identity is not None and identity.phase is Phase.QUARANTINED:
        log.warning(
            "node_not_ready",
            state=identity.phase.value,
            consequence="it comes back by itself when the others vote",
        )
