"""What forming a cluster takes, decided from what its nodes say of themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from redfence_server.cluster_forming import Plan, plan
from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.node_examination import Findings, Identity, Phase

TTL_MS = 300_000


def identity(index: int, *, phase: Phase = Phase.READY) -> Identity:
    """Return the identity of one of three nodes."""
    return Identity("c", index, 3, TTL_MS, "a" * 32, f"run-{index}", durable=True, phase=phase)


def found(index: int, who: Identity | None = None) -> Findings:
    """Return what a node says that has this identity or none."""
    return Findings(who, f"run-{index}", "7.2.4", is_replica=False, durability_gap="")


def decide(*who: Identity | None, ttl_ms_max: int = TTL_MS) -> Plan:
    """Plan for nodes with these identities."""
    nodes = [found(index, each) for index, each in enumerate(who)]
    return plan(nodes, new_cluster_id="new", ttl_ms_max=ttl_ms_max)


def test_empty_nodes_become_a_new_cluster() -> None:
    """The only time that an identity is made up."""
    assert decide(None, None, None) == Plan("new", TTL_MS, done=False)


def test_a_formed_cluster_is_left_alone() -> None:
    """Repeating it is harmless."""
    assert decide(identity(0), identity(1), identity(2)) == Plan("c", TTL_MS, done=True)


@pytest.mark.parametrize(
    "who",
    [
        (identity(0, phase=Phase.FORMING), None, None),
        (identity(0, phase=Phase.FORMING), identity(1, phase=Phase.FORMING), None),
        (
            identity(0, phase=Phase.FORMING),
            identity(1, phase=Phase.FORMING),
            identity(2, phase=Phase.FORMING),
        ),
        (identity(0), identity(1, phase=Phase.FORMING), identity(2, phase=Phase.FORMING)),
    ],
)
def test_a_forming_that_broke_off_is_finished(who: tuple[Identity | None, ...]) -> None:
    """Under the id that it had begun with."""
    assert decide(*who) == Plan("c", TTL_MS, done=False)


@pytest.mark.parametrize(
    "who", [(identity(0), identity(1), None), (None, identity(1, phase=Phase.FORMING), identity(2))]
)
def test_an_empty_node_beside_a_ready_one_is_refused(who: tuple[Identity | None, ...]) -> None:
    """It has lost its memory; a fresh identity would let it vote as if it had not."""
    with pytest.raises(NodeRejectedError, match="wiped or replaced"):
        decide(*who)


def test_nodes_of_another_cluster_or_order_or_size_are_refused() -> None:
    """Whoever runs this has the wrong nodes before him."""
    with pytest.raises(NodeRejectedError, match="node 2: it belongs to cluster other"):
        decide(identity(0), identity(1), replace(identity(2), cluster_id="other"))
    with pytest.raises(NodeRejectedError, match="node 1: it was formed as node 2"):
        decide(identity(0), identity(2), identity(1))
    with pytest.raises(NodeRejectedError, match="of 5 nodes already"):
        decide(identity(0), replace(identity(1), node_count=5), identity(2))
    with pytest.raises(NodeRejectedError, match="node 0: it is a replica"):
        plan([replace(found(0), is_replica=True)], new_cluster_id="new", ttl_ms_max=TTL_MS)


def test_the_greatest_ttl_of_a_cluster_is_not_changed_by_forming_it_again() -> None:
    """Quarantine of a node would be too short for leases that were granted before."""
    with pytest.raises(ConfigError, match="max_ttl"):
        decide(identity(0), identity(1), identity(2), ttl_ms_max=2 * TTL_MS)


@pytest.mark.parametrize("formed", [False, True])
def test_two_names_of_one_process_are_refused(*, formed: bool) -> None:
    """Two databases, or two host names, of one server fail together; they are no two nodes."""
    nodes = [found(index, identity(index) if formed else None) for index in range(3)]
    nodes[2] = replace(nodes[2], run_id="run-0")
    with pytest.raises(NodeRejectedError, match="node 2: it is the same process as node 0"):
        plan(nodes, new_cluster_id="new", ttl_ms_max=TTL_MS)
