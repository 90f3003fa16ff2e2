"""What a caller is told of the nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from redfence_proto.v1 import lock_pb2
from redfence_server.api.messages import cluster_status_response
from redfence_server.locking.node import Durability, NodeReport, NodeState
from redfence_server.nodes.cluster import ClusterView

REPORT = NodeReport("n0:6379", NodeState.READY, "", "run", 1.5, 2_000.0)


def told(**changes: Any) -> lock_pb2.NodeStatus:
    """Return what a caller is told of the node with these changes."""
    nodes = (replace(REPORT, **changes),)
    view = ClusterView(cluster_id="c", quorum=1, ttl_ms_max=300_000, nodes=nodes)
    return cluster_status_response(view, server_version="0").nodes[0]


def test_everything_that_is_known_of_a_node_is_told() -> None:
    clock = {"clock_offset_ms": -1500.25, "clock_distrusted_ms": 30_000.0}
    status = told(detail="its clock was set", latency_ms=0.25, max_token=2**53 - 1, state_changes=4, **clock)
    assert (status.latency.ToMicroseconds(), status.since.ToMilliseconds()) == (250, 2_000)
    assert status.clock_offset.ToMicroseconds() == -1_500_250
    assert status.clock_distrusted_for.ToMilliseconds() == 30_000
    assert (status.high, status.state_changes) == (2**53 - 1, 4)
    assert status.detail == "its clock was set"


def test_a_clock_that_was_never_asked_has_no_offset() -> None:
    assert not told().HasField("clock_offset")
    assert told().clock_distrusted_for.ToMilliseconds() == 0


def test_a_node_is_told_as_distrusted_to_the_last_moment() -> None:
    assert told(clock_distrusted_ms=0.2).clock_distrusted_for.ToMilliseconds() == 1


@pytest.mark.parametrize("durability", Durability)
def test_every_durability_has_its_word(durability: Durability) -> None:
    word = "UNSPECIFIED" if durability is Durability.UNKNOWN else durability.name
    assert lock_pb2.Durability.Name(told(durability=durability).durability) == f"DURABILITY_{word}"


@pytest.mark.parametrize("state", NodeState)
def test_every_state_has_its_word(state: NodeState) -> None:
    assert lock_pb2.NodeState.Name(told(state=state).state) == f"NODE_STATE_{state.name}"
