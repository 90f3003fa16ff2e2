"""Look at every node from outside, without a server: gather the facts that doctor.py judges. Reads only, and changes nothing.

A node may be away, hang, die midway or refuse a command; what was learnt until then is kept, and the rest told as missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from redfence_server import scripts
from redfence_server.clock import WallClock
from redfence_server.node_examination import DURABLE_SETTINGS, examine, read_info
from redfence_server.node_facts import ClockSample, NodeFacts, Trouble, read_process
from redfence_server.redis_dial import (
    DialAnswerError,
    DialDeniedError,
    DialError,
    DialledNode,
    DialRefusedError,
    NodeUrl,
    dial,
)

_T = TypeVar("_T")

_SETTINGS: Final = (*DURABLE_SETTINGS, "save", "stop-writes-on-bgsave-error")
_PAUSE_MS: Final = 50
"""Between two round trips: spread over the time of watching, they show also what comes and goes."""
_PATIENCE: Final = 5
"""How many times the time-out of one step a node may take for all steps together."""


@dataclass(frozen=True, slots=True)
class CheckupSettings:
    """How to look.

    Attributes:
        keys: the names of the keys on the nodes.
        dial_timeout_ms: how long each step of connecting, and each command, may take.
        watch_ms: for how long clock and latency are watched. A clock that runs wrong by a few % shows within a second.
    """

    keys: scripts.Keyspace
    dial_timeout_ms: int
    watch_ms: int = 1_000

    @property
    def deadline_ms(self) -> int:
        """After how long a node is given up, in each of the two passes, that does answer, but ever so slowly."""
        return _PATIENCE * self.dial_timeout_ms + 2 * self.watch_ms


async def check_up(
    nodes: Sequence[NodeUrl], settings: CheckupSettings, *, clock: WallClock
) -> list[NodeFacts]:
    """Return the facts about each node, by index, after two passes of `deadline_ms` each at most.

    The first asks each node what it knows, of itself and of the others; the second, only when all have told, what it is now. So no node
    is measured by what another one has learnt of it since (test_nodes_under_load_have_not_forgotten_anything).

    Cancellation: nothing stays open.
    """
    checkups = [_Checkup(index, url, settings, clock) for index, url in enumerate(nodes)]
    try:
        await asyncio.gather(*(checkup.meet() for checkup in checkups))
        await asyncio.gather(*(checkup.examine() for checkup in checkups))
    finally:
        await asyncio.gather(*(checkup.close() for checkup in checkups))
    return [checkup.facts for checkup in checkups]


class _Checkup:
    """One look at one node."""

    def __init__(self, index: int, url: NodeUrl, settings: CheckupSettings, clock: WallClock) -> None:
        self._url = url
        self._settings = settings
        self._clock = clock
        self._node: DialledNode | None = None
        self.facts = NodeFacts(index=index, address=url.address)

    async def meet(self) -> None:
        """Connect, and ask who the node is and what it knows."""
        await self._guarded(self._meet())

    async def examine(self) -> None:
        """Look at it closely, and watch it for a while."""
        if self.facts.trouble is None:
            await self._guarded(self._examine())

    async def close(self) -> None:
        """Leave the node. May be repeated."""
        if self._node is not None:
            await self._node.close()

    async def _guarded(self, steps: Coroutine[None, None, None]) -> None:
        """Carry out steps within the deadline, and note why they came to no end."""
        try:
            async with asyncio.timeout(self._settings.deadline_ms / 1000):
                await steps
        except TimeoutError:
            self._note_trouble(Trouble.UNREACHABLE, f"not all within {self._settings.deadline_ms / 1000:g} s")
        except DialDeniedError as error:
            self._note_trouble(Trouble.DENIED, str(error))
        except DialAnswerError as error:
            self._note_trouble(Trouble.UNINTELLIGIBLE, str(error))
        except DialError as error:
            # Some time-outs of the system have no text.
            self._note_trouble(Trouble.UNREACHABLE, str(error) or "no answer in time")

    def _note_trouble(self, trouble: Trouble, reason: str) -> None:
        self.facts = replace(self.facts, trouble=trouble, reason=reason)

    async def _meet(self) -> None:
        self._node = node = await dial(self._url, timeout_ms=self._settings.dial_timeout_ms)
        info = await self._allowed(read_info(node, "default"))
        if info is not None:
            self.facts = replace(self.facts, process=read_process(info))
        if self._is_loading:
            return  # it answers nothing else
        found = await self._allowed(examine(node, self._settings.keys))
        if found is not None:
            # A replica shows its primary's.
            self.facts = replace(self.facts, known=None if found.is_replica else found.identity)

    async def _examine(self) -> None:
        node = self._node
        assert node is not None, "whoever has no trouble is connected"
        if self._is_loading:
            return
        self.facts = replace(self.facts, settings=await self._allowed(_read_settings(node)))
        self.facts = replace(self.facts, found=await self._allowed(examine(node, self._settings.keys)))
        await self._watch(node)

    @property
    def _is_loading(self) -> bool:
        return self.facts.process is not None and self.facts.process.loading

    async def _allowed(self, answer: Awaitable[_T]) -> _T | None:
        """Return the answer, or None if the node refuses, and note that."""
        try:
            return await answer
        except DialRefusedError as error:
            command = str(error).partition(":")[0]
            self.facts = replace(self.facts, refused={**self.facts.refused, command: str(error)})
            return None

    async def _watch(self, node: DialledNode) -> None:
        until_ms = self._clock.now_ms() + self._settings.watch_ms
        await self._allowed(self._read_clock(node))
        while True:
            await asyncio.sleep(_PAUSE_MS / 1000)
            if "PING" not in self.facts.refused:
                await self._allowed(self._ping(node))
            if "TIME" not in self.facts.refused:
                await self._allowed(self._read_clock(node))
            if self._clock.now_ms() >= until_ms:
                return

    async def _ping(self, node: DialledNode) -> None:
        sent_ms = self._clock.now_ms()
        await node.command("PING")
        taken_ms = self._clock.now_ms() - sent_ms
        self.facts = replace(self.facts, pings_ms=(*self.facts.pings_ms, taken_ms))

    async def _read_clock(self, node: DialledNode) -> None:
        # In this order, so that also the wall clock is read within the round trip.
        sent_ms, wall_ms = self._clock.now_ms(), self._clock.wall_ms()
        seconds, microseconds = await node.command("TIME")
        received_ms = self._clock.now_ms()
        sample = ClockSample(
            sent_ms=sent_ms,
            received_ms=received_ms,
            node_ms=int(seconds) * 1000 + int(microseconds) / 1000,
            wall_ms=wall_ms,
        )
        self.facts = replace(self.facts, clock=(*self.facts.clock, sample))


async def _read_settings(node: DialledNode) -> dict[str, str]:
    settings = {}
    for name in _SETTINGS:
        # One at a time: before Redis 7, CONFIG GET takes one name.
        if answer := await node.command("CONFIG", "GET", name):
            settings[name] = answer[1].decode(errors="replace")
    return settings
