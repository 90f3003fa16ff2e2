"""How bursts of commands begin, and in what order peers get their turns."""

from __future__ import annotations

import asyncio

from redfence_server.sharing.turns import COMMANDS_PER_PART, Turns


async def test_a_burst_begins_in_order_in_bounded_parts_and_one_who_leaves_takes_no_place() -> None:
    turns, begun = Turns(), list[int]()

    async def call(number: int) -> None:
        await turns.begin("peer")
        begun.append(number)

    await turns.begin("other")  # with two peers the parts are smaller
    tasks = [asyncio.ensure_future(call(number)) for number in range(250)]
    parts = [0]
    while len(begun) < 249:
        await asyncio.sleep(0)
        tasks[120].cancel()
        if len(begun) > parts[-1]:
            parts.append(len(begun))
    assert begun == [number for number in range(250) if number != 120]
    # The first call after the first part begins at once as well: its peer did not wait yet.
    assert parts == [0, 17, *range(49, 249, 32), 249]
    late = asyncio.ensure_future(call(250))
    await asyncio.sleep(0)
    assert late.done(), "without a burst a call begins at once"


async def test_a_peer_with_few_commands_does_not_wait_behind_one_with_thousands() -> None:
    """Not even while the nodes have no room; but it gets no more than one part in a turn then."""
    room = True
    turns, begun = Turns(lambda _: room), list[str]()

    async def call(peer: str) -> None:
        await turns.begin(peer, COMMANDS_PER_PART)
        begun.append(peer)

    tasks = [asyncio.ensure_future(call("many")) for _ in range(100)]
    await turns.begin("other")
    await asyncio.sleep(0)
    room = False
    tasks += [asyncio.ensure_future(call("few")) for _ in range(2)]
    await asyncio.sleep(0)
    assert begun.count("few") == 1
    before = len(begun)
    await asyncio.sleep(0.01)
    assert len(begun) == before, "nothing begins without room"
    room = True
    await asyncio.gather(*tasks)
    assert "few" in begun[before : before + 5], "peers take turns"
