"""Show what a lock server knows about its nodes, its waiters and its limits, read at the time of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from redfence_server.locking.node import NodeReport, NodeState
from redfence_server.nodes.cluster import ClusterView
from redfence_server.sharing.shares import Shares
from redfence_server.waiting.queues import WaitingView

_NODE = ("node", "address")


class ClusterMetrics:
    """Collects the metrics of the nodes, the waiters and the limits.

    Args:
        ready: tells whether a quorum would grant now; `/readyz` answers the same.
        shows_connections: whether the transport counts its connections in `shares`.
    """

    def __init__(
        self,
        *,
        view: Callable[[], ClusterView],
        waiting: Callable[[], WaitingView],
        shares: Shares,
        ready: Callable[[], bool],
        shows_connections: bool,
    ) -> None:
        self._view = view
        self._waiting = waiting
        self._shares = shares
        self._ready = ready
        self._shows_connections = shows_connections

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as a collector of prometheus_client."""
        view = self._view()
        yield from self._cluster(view)
        yield from _nodes(view.nodes)
        yield from _waiters(self._waiting())
        yield from _limits(self._shares)
        yield from _connections(self._shares if self._shows_connections else None)

    def _cluster(self, view: ClusterView) -> Iterator[Metric]:
        yield GaugeMetricFamily("redfence_ready", "1 if a quorum would grant now, else 0.", self._ready())
        yield GaugeMetricFamily("redfence_nodes", "Nodes that are configured.", len(view.nodes))
        yield GaugeMetricFamily("redfence_quorum_size", "Votes that a grant needs.", view.quorum)
        yield GaugeMetricFamily(
            "redfence_nodes_voting", "Nodes whose votes for grants count now.", voting(view)
        )
        yield GaugeMetricFamily(
            "redfence_ttl_seconds_max", "The greatest ttl of the cluster.", view.ttl_ms_max / 1000
        )


def voting(view: ClusterView) -> int:
    """Return how many nodes' votes for grants count now."""
    return sum(each.grants for each in view.nodes)


def _nodes(nodes: Sequence[NodeReport]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "redfence_node_state", "1 for the present state of the node, else 0.", labels=(*_NODE, "state")
    )
    changes = CounterMetricFamily("redfence_node_state_changes", "Changes of its state.", labels=_NODE)
    latency = GaugeMetricFamily(
        "redfence_node_latency_seconds", "How long its last answered command took.", labels=_NODE
    )
    offset = GaugeMetricFamily(
        "redfence_node_clock_offset_seconds", "Its wall clock minus this machine's.", labels=_NODE
    )
    distrusted = GaugeMetricFamily(
        "redfence_node_clock_distrusted_seconds",
        "How much longer its votes do not count, because its clock was set.",
        labels=_NODE,
    )
    unanswered = GaugeMetricFamily(
        "redfence_node_commands_unanswered", "Commands that it has not answered yet.", labels=_NODE
    )
    failed = CounterMetricFamily(
        "redfence_node_commands_failed",
        "Commands that got no reply that counts, by cause.",
        labels=(*_NODE, "cause"),
    )
    for index, node in enumerate(nodes):
        labels = (str(index), node.address)
        for each in NodeState:
            state.add_metric((*labels, each.name.lower()), each is node.state)
        changes.add_metric(labels, node.state_changes)
        if node.latency_ms is not None:
            latency.add_metric(labels, node.latency_ms / 1000)
        if node.clock_offset_ms is not None:
            offset.add_metric(labels, node.clock_offset_ms / 1000)
        distrusted.add_metric(labels, node.clock_distrusted_ms / 1000)
        unanswered.add_metric(labels, node.unanswered)
        for cause, count in node.failures.items():
            failed.add_metric((*labels, cause.name.lower()), count)
    yield from (state, changes, latency, offset, distrusted, unanswered, failed)


def _waiters(waiting: WaitingView) -> Iterator[Metric]:
    yield GaugeMetricFamily("redfence_waiters", "Acquires that wait at this server.", waiting.count)
    yield GaugeMetricFamily("redfence_waiters_max", "The setting waiters_max.", waiting.limit)
    yield GaugeMetricFamily("redfence_waiter_queues", "Resources for which acquires wait.", waiting.resources)
    yield GaugeMetricFamily(
        "redfence_waiter_queue_longest", "Acquires that wait for the most wanted resource.", waiting.longest
    )
    yield CounterMetricFamily(
        "redfence_handovers", "Releases that handed the lock to a waiter in one step.", waiting.handovers
    )


def _limits(shares: Shares) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "redfence_stream_room_taken", "Commands for which streams have taken room.", shares.commands.taken
    )
    yield GaugeMetricFamily(
        "redfence_stream_room_max", "The setting commands_server_max.", shares.commands.size
    )
    refusals = CounterMetricFamily(
        "redfence_limit_refusals", "Times that a peer wanted more than its part.", labels=("limit",)
    )
    refusals.add_metric(("commands_server_max",), shares.commands.refusals)
    refusals.add_metric(("connections_max",), shares.connections.places.refusals)
    refusals.add_metric(("buffered_bytes_max",), shares.connections.buffered_bytes.refusals)
    refusals.add_metric(("new_resources_per_second",), shares.new_names.refusals)
    yield refusals


def _connections(shares: Shares | None) -> Iterator[Metric]:
    """Yield all names without a value if the connections are not known: 0 would be wrong."""
    gauges = [
        GaugeMetricFamily(f"redfence_{name}", f"{text}, only with the transport fast.")
        for name, text in (
            ("connections", "Open connections"),
            ("connections_max", "How many may be open"),
            ("buffered_bytes", "Bytes of open calls and unread answers"),
            ("buffered_bytes_max", "How many there may be"),
        )
    ]
    if shares is not None:
        places, buffered = shares.connections.places, shares.connections.buffered_bytes
        for gauge, value in zip(
            gauges, (places.taken, places.size, buffered.taken, buffered.size), strict=True
        ):
            gauge.add_metric((), value)
    yield from gauges
