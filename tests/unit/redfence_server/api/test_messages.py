"""What a caller is told of the nodes."""

from __future__ import annotations

import pytest

from redfence_proto.v1 import lock_pb2
from redfence_server.api.messages import cluster_status_response
from redfence_server.locking.node import Durability, NodeReport, NodeState
from redfence_server.nodes.cluster import ClusterView

REPORT = NodeReport("n0:6379", NodeState.READY, "", "run", 1.5, 2_000.0)


def told(report: NodeReport) -> lock_pb2.NodeStatus:
    view = ClusterView(cluster_id="c", quorum=1, ttl_ms_max=300_000, nodes=(report,))
    return cluster_status_response(view, server_version="0").nodes[0]


def test_everything_that_is_known_of_a_node_is_told() -> None:
    status = told(
        NodeReport(
            address="n0:6379",
            state=NodeState.READY,
            detail="its clock was set",
            run_id="run",
            latency_ms=0.25,
            since_ms=2_000.0,
            durability=Durability.PROVEN,
            max_token=2**53 - 1,
            clock_offset_ms=-1500.25,
            clock_distrusted_ms=30_000.0,
            state_changes=4,
        )
    )
    assert (status.latency.ToMicroseconds(), status.since.ToMilliseconds()) == (250, 2_000)
    assert status.clock_offset.ToMicroseconds() == -1_500_250
    assert status.clock_distrusted_for.ToMilliseconds() == 30_000
    assert (status.high, status.state_changes) == (2**53 - 1, 4)
    assert status.detail == "its clock was set"


def test_a_clock_that_was_never_asked_has_no_offset() -> None:
    assert not told(REPORT).HasField("clock_offset")
    assert told(REPORT).clock_distrusted_for.ToMilliseconds() == 0


def test_a_node_is_told_as_distrusted_to_the_last_moment() -> None:
    report = NodeReport("n0:6379", NodeState.READY, "", "run", None, 0.0, clock_distrusted_ms=0.2)
    assert told(report).clock_distrusted_for.ToMilliseconds() == 1


@pytest.mark.parametrize("durability", Durability)
def test_every_durability_has_its_word(durability: Durability) -> None:
    word = "UNSPECIFIED" if durability is Durability.UNKNOWN else durability.name
    status = told(NodeReport("n0:6379", NodeState.READY, "", "run", None, 0.0, durability=durability))
    assert lock_pb2.Durability.Name(status.durability) == f"DURABILITY_{word}"


@pytest.mark.parametrize("state", NodeState)
def test_every_state_has_its_word(state: NodeState) -> None:
    status = told(NodeReport("n0:6379", state, "", "run", None, 0.0))
    assert lock_pb2.NodeState.Name(status.state) == f"NODE_STATE_{state.name}"
