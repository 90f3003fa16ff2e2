"""The commands of one stream: how many, in what batches, and how they end."""

from __future__ import annotations

import asyncio

import pytest

from redfence_server.api.command_stream import CommandStream
from redfence_server.errors import TooManyCommandsError
from redfence_server.sharing.budget import Budget

pytestmark = pytest.mark.virtual_time


def start(stream: CommandStream[str], delay_s: float, result: str) -> None:
    stream.begin()
    asyncio.get_running_loop().call_later(delay_s, stream.answer, result)


class Peer:
    def __init__(self, *, pace_s: float = 0.0) -> None:
        self.batches: list[list[str]] = []
        self._pace_s = pace_s

    async def write(self, items: list[str]) -> None:
        await asyncio.sleep(self._pace_s)
        self.batches.append(items)


async def test_a_slow_command_holds_nobody_up_and_what_is_ready_together_leaves_together() -> None:
    stream: CommandStream[str] = CommandStream(open_max=10, batch_max=10, budget=Budget(1_000), peer="peer")
    peer = Peer()
    for delay_s, name in ((3, "slow"), (1, "a"), (1, "b"), (2, "c")):
        start(stream, delay_s, name)
    stream.finish()
    await stream.write_all(peer.write)
    assert peer.batches == [["a", "b"], ["c"], ["slow"]]


async def test_a_batch_is_bounded() -> None:
    stream: CommandStream[str] = CommandStream(open_max=10, batch_max=2, budget=Budget(1_000), peer="peer")
    peer = Peer()
    for name in "abcde":
        stream.put(name)
    stream.finish()
    await stream.write_all(peer.write)
    assert peer.batches == [["a", "b"], ["c", "d"], ["e"]]


async def test_commands_without_a_written_result_are_bounded() -> None:
    """A command with a result in the queue counts once; written, it counts no more."""
    stream: CommandStream[str] = CommandStream(open_max=2, batch_max=10, budget=Budget(1_000), peer="peer")
    peer = Peer(pace_s=10)
    start(stream, 1, "a")
    start(stream, 3, "b")
    await asyncio.sleep(2)
    with pytest.raises(TooManyCommandsError):
        stream.begin()
    writing = asyncio.ensure_future(stream.write_all(peer.write))
    await asyncio.sleep(2)
    assert stream.unwritten == ("b",)
    start(stream, 1, "d")
    stream.finish()
    await writing
    assert peer.batches == [["a"], ["b", "d"]]


async def test_the_room_of_commands_that_begin_later_is_kept_for_them() -> None:
    """Otherwise each of many streams could keep a message with thousands of commands."""
    budget, peer = Budget(10_000), Peer()
    stream: CommandStream[str] = CommandStream(open_max=2_000, batch_max=100, budget=budget, peer="peer")
    stream.make_room(2_000)
    writing = asyncio.ensure_future(stream.write_all(peer.write))
    for begun in range(100, 2_100, 100):
        for _ in range(100):
            start(stream, 0, "a")
        await asyncio.sleep(1)
        assert budget.taken >= 2_000 - begun
    assert budget.taken < 1_000
    stream.finish()
    await writing
    stream.close()
    assert not budget.taken
