"""What a server knows of its cluster: it only grows, and whoever depends on it is told in time."""

from __future__ import annotations

import pytest

from redfence_server.cluster_memory import ClusterMemory
from redfence_server.lock_node import Pulsed
from redfence_server.node_examination import Identity, Phase


def identity(index: int, **more: object) -> Identity:
    """Return a node of three."""
    return Identity("c", index, 3, 9_000, "a" * 32, f"run-{index}", True, Phase.READY, **more)  # type: ignore[arg-type]


@pytest.fixture
def memory() -> ClusterMemory:
    """What a server of three nodes knows at its start."""
    return ClusterMemory(3)


def test_the_first_node_tells_which_cluster_it_is(memory: ClusterMemory) -> None:
    """The others are held to it."""
    memory.admit(identity(1), "run-1")
    assert (memory.cluster_id, memory.ttl_ms_max) == ("c", 9_000)


def test_nodes_tell_of_each_other_and_nothing_is_ever_lowered(memory: ClusterMemory) -> None:
    """However old what they tell is."""
    memory.admit(identity(0, known_floors={2: 7}, known_changes={1: 4, 2: 20}), "run-0")
    memory.admit(identity(1, changes=5, known_floors={2: 3}, known_changes={2: 30}), "run-1")
    memory.pulsed(0, Pulsed(0.0, 11, 6, (99, 2, 25), (99, 0, 7)), floor=0)
    assert memory.changes() == (11, 5, 25)
    assert [place.floor for place in memory.places] == [0, 0, 7]
    assert memory.places[0].number == 6
    memory.heard(0, floor=0, changes=10, number=5)
    memory.told(2, floor=6, changes=29)
    assert memory.changes() == (11, 5, 25)
    assert memory.places[0].number == 6
    assert memory.places[2].floor == 7


def test_with_a_greater_floor_changes_are_counted_anew(memory: ClusterMemory) -> None:
    """After a recovery they may begin with less than before; what is told of the time before does not count."""
    memory.admit(identity(0, changes=900), "run-0")
    memory.admit(identity(1, known_floors={0: 50}, known_changes={0: 3}), "run-1")
    assert memory.changes() == (3, 0, 0)
    memory.heard(0, floor=0, changes=901)
    memory.learn(identity(2, known_changes={0: 900}))
    assert memory.changes() == (3, 0, 0)
    memory.admit(identity(0, floor=50, changes=4), "run-0")
    assert memory.changes() == (4, 0, 0)


def test_what_a_node_says_of_its_own_place_is_no_news_of_others(memory: ClusterMemory) -> None:
    """Its own floor counts only when it is admitted under it."""
    memory.learn(identity(0, floor=9, known_floors={0: 12}))
    assert memory.places[0].floor == 0
    memory.admit(identity(0, floor=9, known_floors={0: 12}), "run-0")
    assert memory.places[0].floor == 9


def test_a_floor_that_rises_is_told_at_once_and_once(memory: ClusterMemory) -> None:
    """Whoever is connected to what was there before must drop it before the teller votes."""
    told: list[tuple[int, int]] = []
    memory.on_floor = lambda index: told.append((index, memory.places[index].floor))
    memory.learn(identity(0, known_floors={1: 4, 2: 5}))
    memory.learn(identity(1, known_floors={2: 5}))
    memory.told(2, floor=8, changes=0)
    memory.pulsed(0, Pulsed(0.0, 0, 0, (0, 0, 0), (0, 6, 8)), floor=0)
    assert told == [(1, 4), (2, 5), (2, 8), (1, 6)]


def test_runs_are_those_of_other_places_that_vote(memory: ClusterMemory) -> None:
    """One that is gone is nobody's twin."""
    memory.admit(identity(0), "run-0")
    memory.admit(identity(2), "run-2")
    assert memory.runs_of_others(0) == {"run-2": 2}
    memory.places[2].run_id = ""
    assert memory.runs_of_others(0) == {}
