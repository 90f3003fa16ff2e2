"""A simulated connection keeps the order of its bytes, as TCP does."""

from __future__ import annotations

import asyncio

from harness.simulation.network import Route, Stream
from harness.simulation.processes import Chance, Process, on_processes


@on_processes
async def test_a_partition_and_a_pause_reorder_nothing() -> None:
    """The first bytes wait on the way, and the next ones in the paused process."""
    to, route, came = Process("receiver"), Route(Chance(0), (1, 2)), list[int]()
    stream = Stream(to)
    route.blocked = True
    route.carry(stream, lambda: came.append(1))
    await asyncio.sleep(0.01)
    to.pause()
    route.carry(stream, lambda: came.append(2))
    await asyncio.sleep(0.01)
    route.unblock()
    await asyncio.sleep(0.01)
    to.resume()
    await asyncio.sleep(0.01)
    assert came == [1, 2]
