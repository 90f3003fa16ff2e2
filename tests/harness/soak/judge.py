"""Decides from samples whether a server grew; it measures nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from statistics import median
from typing import Final

RSS_GROWTH_MAX: Final = 0.05
"""The server's memory may grow by less than this share from the end of the warm-up to the end."""
PACE_LEAST: Final = 0.95
"""The least share of the wanted pairs and streams; with less, the run is invalid."""
PACE_LEAST_AT_ONCE: Final = 0.8
"""The least share between any two samples. After a stall all late calls come at once and take memory."""
_WARM_UP_MAX_S: Final = 300.0
# One sample may meet a large buffer.
_LOOKS_AT_EACH_END: Final = 3


class Status(IntEnum):
    """The exit status of the command."""

    PASSED = 0
    GREW = 1
    INVALID = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one instant.

    Attributes:
        at_s: since the load began.
        pairs: of acquire and release, finished since the load began.
        streams: open now.
        rss_bytes, fd_count: of the server.
        node_bytes: memory used by all nodes together.
    """

    at_s: float
    pairs: int
    streams: int
    rss_bytes: int
    fd_count: int
    node_bytes: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """The requested load.

    Attributes:
        pairs_per_second: of acquire and release.
        streams: open at once.
        seconds: for how long.
    """

    pairs_per_second: float
    streams: int
    seconds: float

    @property
    def warm_up_s(self) -> float:
        """The time after which the server has the memory that it needs."""
        return min(_WARM_UP_MAX_S, self.seconds / 6)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a soak.

    Attributes:
        status: the exit status.
        sentences: the reason, with the figures.
    """

    status: Status
    sentences: tuple[str, ...]


def judge(samples: Sequence[Sample], wanted: Wanted) -> Judgement:
    """Compare the end of a run with the end of its warm-up; a run without its pace is invalid."""
    measured = [sample for sample in samples if sample.at_s >= wanted.warm_up_s]
    if len(measured) < 2 * _LOOKS_AT_EACH_END:
        looks = f"{len(measured)} looks after the warm-up; it takes {2 * _LOOKS_AT_EACH_END}"
        return Judgement(Status.INVALID, (looks,))
    pace, streams = _pace(measured), median(sample.streams for sample in measured)
    early, late = measured[:_LOOKS_AT_EACH_END], measured[-_LOOKS_AT_EACH_END:]
    rss_before, rss_after = (median(each.rss_bytes for each in ends) for ends in (early, late))
    # A connection counts twice for a moment while it is replaced.
    fds_before, fds_after = max(each.fd_count for each in early), min(each.fd_count for each in late)
    growth = rss_after / rss_before - 1
    worst = min(_pace(pair) for pair in pairwise(measured))
    sentences = (
        f"pace: {pace:,.0f} of {wanted.pairs_per_second:,.0f} pairs/s, at the worst {worst:,.0f}",
        f"streams: {streams:,.0f} of {wanted.streams:,}",
        f"memory of the server: {_mib(rss_before)} -> {_mib(rss_after)} ({growth:+.1%})",
        f"files of the server: {fds_before} -> {fds_after}",
        f"memory of the nodes: {_mib(early[0].node_bytes)} -> {_mib(late[-1].node_bytes)}",
    )
    kept = pace >= PACE_LEAST * wanted.pairs_per_second and streams >= PACE_LEAST * wanted.streams
    if not kept or worst < PACE_LEAST_AT_ONCE * wanted.pairs_per_second:
        return Judgement(Status.INVALID, sentences)
    if growth >= RSS_GROWTH_MAX or fds_after > fds_before:
        return Judgement(Status.GREW, sentences)
    return Judgement(Status.PASSED, sentences)


def _pace(samples: Sequence[Sample]) -> float:
    first, last = samples[0], samples[-1]
    return (last.pairs - first.pairs) / (last.at_s - first.at_s)


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
