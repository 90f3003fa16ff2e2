"""How late a loop was is noted, and nothing else."""

from __future__ import annotations

import asyncio
import time

import pytest

from harness.processes.servers import now_ms
from harness.time.loop_lag import LoopLag


@pytest.mark.slow
async def test_a_loop_that_stood_still_is_told_from_one_that_waited() -> None:
    async with LoopLag() as loop:
        before_ms = now_ms()
        await asyncio.sleep(0.1)
        # Whatever the machine did meanwhile.
        already_ms = loop.late_ms(since_ms=before_ms)
        since_ms = now_ms()
        time.sleep(0.3)  # noqa: ASYNC251  (this is what is noticed)
        assert loop.late_ms(since_ms=since_ms) >= 280
        assert loop.cost_ms(since_ms=since_ms) >= loop.late_ms(since_ms=since_ms) + 250
        assert loop.late_ms(since_ms=before_ms) >= already_ms + 280
        after_ms = now_ms()
        assert loop.late_ms(since_ms=after_ms) < 50
        time.sleep(0.3)  # noqa: ASYNC251  (the same)
        # The lateness that is over has not been asked for yet.
        after_ms = now_ms()
        assert loop.late_ms(since_ms=after_ms) < 50
