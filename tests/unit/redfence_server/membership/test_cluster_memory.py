"""What a server knows of its cluster: it only grows, and each link hears of a greater floor in time."""

from __future__ import annotations

import pytest

from harness.doubles.findings import TTL_MS, identity
from redfence_server.membership.cluster_memory import ClusterMemory


@pytest.fixture
def memory() -> ClusterMemory:
    return ClusterMemory(3)


def test_the_first_node_tells_which_cluster_it_is(memory: ClusterMemory) -> None:
    memory.admit(identity(1), "run-1")
    memory.learn(identity(0, cluster_id="d", max_ttl_ms=8_000))
    assert (memory.cluster_id, memory.ttl_ms_max) == ("c", TTL_MS)


def test_floors_and_tokens_only_rise_and_a_greater_floor_begins_without_a_token(
    memory: ClusterMemory,
) -> None:
    told: list[tuple[int, int]] = []
    memory.on_floor = lambda index: told.append((index, memory.nodes[index].floor))
    memory.learn(identity(0, known_floors={1: 4, 2: 7, 5: 9}))
    memory.learn(identity(1, known_floors={2: 3}))
    for floor, token in ((7, 20), (7, 19), (6, 99), (8, 99)):
        memory.see_token(2, floor=floor, token=token)
    assert (memory.floors(), memory.nodes[2].token) == ((0, 4, 7), 20)
    memory.learn(identity(0, known_floors={1: 4, 2: 8}))
    assert (memory.floors(), memory.nodes[2].token) == ((0, 4, 8), 0)
    memory.see_token(2, floor=7, token=21)
    assert memory.nodes[2].token == 0
    assert told == [(1, 4), (2, 7), (2, 8)]


def test_what_a_node_says_of_its_own_index_counts_only_when_it_is_admitted(memory: ClusterMemory) -> None:
    memory.learn(identity(0, floor=9, known_floors={0: 12}))
    assert memory.nodes[0].floor == 0
    memory.admit(identity(0, floor=9, known_floors={0: 12}), "run-0")
    assert memory.nodes[0].floor == 9


def test_runs_are_those_of_other_places_that_vote(memory: ClusterMemory) -> None:
    memory.admit(identity(0), "run-0")
    memory.admit(identity(2), "run-2")
    assert memory.runs_of_others(0) == {"run-2": 2}
    memory.nodes[2].run_id = ""
    assert memory.runs_of_others(0) == {}
