"""Form a cluster: give every node of a new quorum its identity, once.

Two passes, so that a crash in between can be told from a node that was wiped later: first every node becomes `forming`, and only
when all are, they become `ready`. An empty node beside a ready one has lost its memory; giving it a fresh identity
would let it vote as if it had not, so that is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from redfence_server import node_examination, scripts
from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.node_examination import Findings, Phase
from redfence_server.randomness import Randomness
from redfence_server.redis_dial import DialError, DialledNode, NodeUrl, dial


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write: to every node, in passes up to `ready`; nothing if `done`."""

    cluster_id: str
    ttl_ms_max: int
    done: bool


def plan(found: Sequence[Findings], *, new_cluster_id: str, ttl_ms_max: int) -> Plan:
    """Decide what forming these nodes takes, from what they say of themselves.

    Raises:
        NodeRejectedError: they cannot be formed into one cluster; the message names the node.
    """
    _check_independent(found)
    identities = [each.identity for each in found]
    formed = [identity for identity in identities if identity is not None]
    if not formed:
        return Plan(new_cluster_id, ttl_ms_max, done=False)
    first = formed[0]
    for index, identity in enumerate(identities):
        if identity is None:
            if any(other.phase is not Phase.FORMING for other in formed):
                raise NodeRejectedError(
                    f"node {index}: it is empty, but others belong to cluster {first.cluster_id} already: it was wiped or "
                    "replaced, and must not vote as if it remembered"
                )
        elif (identity.cluster_id, identity.node_count) != (first.cluster_id, len(found)):
            raise NodeRejectedError(
                f"node {index}: it belongs to cluster {identity.cluster_id} of {identity.node_count} nodes already"
            )
        elif identity.index != index:
            raise NodeRejectedError(
                f"node {index}: it was formed as node {identity.index}: the order is another, or it is named twice"
            )
    if first.max_ttl_ms != ttl_ms_max:
        raise ConfigError(
            f"max_ttl: the cluster was formed with {first.max_ttl_ms} ms and not with {ttl_ms_max} ms"
        )
    done = len(formed) == len(found) and all(identity.phase is not Phase.FORMING for identity in formed)
    return Plan(first.cluster_id, first.max_ttl_ms, done=done)


def _check_independent(found: Sequence[Findings]) -> None:
    run_ids = [each.run_id for each in found]
    for index, each in enumerate(found):
        if each.is_replica:
            raise NodeRejectedError(
                f"node {index}: it is a replica; every node must be an independent primary"
            )
        # Two host names, or two databases, of one server: they would fail together.
        if (first := run_ids.index(each.run_id)) < index:
            raise NodeRejectedError(f"node {index}: it is the same process as node {first}")


async def form(
    nodes: Sequence[NodeUrl],
    *,
    keys: scripts.Keyspace,
    ttl_ms_max: int,
    randomness: Randomness,
    dial_timeout_ms: int = 2_000,
) -> str:
    """Form the nodes into one cluster and return its id. Repeating it, also after a crash midway, is harmless.

    Raises:
        NodeRejectedError: a node cannot be reached, is not empty, or belongs to something else.
        ConfigError: the cluster exists with another greatest ttl.
    """
    async with AsyncExitStack() as stack:
        dialled = await asyncio.gather(
            *(_open(index, node, stack, dial_timeout_ms) for index, node in enumerate(nodes))
        )
        try:
            found = await asyncio.gather(*(node_examination.examine(each, keys) for each in dialled))
            decided = plan(found, new_cluster_id=randomness.hex_id(), ttl_ms_max=ttl_ms_max)
            _warn_of_gaps(nodes, found)
            for state in () if decided.done else ("forming", "ready"):
                for index, (node, findings) in enumerate(zip(dialled, found, strict=True)):
                    identity = (
                        *(decided.cluster_id, index, len(nodes), decided.ttl_ms_max),
                        *(randomness.hex_id(), findings.run_id, state),
                        *("0" if findings.durability_gap else "1", findings.evicted),
                    )
                    answer = await node.command(
                        "EVAL", scripts.load("form"), 2, keys.node, keys.high, *identity
                    )
                    _check(index, answer, state)
        except DialError as error:
            raise NodeRejectedError(f"a node failed while it was formed: {error}") from error
    return decided.cluster_id


def _warn_of_gaps(nodes: Sequence[NodeUrl], found: Sequence[Findings]) -> None:
    """Say now what would otherwise be learnt at a node's first restart, when it is too late."""
    for index, (node, findings) in enumerate(zip(nodes, found, strict=True)):
        if findings.durability_gap:
            structlog.get_logger().warning(
                "node_not_durable",
                node_index=index,
                node_address=node.address,
                gap=findings.durability_gap,
                consequence="it will not vote again after a restart",
            )


def _check(index: int, answer: list[bytes], state: str) -> None:
    if answer == [b"not_empty"]:
        raise NodeRejectedError(f"node {index}: it holds keys already; a cluster is formed on empty nodes")
    # A node that is ahead was brought on by a second operator, or by the run that this one finishes. One that is another
    # cluster's now was found empty by two operators, and must stop the later one before it takes any node of the first.
    if answer == [b"other"] or (answer == [b"ahead"] and state == "ready"):
        raise NodeRejectedError(f"node {index}: its identity was changed by somebody else; look, and repeat")


async def _open(index: int, node: NodeUrl, stack: AsyncExitStack, dial_timeout_ms: int) -> DialledNode:
    try:
        dialled = await dial(node, timeout_ms=dial_timeout_ms)
    except DialError as error:
        raise NodeRejectedError(f"node {index} ({node.address}): {error}") from error
    stack.push_async_callback(dialled.close)
    return dialled
