"""The soak in small: that it runs and tells what it saw, and that its judge finds a leak."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.processes.process_look import look_at_process
from harness.soak.judge import Sample, Status, Wanted, judge
from harness.soak.run import soak
from redfence_server.embedded.binary import RedisBinary

WANTED = Wanted(pairs_per_second=1_000, streams=1_000, seconds=1_800)
MIB = 2**20


def run_of(
    *, pairs_per_second: float = 1_000, streams: int = 1_000, leaks_mib: float = 0, leaks_fds: int = 0
) -> list[Sample]:
    """Return what is seen of half an hour, with what leaks between the end of the warm-up and the end."""
    samples = []
    for number in range(181):
        at_s = number * 10.0
        # Until it is warm the server grows much, and after that by as much in each second.
        share = max(0.0, at_s - 300) / 1_500
        warm = min(1.0, at_s / 300)
        rss_mib = 60 + 40 * warm + leaks_mib * share
        samples.append(
            Sample(
                at_s=at_s,
                pairs=int(pairs_per_second * at_s),
                streams=streams,
                rss_bytes=int(rss_mib * MIB),
                fd_count=20 + round(leaks_fds * share),
                node_bytes=9 * MIB,
            )
        )
    return samples


@pytest.mark.parametrize(
    ("leaks_mib", "status"), [(0, Status.PASSED), (4.5, Status.PASSED), (5.2, Status.GREW), (50, Status.GREW)]
)
def test_memory_that_grows_by_a_twentieth_is_a_leak(leaks_mib: float, status: Status) -> None:
    assert judge(run_of(leaks_mib=leaks_mib), WANTED).status is status


def test_memory_that_grows_for_one_look_is_none() -> None:
    for place in range(181):
        samples = run_of()
        samples[place] = replace(samples[place], rss_bytes=2 * samples[place].rss_bytes)
        assert judge(samples, WANTED).status is Status.PASSED


def test_one_file_that_stays_open_is_a_leak() -> None:
    assert judge(run_of(leaks_fds=1), WANTED).status is Status.GREW
    samples = run_of()
    samples[-1] = replace(samples[-1], fd_count=99)
    assert judge(samples, WANTED).status is Status.PASSED


def with_a_stall() -> list[Sample]:
    """Return a run in which for three seconds nothing was answered, and then all of it."""
    samples = run_of()
    samples[90] = replace(samples[90], pairs=samples[90].pairs - 3_000)
    return samples


@pytest.mark.parametrize(
    "samples",
    [
        with_a_stall(),
        run_of(pairs_per_second=940),
        run_of(streams=940),
        run_of(pairs_per_second=940, leaks_mib=50, leaks_fds=9),
        run_of()[:35],
        [],
    ],
    ids=["a stall", "too slow", "too few streams", "too slow and leaking", "too short", "nothing"],
)
def test_a_run_that_was_not_the_one_asked_for_proves_nothing(samples: list[Sample]) -> None:
    assert judge(samples, WANTED).status is Status.INVALID


def test_a_short_run_has_a_short_warm_up() -> None:
    assert [replace(WANTED, seconds=seconds).warm_up_s for seconds in (60, 1_800, 7_200)] == [10, 300, 300]


def test_a_look_at_a_process_sees_its_memory_and_its_files() -> None:
    before = look_at_process(os.getpid())
    with Path(os.devnull).open("rb"):
        ballast = bytearray(b"x" * (64 * MIB))
        now = look_at_process(os.getpid())
    assert now.fd_count == before.fd_count + 1
    assert now.rss_bytes - before.rss_bytes > len(ballast) / 2
    assert look_at_process(os.getpid()).fd_count == before.fd_count


@pytest.mark.slow
def test_a_small_soak_runs_and_finds_no_growth(tmp_path: Path, redis_binary: RedisBinary) -> None:
    said: list[str] = []
    small = Wanted(pairs_per_second=100, streams=50, seconds=15)
    judgement = soak(small, folder=tmp_path, binary=redis_binary, say=said.append)
    assert judgement.status is not Status.GREW, judgement
    assert len(said) >= 12
    assert all("pairs/s" in line and "streams" in line for line in said)
    assert any("memory of the server" in sentence for sentence in judgement.sentences)
