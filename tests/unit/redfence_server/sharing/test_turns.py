"""How a burst of calls begins."""

from __future__ import annotations

import asyncio

from redfence_server.http2.turns import Turns


async def test_a_burst_begins_in_order_in_bounded_parts_and_one_who_leaves_takes_no_place() -> None:
    turns, begun = Turns(), list[int]()

    async def call(number: int) -> None:
        await turns.begin()
        begun.append(number)

    tasks = [asyncio.ensure_future(call(number)) for number in range(350)]
    parts = [0]
    while len(begun) < 349:
        await asyncio.sleep(0)
        tasks[120].cancel()
        if len(begun) > parts[-1]:
            parts.append(len(begun))
    assert begun == [number for number in range(350) if number != 120]
    assert parts == [0, 100, 200, 300, 349]
    late = asyncio.ensure_future(call(350))
    await asyncio.sleep(0)
    assert late.done(), "without a burst a call begins at once"
