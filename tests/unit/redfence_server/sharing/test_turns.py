"""How bursts of commands begin, and in what order peers get their turns."""

from __future__ import annotations

import asyncio
import itertools

from redfence_server.sharing.turns import COMMANDS_PER_PART, Turns


async def test_beside_a_burst_commands_begin_in_order_in_small_parts() -> None:
    """One who leaves takes no place."""
    turns, begun = Turns(unanswered_of=lambda peer: 512 * (peer == "peer")), list[int]()

    async def call(number: int) -> None:
        await turns.begin("peer")
        begun.append(number)

    await turns.begin("other")
    tasks = [asyncio.ensure_future(call(number)) for number in range(250)]
    parts = [0]
    while len(begun) < 249:
        await asyncio.sleep(0)
        tasks[120].cancel()
        if len(begun) > parts[-1]:
            parts.append(len(begun))
    assert begun == [number for number in range(250) if number != 120]
    # The first call after the first part begins at once as well: its peer did not wait yet.
    assert parts == [0, 17, *range(33, 249, 16), 249]
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


async def test_two_peers_without_a_burst_begin_in_large_parts() -> None:
    """Another peer makes them small only while one of the two has more than 511 commands that wait."""
    turns, begun = Turns(), list[str]()

    async def call(peer: str) -> None:
        await turns.begin(peer)
        begun.append(peer)

    async def largest_part(count: int) -> int:
        await turns.begin("other")
        tasks = [asyncio.ensure_future(call("peer")) for _ in range(count)]
        await asyncio.sleep(0)
        await turns.begin("other")
        parts = [len(begun)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            parts.append(len(begun))
        begun.clear()
        return max(after - before for before, after in itertools.pairwise(parts))

    assert await largest_part(700) > COMMANDS_PER_PART
    assert await largest_part(2_000) <= COMMANDS_PER_PART
