"""The plan of a replacement for every combination of node states that matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from harness.doubles import findings
from harness.doubles.findings import TTL_MS, away, look
from redfence_server.errors import NodeRejectedError
from redfence_server.membership.admin import NodeAssignment, NodeSnapshot
from redfence_server.membership.examination import Findings, Identity, Phase
from redfence_server.operations.replacement import Newcomer, Plan, plan

PLACE = 2
FLOOR = 4
"""The fence of index 2 that the peers know: the node there was replaced or lost before."""


def identity(place: int, /, **fields: Any) -> Identity:
    knows = {"floor": FLOOR} if place == PLACE else {"known_floors": {PLACE: FLOOR}}
    return findings.identity(place, **(knows | fields))


def new(who: Identity | None = None, **found: Any) -> NodeSnapshot:
    return look(PLACE, who, address="new:6379", **({"run_id": "run-new"} | found))


OTHERS = (look(0, identity(0)), look(1, identity(1)))
DEAD = away(PLACE)


def decide(newcomer: NodeSnapshot, old: NodeSnapshot = DEAD, others: Sequence[NodeSnapshot] = OTHERS) -> Plan:
    return plan([*others, old], newcomer, assume_durable=False)


# --- the new node against the old one

NEWCOMERS = {
    "empty": (new(), Newcomer.TO_PREPARE),
    "quarantined there": (new(identity(PLACE, run_id="run-new", phase=Phase.QUARANTINED)), Newcomer.PREPARED),
    # Its quarantine may be an older copy, for which no fence was raised.
    "quarantined there before": (new(identity(PLACE, phase=Phase.QUARANTINED)), Newcomer.TO_PREPARE),
    "restarted there with proof": (
        new(identity(PLACE, run_id="run-new", phase=Phase.RESTARTED)),
        Newcomer.TO_PREPARE,
    ),
    "superseded there": (new(identity(PLACE, floor=FLOOR - 1)), Newcomer.TO_PREPARE),
    # It retired towards this cluster when the cluster was resized, and missed the rest.
    "retired towards it": (
        new(identity(PLACE, node_count=5, phase=Phase.RETIRED, predecessor="before")),
        Newcomer.TO_PREPARE,
    ),
    "forming there": (new(identity(PLACE, phase=Phase.FORMING)), Newcomer.TO_PREPARE),
    # No server has admitted it since its start: it may be a copy of the old node's disk.
    "restarted there": (new(identity(PLACE, run_id="before")), Newcomer.TO_PREPARE),
    "forgot there": (new(identity(PLACE, run_id="run-new"), max_token=None), Newcomer.TO_PREPARE),
    "votes there": (new(identity(PLACE, run_id="run-new")), Newcomer.VOTES),
}
# How the old one looks, and whether it votes.
OLD = {
    "away": (DEAD, False),
    "votes": (look(PLACE, identity(PLACE)), True),
    "quarantined": (look(PLACE, identity(PLACE, phase=Phase.QUARANTINED)), False),
    "superseded": (look(PLACE, identity(PLACE, floor=0)), False),
    "empty": (look(PLACE, None), False),
    "of another cluster": (look(PLACE, identity(PLACE, cluster_id="other")), False),
    "of another place": (look(PLACE, identity(0)), False),
    "somebody's": (look(PLACE, None, key_count=3), False),
    "a replica": (look(PLACE, identity(PLACE), is_replica=True), False),
}


@pytest.mark.parametrize(("newcomer", "old"), list(product(NEWCOMERS, OLD)))
def test_the_new_node_is_prepared_whatever_the_old_one_is(newcomer: str, old: str) -> None:
    coming, becomes = NEWCOMERS[newcomer]
    going, votes = OLD[old]
    if newcomer == "votes there" and votes:
        # Both show the identity that votes: one is a copy of the other.
        becomes = Newcomer.TO_PREPARE
    seat = NodeAssignment("c", PLACE, 3, TTL_MS)
    assert decide(coming, going) == Plan(seat, becomes, ends_vote=votes, spare=0, peers=(0, 1))


@pytest.mark.parametrize("newcomer", NEWCOMERS)
def test_a_node_that_takes_its_own_place_again_ends_no_vote(newcomer: str) -> None:
    coming, becomes = NEWCOMERS[newcomer]
    for there in (coming, replace(coming, address="by-another-name:6379")):
        planned = decide(coming, there)
        assert (planned.newcomer, planned.ends_vote) == (becomes, False)


@pytest.mark.parametrize(
    ("who", "found", "told"),
    [
        (None, {"key_count": 2}, "no cluster identity and yet holds 2 keys.* and repeat"),
        ({"cluster_id": "other"}, {}, "it belongs to cluster other, not to c"),
        ({"index": 0}, {}, "it was formed as node 0, but is configured as node 2"),
        ({"node_count": 5}, {}, "it was formed as one of 5 nodes"),
        ({"run_id": "run-new"}, {"durability_gap": "appendonly is no"}, "durable and is not any more"),
        (None, {"is_replica": True}, "it is a replica"),
        (None, {"version": "6.0.16"}, "6.2 is the least"),
        (None, {"eviction": "maxmemory 1, maxmemory-policy allkeys-lru"}, "would drop keys"),
        (None, {"run_id": "run-1"}, "the same process as node 1"),
    ],
)
def test_a_new_node_that_cannot_take_the_place_is_refused(
    who: dict[str, Any] | None, found: dict[str, Any], told: str
) -> None:
    coming = new(None if who is None else identity(PLACE, **who), **found)
    with pytest.raises(NodeRejectedError, match=rf"node 2 \(new:6379\): .*{told}"):
        decide(coming)
    with pytest.raises(NodeRejectedError, match=r"the new node 2 \(new:6379\): connection refused"):
        decide(away(PLACE, "new:6379"))


# --- the others


def restarted(place: int, **found: Any) -> NodeSnapshot:
    return look(place, identity(place, node_count=5), run_id=f"later-{place}", **found)


# By the words that tell why the node has no vote.
DISABLED: dict[str, Callable[[int], NodeSnapshot]] = {
    "connection refused": away,
    "wiped": lambda place: look(place, None),
    "quarantined": lambda place: look(place, identity(place, node_count=5, phase=Phase.QUARANTINED)),
    "appendonly is no": lambda place: restarted(place, durability_gap="appendonly is no"),
    # It votes when a server has raised the fence for it.
    "a lock server has not given it its vote yet": restarted,
}


@pytest.mark.parametrize("why", DISABLED)
@pytest.mark.parametrize("out", [each for count in range(5) for each in combinations((0, 1, 3, 4), count)])
def test_a_quorum_of_other_nodes_must_vote(out: tuple[int, ...], why: str) -> None:
    nodes = [look(place, identity(place, node_count=5)) for place in range(5)]
    for place in out:
        nodes[place] = DISABLED[why](place)
    nodes[PLACE] = DEAD
    if len(out) <= 1:
        planned = plan(nodes, new(), assume_durable=False)
        peers = tuple(place for place in (0, 1, 3, 4) if place not in out)
        seat = NodeAssignment("c", PLACE, 5, TTL_MS)
        assert planned == Plan(seat, Newcomer.TO_PREPARE, False, 1 - len(out), peers)
        return
    with pytest.raises(NodeRejectedError, match="fewer than a quorum of 3 other nodes votes") as refused:
        plan(nodes, new(), assume_durable=False)
    for place in out:
        assert f"node {place} (n{place}:6379): " in str(refused.value)
    assert str(refused.value).count(why) == len(out)


def test_a_single_node_has_no_others() -> None:
    alone = look(0, identity(0, node_count=1))
    coming = NodeSnapshot(0, "new:6379", Findings(None, "run-new", "7.2.4"))
    with pytest.raises(NodeRejectedError, match=r"there are no others.*`redfence cluster recover`"):
        plan([alone], coming, assume_durable=False)


@pytest.mark.parametrize(
    ("place", "found", "told"),
    [
        (1, {"cluster_id": "other"}, "belongs to cluster other, not to c"),
        (0, {}, "it was formed as node 0"),
        (1, {"node_count": 3}, "it was formed as one of 3 nodes"),
        (0, None, "it is the same process as node 0"),
    ],
)
def test_a_list_of_nodes_that_is_not_the_clusters_is_refused(
    place: int, found: dict[str, Any] | None, told: str
) -> None:
    nodes = [look(each, identity(each, node_count=5)) for each in range(5)]
    wrong = identity(place, **({"node_count": 5} | (found or {})))
    nodes[1] = look(1, wrong, **({"run_id": "run-0"} if found is None else {}))
    with pytest.raises(NodeRejectedError, match=rf"node 1 \(n1:6379\): .*{told}"):
        plan(nodes, new(), assume_durable=False)


def test_what_the_old_node_says_of_the_cluster_does_not_count() -> None:
    lies = look(PLACE, identity(PLACE, known_floors={0: 10**6, 1: 10**6}, max_ttl_ms=10**9))
    assert decide(new(), lies).assignment == NodeAssignment("c", PLACE, 3, TTL_MS)
