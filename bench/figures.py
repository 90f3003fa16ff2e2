"""Computes what the tables show: medians over the rounds, ratios within a round, CPU time per pair."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rounds = Mapping[int, "Measurement"]


@dataclass(frozen=True, slots=True)
class Target:
    """One service with one client: what a row of the table is about.

    Attributes:
        name: unique in the run.
        kind: which client, or which peer.
        variant: the name of the redfence server; the empty string for a peer.
        node_count: how many nodes vote; 0 for a service without nodes.
    """

    name: str
    kind: str
    variant: str
    node_count: int

    def is_same_but_variant(self, other: Target) -> bool:
        """Return whether both differ in the redfence server at most."""
        return (self.kind, self.node_count) == (other.kind, other.node_count)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One target under one workload in one round.

    Attributes:
        result: what the load program printed.
        cpu_s: the CPU seconds of each role while it measured, summed over the role's processes.
    """

    target: str
    workload: str
    round_number: int
    result: Mapping[str, Any]
    cpu_s: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Pairs per second; of one resource, hand-overs; of leases, renewals."""
        counted = "hand_overs" if self.workload == "one" else "pairs"
        if lease_count(self.workload) is not None:
            counted = "renewals"
        return float(self.result[counted] / self.result["seconds"])

    def cpu_us_per_pair(self, role: str) -> float | None:
        """Return the CPU microseconds of all processes of a role per pair, or None if there is none."""
        used = self.cpu_s.get(role)
        return None if used is None else used * 1e6 / self.result["pairs"]

    def cores(self, role: str) -> float:
        """Return the cores that all processes of a role kept busy."""
        return float(self.cpu_s[role] / self.result["seconds"])

    def latency_ms(self, name: str) -> float:
        """Return a percentile of the latency of a pair: p50_ms, p99_ms or p99_9_ms."""
        return float(self.result["pair"][name])


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and their extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        return cls(statistics.median(values), min(values), max(values))


def by_round(measurements: Sequence[Measurement], *, target: str, workload: str) -> dict[int, Measurement]:
    """Return the measurements of one target under one workload, by round."""
    return {
        each.round_number: each
        for each in measurements
        if each.target == target and each.workload == workload
    }


def maximum(measurements: Sequence[Measurement], *, target: str) -> float | None:
    """Return the greatest median rate among the numbers of workers, or None if none was measured."""
    workloads = {each.workload for each in measurements if each.workload.isdecimal()}
    rounds = [by_round(measurements, target=target, workload=each).values() for each in workloads]
    return max((statistics.median(each.rate for each in found) for found in rounds if found), default=None)


def lease_count(workload: str) -> int | None:
    """Return how many leases the workload `leases-N` keeps alive, or None if it is another workload."""
    name, _, count = workload.partition("-")
    return int(count) if name == "leases" and count.isdecimal() else None


def ratio(ours: Rounds, theirs: Rounds, *, of_latency: bool = False) -> float | None:
    """Return the median of the ratios within each round, or None if no round has both.

    Other load on the machine changes from round to round, so a ratio compares neighbours in time. A
    ratio above 1 is in our favour: our rate by theirs, or their median latency by ours.
    """
    ratios = [
        theirs[number].latency_ms("p50_ms") / ours[number].latency_ms("p50_ms")
        if of_latency
        else ours[number].rate / theirs[number].rate
        for number in ours.keys() & theirs.keys()
        if theirs[number].rate
    ]
    return statistics.median(ratios) if ratios else None
