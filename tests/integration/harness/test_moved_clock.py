"""A node lives by its moved clock."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.processes.fixture_types import FreshNodes
from harness.time.moved_clock import MovedClock
from redfence_server.embedded.binary import RedisBinary

STEP_MS = 30_000


async def test_a_step_forward_ends_keys_early_and_a_step_backward_late(
    nodes_with_clocks: FreshNodes, engine: RedisBinary
) -> None:
    [node] = await nodes_with_clocks(1, binary=engine)
    await node.call("SET", "short", "", "PX", STEP_MS - 1)
    await node.call("SET", "long", "", "PX", 10 * STEP_MS)
    await node.step_clock(STEP_MS)
    assert await node.call("EXISTS", "short") == 0
    left_ms = await node.call("PTTL", "long")
    assert isinstance(left_ms, int)
    assert 0 < left_ms <= 9 * STEP_MS
    await node.step_clock(-2 * STEP_MS)
    left_ms = await node.call("PTTL", "long")
    assert isinstance(left_ms, int)
    assert left_ms > 10 * STEP_MS


_ALL_CLOCKS = """
import ctypes, time
libc = ctypes.CDLL(None)
class Pair(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("us", ctypes.c_long)]
pair = Pair()
libc.gettimeofday(ctypes.byref(pair), None)
libc.time.restype = ctypes.c_long
CLOCK_REALTIME_COARSE = 5
print(time.clock_gettime_ns(time.CLOCK_MONOTONIC), time.clock_gettime_ns(time.CLOCK_BOOTTIME))
print(time.clock_gettime_ns(CLOCK_REALTIME_COARSE), round(time.clock_getres(CLOCK_REALTIME_COARSE) * 1e9))
print(time.time_ns(), pair.seconds * 10**9 + pair.us * 1000, libc.time(None) * 10**9)
"""


@pytest.mark.parametrize("offset_ms", [0.0, 12_345.678_9, -12_345.678_9])
def test_every_wall_clock_of_a_process_moves_and_no_other(
    clock_shim: Path, tmp_path: Path, offset_ms: float
) -> None:
    """The clocks by which a server measures time stay true."""
    clock = MovedClock(clock_shim, program=Path(sys.executable), path=tmp_path / "it's python")
    clock.step(offset_ms)
    true = (time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME)
    before = [time.clock_gettime_ns(each) for each in true]
    wall_before = time.time_ns()
    run = subprocess.run(
        [clock.wrapper, "-I", "-S", "-c", _ALL_CLOCKS], stdout=subprocess.PIPE, check=True, text=True
    )
    wall_after = time.time_ns()
    after = [time.clock_gettime_ns(each) for each in true]
    monotonic, boottime, coarse, coarse_unit_ns, precise, us, seconds = map(int, run.stdout.split())
    for low, told, high in zip(before, (monotonic, boottime), after, strict=True):
        assert low <= told <= high
    low, high = (instant + round(offset_ms * 1e6) for instant in (wall_before, wall_after))
    for told, unit_ns in ((precise, 1), (us, 1_000), (seconds, 1_000_000_000)):
        assert low // unit_ns * unit_ns <= told <= high
    assert low - coarse_unit_ns <= coarse <= high


_TELL = """
import sys, time
kinds = (time.CLOCK_BOOTTIME, time.CLOCK_MONOTONIC, time.CLOCK_REALTIME)
for _ in sys.stdin:
    print(*map(time.clock_gettime_ns, kinds), flush=True)
"""


def test_the_steady_clocks_of_a_process_lag_and_its_wall_clock_goes_on(
    clock_shim: Path, tmp_path: Path
) -> None:
    """They never go back."""
    clock = MovedClock(clock_shim, program=Path(sys.executable), path=tmp_path / "python")
    kinds = (time.CLOCK_BOOTTIME, time.CLOCK_MONOTONIC, time.CLOCK_REALTIME)
    with subprocess.Popen(
        [clock.wrapper, "-I", "-S", "-c", _TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None
        assert answers is not None

        def told() -> list[int]:
            questions.write("?\n")
            questions.flush()
            return list(map(int, answers.readline().split()))

        def assert_behind(ms: float) -> None:
            before = list(map(time.clock_gettime_ns, kinds))
            now = told()
            after = list(map(time.clock_gettime_ns, kinds))
            for kind, low, each, high in zip(kinds, before, now, after, strict=True):
                lag_ns = 0 if kind == time.CLOCK_REALTIME else round(ms * 1e6)
                # The difference of the two steady clocks is measured, and so inexact.
                assert low - lag_ns - 100_000 <= each <= high - lag_ns + 100_000

        assert_behind(0)
        clock.lag(200, over_ms=200)
        earlier = told()
        stood = set()
        while clock.lag_ms < 200:
            now = told()
            assert all(old <= new for old, new in zip(earlier, now, strict=True))
            earlier = now
            if 10 < clock.lag_ms < 190:
                stood.add(now[0])
        assert len(stood) == 1
        assert_behind(200)
        clock.lag(15, over_ms=100)
        time.sleep(0.11)
        assert_behind(215)
        questions.close()


def test_a_program_does_not_start_without_its_clock(clock_shim: Path, tmp_path: Path) -> None:
    """A test with an unmoved clock would prove nothing."""
    clock = MovedClock(clock_shim, program=Path("/bin/true"), path=tmp_path / "true")
    subprocess.run([clock.wrapper], check=True)
    for damage in ("", None):
        file = tmp_path / "true.clock"
        file.write_text(damage) if damage is not None else file.unlink()
        run = subprocess.run([clock.wrapper], stderr=subprocess.PIPE, check=False)
        assert run.returncode == 121
        assert b"clock_shim: " in run.stderr
