"""The plan of a recovery for every combination of node states that matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from harness.doubles.findings import TTL_MS, away, identity, look
from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.membership.admin import NodeSnapshot
from redfence_server.membership.examination import Phase
from redfence_server.operations.floors import FLOOR_MAX
from redfence_server.operations.recovery_plan import Recovery, Request, greatest_number, plan

UNFORMED = (Phase.FORMING, Phase.ASSEMBLED)
# Some time in 2026.
NOW_US = 1_780_000_000_000_000
AUTO = Request(floor=None, ttl_ms_max=None)
JUMP = 2**20


def decide(looks: Sequence[NodeSnapshot], request: Request = AUTO, *, wall_us: int = NOW_US) -> Recovery:
    return plan(looks, request, wall_us=wall_us, new_cluster_id="new")


def recovery(looks: Sequence[NodeSnapshot], request: Request = AUTO, *, wall_us: int = NOW_US) -> Recovery:
    planned = decide(looks, request, wall_us=wall_us)
    assert isinstance(planned, Recovery)
    return planned


# --- who takes part

VOTES, QUARANTINED, EMPTY, RESTARTED, OLDER, UNREACHABLE = range(6)
STATES = (VOTES, QUARANTINED, EMPTY, RESTARTED, OLDER, UNREACHABLE)


def in_state(index: int, state: int) -> NodeSnapshot:
    return (
        look(index, identity(index)),
        look(index, identity(index, phase=Phase.QUARANTINED), max_token=None),
        look(index, None),
        look(index, identity(index), run_id=f"new-run-{index}", durability_gap="appendonly is no"),
        look(index, identity(index), max_token=None),
        away(index),
    )[state]


@pytest.mark.parametrize("states", list(product(STATES, repeat=3)))
def test_a_recovery_takes_all_that_can_be_reached_and_only_where_no_quorum_votes(
    states: tuple[int, ...],
) -> None:
    looks = [in_state(index, state) for index, state in enumerate(states)]
    reached = tuple(index for index, state in enumerate(states) if state != UNREACHABLE)
    gone = tuple(index for index, state in enumerate(states) if state == UNREACHABLE)
    remembered = any(state not in {EMPTY, UNREACHABLE} for state in states)
    request = AUTO if remembered else replace(AUTO, ttl_ms_max=9_000)
    if len(reached) < 2:
        with pytest.raises(
            NodeRejectedError, match="fewer than a quorum of 2 nodes can be reached"
        ) as refused:
            decide(looks, request)
        assert all(
            f"node {index} (n{index}:6379): connection refused" in str(refused.value) for index in gone
        )
        return
    if states.count(VOTES) >= 2:
        with pytest.raises(NodeRejectedError, match=r"nothing to recover: a quorum votes \(node "):
            decide(looks, request)
        return
    planned = recovery(looks, request)
    assert (planned.nodes, planned.away) == (reached, gone)
    assert (planned.cluster_id, planned.is_new) == (("c", False) if remembered else ("new", True))
    assert planned.ttl_ms_max == (TTL_MS if remembered else 9_000)
    assert planned.is_avoidable == (states.count(VOTES) + len(gone) >= 2)


def test_a_node_that_restarted_votes_where_the_operator_gives_his_word() -> None:
    looks = [in_state(index, RESTARTED) for index in range(3)]
    assert recovery(looks).nodes == (0, 1, 2)
    with pytest.raises(NodeRejectedError, match="nothing to recover"):
        decide(looks, replace(AUTO, assume_durable=True))


@pytest.mark.parametrize(
    ("who", "found", "told"),
    [
        ({}, {"is_replica": True}, "it is a replica"),
        ({}, {"version": "6.0.16"}, "6.2 is the least"),
        ({}, {"eviction": "maxmemory 1, maxmemory-policy allkeys-lru"}, "would drop keys"),
        ({}, {"run_id": "run-0"}, "the same process as node 0"),
        ({"cluster_id": "other"}, {}, "it belongs to cluster other, not to c"),
        ({"index": 1}, {}, "it was formed as node 1, but is configured as node 2"),
        ({"node_count": 5}, {}, "it was formed as one of 5 nodes"),
        ({}, {"durability_gap": "appendonly is no"}, "it was durable and is not any more: appendonly is no"),
        (None, {"key_count": 2, "max_token": None}, "no cluster identity and yet holds 2 keys"),
        (None, {"key_count": 2, "max_token": 7}, "no cluster identity and yet holds 2 keys"),
    ],
)
def test_a_node_that_an_operator_has_to_mend_first_is_named(
    who: dict[str, Any] | None, found: dict[str, Any], told: str
) -> None:
    broken = look(2, None if who is None else identity(2, **who), **found)
    looks = [in_state(0, QUARANTINED), in_state(1, QUARANTINED), broken]
    with pytest.raises(NodeRejectedError, match=rf"^node 2 \(n2:6379\): .*{told}"):
        decide(looks)


def test_a_cluster_that_was_never_formed_to_the_end_is_to_be_formed() -> None:
    empty = look(2, None)
    for phase in UNFORMED:
        begun = [look(index, identity(index, phase=phase)) for index in range(2)]
        for third in (empty, away(2), *(look(2, identity(2, phase=each)) for each in UNFORMED)):
            if phase is Phase.ASSEMBLED and third is empty:
                assert recovery([*begun, third]).nodes == (0, 1, 2)
                continue
            with pytest.raises(NodeRejectedError, match="run `redfence cluster init` again"):
                decide([*begun, third])
        assert recovery([*begun, in_state(2, QUARANTINED)]).nodes == (0, 1, 2)


def test_which_cluster_it_is_most_of_the_nodes_tell() -> None:
    other = identity(0, cluster_id="other", phase=Phase.QUARANTINED)
    with pytest.raises(NodeRejectedError, match=r"^node 0 .* cluster other, not to c"):
        decide([look(0, other), in_state(1, QUARANTINED), in_state(2, QUARANTINED)])


# --- the greatest ttl

LOST = [in_state(0, VOTES), in_state(1, EMPTY), in_state(2, QUARANTINED)]


def test_the_greatest_ttl_comes_from_whoever_remembers_it() -> None:
    assert recovery(LOST, replace(AUTO, ttl_ms_max=TTL_MS)).ttl_ms_max == TTL_MS
    with pytest.raises(ConfigError, match="max_ttl: the cluster was formed with 300000 ms and not with 5 ms"):
        decide(LOST, replace(AUTO, ttl_ms_max=5))


def test_of_two_greatest_ttls_the_greater_one_is_waited_for() -> None:
    longer = look(2, identity(2, phase=Phase.QUARANTINED, max_ttl_ms=2 * TTL_MS))
    assert recovery([*LOST[:2], longer]).ttl_ms_max == 2 * TTL_MS


def test_a_greatest_ttl_that_nobody_remembers_must_be_told() -> None:
    with pytest.raises(ConfigError, match="max_ttl: no node remembers"):
        decide([in_state(index, EMPTY) for index in range(3)])


# --- the floor


def knowing(place: str, number: int) -> list[NodeSnapshot]:
    """Return a cluster to recover in which a number is known in one place alone."""
    wiped, quarantined = identity(0, phase=Phase.QUARANTINED), identity(1, phase=Phase.QUARANTINED)
    match place:
        case "high of one that votes":
            return [look(0, wiped), look(1, quarantined), look(2, identity(2), max_token=number)]
        case "high of one that does not":
            return [look(0, wiped, max_token=number), look(1, quarantined), away(2)]
        case "floor":
            return [look(0, replace(wiped, floor=number)), look(1, quarantined), away(2)]
        case _:
            return [look(0, replace(wiped, known_floors={2: number})), look(1, quarantined), away(2)]


PLACES = ["high of one that votes", "high of one that does not", "floor", "known floor of one that is away"]


@pytest.mark.parametrize("place", PLACES)
def test_a_floor_is_above_every_number_that_can_be_read(place: str) -> None:
    looks = knowing(place, 1_000)
    assert greatest_number(looks) == 1_000
    for floor in (0, 999, 1_000):
        with pytest.raises(ConfigError, match=f"floor: {floor} is not above 1000, .* give 1001 at the least"):
            decide(looks, replace(AUTO, floor=floor))
    assert recovery(looks, replace(AUTO, floor=1_001)).floor == 1_001


@pytest.mark.parametrize("place", PLACES)
def test_auto_is_a_jump_above_the_clock_and_above_every_number_that_can_be_read(place: str) -> None:
    assert recovery(knowing(place, 1_000)).floor == NOW_US + JUMP
    assert recovery(knowing(place, NOW_US + 7)).floor == NOW_US + 7 + JUMP


def test_a_clock_that_was_never_set_is_no_measure() -> None:
    for wall_us in (0, 1_700_000_000_000_000):
        with pytest.raises(ConfigError, match="floor: this machine's clock was never set"):
            decide(LOST, wall_us=wall_us)
        assert recovery(LOST, replace(AUTO, floor=6), wall_us=wall_us).floor == 6


def test_a_floor_leaves_room_for_tokens() -> None:
    assert recovery(LOST, replace(AUTO, floor=FLOOR_MAX)).floor == FLOOR_MAX
    assert FLOOR_MAX + JUMP < 2**53
    for request, wall_us in ((replace(AUTO, floor=FLOOR_MAX + 1), NOW_US), (AUTO, FLOOR_MAX)):
        with pytest.raises(ConfigError, match="below 2\\^53"):
            decide(LOST, request, wall_us=wall_us)
