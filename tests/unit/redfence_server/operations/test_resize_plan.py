"""What a change of the list of nodes takes, decided from what all of them say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from harness.doubles.findings import TTL_MS, away, identity, look
from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.membership.admin import NodeSnapshot
from redfence_server.membership.examination import Phase
from redfence_server.operations.resize_plan import Resize, plan, successor

OLD = [look(index, identity(index)) for index in range(3)]
EMPTY = [look(index, None) for index in (3, 4)]
NEW = [*OLD, *EMPTY]
TO = successor("c", [each.address for each in NEW])


def decide(old: Sequence[NodeSnapshot], new: Sequence[NodeSnapshot]) -> Resize:
    return plan(old, new, assume_durable=False)


def moved(index: int, **changes: Any) -> NodeSnapshot:
    """Return an old node that has its place in the successor."""
    here = {"cluster_id": TO, "node_count": 5, "phase": Phase.QUARANTINED, "predecessor": "c"}
    return look(index, identity(index, **(here | changes)))


def retired(index: int, successor_id: str = TO) -> NodeSnapshot:
    return moved(index, cluster_id=successor_id, node_count=3, phase=Phase.RETIRED)


def test_the_nodes_that_vote_retire_towards_one_successor() -> None:
    assert decide(OLD, NEW) == Resize("c", TO, TTL_MS, to_retire=(0, 1, 2), away=(), is_done=False)
    one_away = [OLD[0], away(1), OLD[2]]
    assert decide(one_away, NEW).to_retire == (0, 2)
    # Another list, or another order, is another cluster.
    assert decide(OLD, [*OLD[::-1], *EMPTY]).successor_id != TO


@pytest.mark.parametrize(
    ("old", "to_retire"),
    [
        ([retired(0), OLD[1], OLD[2]], (0, 1, 2)),
        ([retired(0), retired(1), OLD[2]], (0, 1, 2)),
        ([retired(0), retired(1), away(2)], (0, 1)),
        # A node with a place proves that a quorum had retired.
        ([moved(0), retired(1), OLD[2]], ()),
        ([moved(0), moved(1), moved(2)], ()),
    ],
)
def test_a_resize_that_broke_off_is_continued(
    old: Sequence[NodeSnapshot], to_retire: tuple[int, ...]
) -> None:
    planned = decide(old, [*old, *EMPTY])
    assert (planned.cluster_id, planned.successor_id, planned.to_retire) == ("c", TO, to_retire)
    # A new node may have been lost since the nodes began to retire.
    assert 4 in decide(old, [*old, EMPTY[0], away(4)]).away


def test_nodes_that_restarted_with_proof_count_if_every_old_node_is_there() -> None:
    """A copy of older data shows proof too. A half-done resize can be the only way on after a power loss."""
    again = [look(index, identity(index), run_id=f"again-{index}") for index in range(3)]
    for old in (again, [retired(0), *again[1:]], [again[0], *OLD[1:]]):
        assert decide(old, [*old, *EMPTY]).to_retire == (0, 1, 2)
    with pytest.raises(NodeRejectedError, match="fewer than a quorum of 2 old nodes votes"):
        decide([away(0), *again[1:]], [*again[1:], EMPTY[0]])


def test_a_node_that_left_for_another_list_does_not_count() -> None:
    stranger = retired(0, "another list's")
    assert decide([stranger, *OLD[1:]], [stranger, *NEW[1:]]).to_retire == (1, 2)
    left = [stranger, retired(1, "another list's"), OLD[2]]
    with pytest.raises(
        NodeRejectedError, match=r"quorum of 2 .*node 0 .*: it left for another list of nodes"
    ):
        decide(left, [*left, *EMPTY])


@pytest.mark.parametrize(
    "lost",
    [
        away(1),
        look(1, None),
        look(1, identity(1, phase=Phase.QUARANTINED)),
        look(1, identity(1, cluster_id="other")),
        look(1, identity(2)),
    ],
)
def test_nothing_changes_unless_a_quorum_of_the_old_nodes_votes(lost: NodeSnapshot) -> None:
    """Only a quorum that remembers knows the greatest token."""
    with pytest.raises(NodeRejectedError, match=r"fewer than a quorum of 2 old nodes votes \(node 0 "):
        decide([away(0), lost, OLD[2]], [*EMPTY, look(5, None)])


def test_a_new_node_that_is_used_or_away_or_a_twin_is_named() -> None:
    for wrong, told in (
        (away(4), "the new node 4 .*: connection refused"),
        (look(4, None, key_count=3), "yet holds 3 keys"),
        (
            look(4, identity(1, cluster_id="other")),
            "it belongs to cluster other, and is none of the old nodes",
        ),
        (look(4, identity(2), run_id="a copy"), "it belongs to cluster c, and is none of the old nodes"),
        (look(4, None, run_id="run-0"), "it is the same process as node 0"),
        (look(4, None, is_replica=True), "it is a replica"),
    ):
        with pytest.raises(NodeRejectedError, match=told):
            decide(OLD, [*NEW[:4], wrong])
    with pytest.raises(ConfigError, match="to: the new list of nodes is the same"):
        decide(OLD, OLD)


def test_a_successor_that_has_voted_is_never_begun_again() -> None:
    """Its tokens may be above any that the nodes show."""
    voting = [moved(index, phase=Phase.READY, voted_floor=9) for index in range(3)]
    assert decide(voting, [*voting, *EMPTY]).is_done
    out = [moved(index, voted_floor=9) for index in range(3)]
    for one in (out[0], voting[0]):
        begun = [one, moved(1), moved(2)]
        with pytest.raises(
            NodeRejectedError, match="no quorum votes; `redfence cluster recover` with the new"
        ):
            decide(begun, [*begun, *EMPTY])
