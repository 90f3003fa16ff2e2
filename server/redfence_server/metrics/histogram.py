"""Count durations in buckets. A plain list, because an observation is part of every request."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""The upper bounds of the buckets, from one round trip to a node up to a long wait."""


class Histogram:
    """Counts durations; belongs to one thread."""

    __slots__ = ("_counts", "sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one duration in seconds."""
        self._counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s

    def cumulated(self) -> list[tuple[str, float]]:
        """Return each upper bound with the number of durations up to it, as Prometheus wants them."""
        total, buckets = 0.0, []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets
