"""The commands of one stream: how many, in what batches, and how they end."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from redfence_server.api.command_stream import CommandStream
from redfence_server.errors import TooManyCommandsError

pytestmark = pytest.mark.virtual_time


async def after(delay_s: float, result: str) -> str:
    await asyncio.sleep(delay_s)
    return result


class Peer:
    def __init__(self, *, pace_s: float = 0.0) -> None:
        self.batches: list[list[str]] = []
        self._pace_s = pace_s

    async def write(self, items: list[str]) -> None:
        await asyncio.sleep(self._pace_s)
        self.batches.append(items)


async def test_a_slow_command_holds_nobody_up_and_what_is_ready_together_leaves_together() -> None:
    stream: CommandStream[str] = CommandStream(open_max=10, batch_max=10)
    peer = Peer()
    for delay_s, name in ((3, "slow"), (1, "a"), (1, "b"), (2, "c")):
        stream.start(partial(after, delay_s, name))
    stream.finish()
    await stream.write_all(peer.write)
    assert peer.batches == [["a", "b"], ["c"], ["slow"]]


async def test_a_command_cancelled_before_its_first_step_is_answered_for() -> None:
    async def stubborn(name: str) -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return f"{name} cancelled"
        return name

    stream: CommandStream[str] = CommandStream(open_max=10, batch_max=10)
    peer = Peer()
    begun = stream.start(partial(stubborn, "begun"), never_begun=lambda: "not told")
    await asyncio.sleep(0)
    begun.cancel()
    stream.start(partial(stubborn, "never begun"), never_begun=lambda: "never begun").cancel()
    stream.start(partial(after, 1, "whole"), never_begun=lambda: "not told")
    stream.finish()
    await stream.write_all(peer.write)
    told = sorted(item for batch in peer.batches for item in batch)
    assert told == ["begun cancelled", "never begun", "whole"]


async def test_a_batch_is_bounded() -> None:
    stream: CommandStream[str] = CommandStream(open_max=10, batch_max=2)
    peer = Peer()
    for name in "abcde":
        stream.put(name)
    stream.finish()
    await stream.write_all(peer.write)
    assert peer.batches == [["a", "b"], ["c", "d"], ["e"]]


async def test_commands_without_a_written_result_are_bounded() -> None:
    stream: CommandStream[str] = CommandStream(open_max=2, batch_max=10)
    peer = Peer(pace_s=10)
    stream.start(partial(after, 1, "a"))
    stream.start(partial(after, 1, "b"))
    await asyncio.sleep(2)
    with pytest.raises(TooManyCommandsError):
        stream.start(partial(after, 1, "c"))
    writing = asyncio.ensure_future(stream.write_all(peer.write))
    await asyncio.sleep(11)
    stream.start(partial(after, 1, "d"))
    stream.finish()
    await writing
    assert peer.batches == [["a", "b"], ["d"]]


async def test_a_command_that_has_just_finished_counts_once() -> None:
    """Counted twice, a peer within the bound would be refused now and then."""
    stream: CommandStream[str] = CommandStream(open_max=2, batch_max=10)
    started: list[object] = []

    async def last_step() -> str:
        asyncio.get_running_loop().call_soon(lambda: started.append(stream.start(partial(after, 1, "next"))))
        return "first"

    stream.start(last_step)
    await asyncio.sleep(1)
    assert len(started) == 1


async def test_a_cancelled_stream_ends_with_the_results_it_had() -> None:
    stream: CommandStream[str] = CommandStream(open_max=10, batch_max=10)
    peer = Peer()
    done = stream.start(partial(after, 1, "done"))
    begun = stream.start(partial(after, 100, "never"))
    await asyncio.sleep(2)
    not_begun = stream.start(partial(after, 100, "never"))
    stream.cancel()
    stream.finish()
    await stream.write_all(peer.write)
    assert peer.batches == [["done"]]
    assert (done.cancelled(), begun.cancelled(), not_begun.cancelled()) == (False, True, True)
