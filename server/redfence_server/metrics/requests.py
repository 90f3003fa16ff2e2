"""Count requests by their outcome, and how long they took.

A request is a unary call, or one command of a stream. Both are counted alike, so a dashboard needs no second
query for Sessions. A label never has the name of a resource: the number of series stays bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from redfence_server.metrics.histogram import Histogram

_LABELS = ("service", "method")


class Requests:
    """Counts the requests of one kind: one service and method, or one command of a stream.

    Attributes:
        waits: these requests asked to wait, and so must not hide how long the others take.
        open_count: the requests without an answer.
        ended: the number of requests by their outcome.
    """

    __slots__ = ("durations", "ended", "method", "open_count", "service", "waits")

    def __init__(self, service: str, method: str, *, waits: bool) -> None:
        self.service = service
        self.method = method
        self.waits = waits
        self.open_count = 0
        self.ended: Counter[str] = Counter()
        self.durations = Histogram()

    def begin(self) -> None:
        """Count a request that has come."""
        self.open_count += 1

    def end(self, outcome: str, duration_s: float) -> None:
        """Count the end of a request, after `begin`."""
        self.open_count -= 1
        self.ended[outcome] += 1
        self.durations.observe(duration_s)


class RequestCounts:
    """Counts the requests, the streaming calls and the peers of one server; belongs to one thread."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, bool], Requests] = {}
        self._streams: dict[tuple[str, str], Requests] = {}
        self._peers: Counter[str] = Counter()

    def requests(self, service: str, method: str, *, waits: bool = False) -> Requests:
        """Return the counts of one kind of request, the same object each time."""
        found = self._requests.get((service, method, waits))
        if found is None:
            found = self._requests[service, method, waits] = Requests(service, method, waits=waits)
        return found

    def streams(self, service: str, method: str) -> Requests:
        """Return the counts of one kind of streaming call, the same object each time."""
        found = self._streams.get((service, method))
        if found is None:
            found = self._streams[service, method] = Requests(service, method, waits=False)
        return found

    def begin_call(self, peer: str) -> None:
        """Count one more call of a connection."""
        self._peers[peer] += 1

    def end_call(self, peer: str) -> None:
        """Count one call of a connection less, after `begin_call`."""
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as a collector of prometheus_client."""
        requests, streams = list(self._requests.values()), list(self._streams.values())
        yield _outcomes("redfence_requests", "Requests that ended, by outcome.", requests)
        durations = HistogramMetricFamily(
            "redfence_request_duration_seconds",
            "Time from a request to its answer; waits=yes: the request asked to wait for the lock.",
            labels=(*_LABELS, "waits"),
        )
        for each in requests:
            buckets, sum_s = each.durations.cumulated(), each.durations.sum_s
            durations.add_metric([each.service, each.method, "yes" if each.waits else "no"], buckets, sum_s)
        yield durations
        yield _open("redfence_requests_open", "Requests without an answer.", requests)
        yield _open("redfence_streams_open", "Streaming calls that are open.", streams)
        yield _outcomes("redfence_streams", "Streaming calls that ended, by outcome.", streams)
        yield GaugeMetricFamily("redfence_peers", "Connections with an open call.", len(self._peers))


def _outcomes(name: str, documentation: str, kinds: list[Requests]) -> CounterMetricFamily:
    """Return one series for each method and outcome; requests that waited and others count together."""
    totals: Counter[tuple[str, str, str]] = Counter()
    for kind in kinds:
        for outcome, count in kind.ended.items():
            totals[kind.service, kind.method, outcome] += count
    family = CounterMetricFamily(name, documentation, labels=(*_LABELS, "outcome"))
    for labels, count in totals.items():
        family.add_metric(labels, count)
    return family


def _open(name: str, documentation: str, kinds: list[Requests]) -> GaugeMetricFamily:
    totals: Counter[tuple[str, str]] = Counter()
    for kind in kinds:
        totals[kind.service, kind.method] += kind.open_count
    family = GaugeMetricFamily(name, documentation, labels=_LABELS)
    for labels, count in totals.items():
        family.add_metric(labels, count)
    return family
