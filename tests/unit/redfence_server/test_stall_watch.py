"""Whether the process was stopped: told by a beat that came too late."""

from __future__ import annotations

import asyncio

from harness.virtual_loop import LoopClock, on_virtual_time
from redfence_server.stall_watch import StallWatch


class JumpingClock:
    """The loop's clock, which can be set forward: to the loop it seems as if no time had passed, as after a SIGSTOP."""

    def __init__(self) -> None:
        self.jumped_ms = 0.0

    def now_ms(self) -> float:
        """Return the present instant."""
        return LoopClock().now_ms() + self.jumped_ms


@on_virtual_time
async def test_a_process_that_runs_is_never_quiet() -> None:
    """Beats come a little late, as timers do."""
    clock, stalls = JumpingClock(), list[float]()
    watch = StallWatch(clock, on_stall=lambda: stalls.append(clock.now_ms()))
    watch.start()
    for _ in range(50):
        await asyncio.sleep(0.09)
        clock.jumped_ms += 100  # a busy loop
        assert watch.quiet_ms() <= 0
    assert stalls == []
    watch.stop()


@on_virtual_time
async def test_after_a_stop_it_is_quiet_for_a_while() -> None:
    """For as long as it takes to read what came meanwhile."""
    clock, stalls = JumpingClock(), list[float]()
    watch = StallWatch(clock, on_stall=lambda: stalls.append(clock.now_ms()))
    watch.start()
    watch.start()
    await asyncio.sleep(1.05)
    clock.jumped_ms += 5_000
    await asyncio.sleep(0.06)
    assert 230 < watch.quiet_ms() <= 250
    assert len(stalls) == 1
    await asyncio.sleep(0.26)
    assert watch.quiet_ms() <= 0
    watch.stop()
    watch.stop()


@on_virtual_time
async def test_while_nobody_waits_it_does_not_beat() -> None:
    """A stop of which nobody's wait was affected is none."""
    clock, stalls = JumpingClock(), list[float]()
    watch = StallWatch(clock, on_stall=lambda: stalls.append(clock.now_ms()))
    watch.start()
    await asyncio.sleep(0.2)
    watch.stop()
    clock.jumped_ms += 60_000
    watch.start()
    await asyncio.sleep(0.2)
    assert watch.quiet_ms() <= 0
    assert stalls == []
    watch.stop()
