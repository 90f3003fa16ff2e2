"""Check up nodes without a server: examine each, then watch its clock and latency. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from redfence_server.clock import WallClock
from redfence_server.membership.admin import AdminSettings, connect
from redfence_server.membership.examination import ClockReading, ExaminationRefusedError, Findings
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import (
    Dial,
    DialAnswerError,
    DialError,
    DialledNode,
    DialRefusedError,
    NodeUrl,
    dial,
)

WATCH_MS: Final = 1_000
"""A clock that runs wrong by a few % shows within a second."""
_PAUSE_MS: Final = 50
_STEPS_MAX: Final = 5
"""All steps of a node together may take this many times the time-out of one step."""


@dataclass(slots=True)
class Checkup:
    """The facts that one node showed until its checkup ended or broke off.

    Attributes:
        address: never with a password.
        found: None if the examination failed.
        error: why the examination or the watch failed; None if both completed.
        refuses_writes: the node refuses writes because of its disk.
        readings: of the node's clock. The first came with the examination.
        wall_ms: the wall clock of this machine minus its steady clock.
    """

    index: int
    address: str
    found: Findings | None = None
    error: DialError | None = None
    refuses_writes: bool = False
    readings: list[ClockReading] = field(default_factory=list)
    wall_ms: float = 0.0

    @property
    def info(self) -> Mapping[str, str]:
        """All fields of INFO; empty if the node did not answer it."""
        if self.found is not None:
            return self.found.info
        return self.error.info if isinstance(self.error, ExaminationRefusedError) else {}

    def number(self, name: str) -> int:
        """Return a field of INFO; 0 if the node did not show it."""
        text = self.info.get(name, "")
        return int(text) if text.isdecimal() else 0

    @property
    def software(self) -> tuple[str, str]:
        """The engine and its version. Valkey also shows a Redis version."""
        valkey = self.info.get("valkey_version")
        return ("valkey", valkey) if valkey else ("redis", self.info.get("redis_version", "0"))

    @property
    def memory_bytes(self) -> tuple[int, int]:
        """The memory that counts against the limit, and the limit; 0 for none."""
        return self.number("used_memory") - self.number("mem_not_counted_for_evict"), self.number("maxmemory")

    @property
    def trips_ms(self) -> list[float]:
        """The lengths of the watch's round trips."""
        return [reading.trip_ms for reading in self.readings[1:]]

    @property
    def clock_offset_ms(self) -> tuple[float, float] | None:
        """The lead of the node's clock over this machine's, and the largest possible error of it."""
        if not self.readings:
            return None
        best = min(self.readings, key=lambda reading: reading.trip_ms)
        unsure_ms = best.trip_ms / 2
        return best.node_ms - self.wall_ms - best.sent_ms - unsure_ms, unsure_ms


async def check_up(
    urls: Sequence[NodeUrl],
    keys: scripts.Keyspace,
    *,
    dial_timeout_ms: int,
    clock: WallClock,
    watch_ms: int = WATCH_MS,
    dial: Dial = dial,
) -> list[Checkup]:
    """Return each node's facts, by index. `dial_timeout_ms` bounds each step of connecting and each command.

    Cancellation: nothing stays open.
    """
    admin = AdminSettings(keys, dial_timeout_ms, clock, dial)
    wall_ms = clock.wall_ms() - clock.now_ms()
    deadline_ms = _STEPS_MAX * dial_timeout_ms + 2 * watch_ms
    checkups = [Checkup(index, url.address, wall_ms=wall_ms) for index, url in enumerate(urls)]

    async def collect(checkup: Checkup) -> None:
        try:
            async with asyncio.timeout(deadline_ms / 1000):
                connection = await connect(checkup.index, urls[checkup.index], stack, admin)
                if connection.node is None or connection.snapshot.found is None:
                    checkup.error = connection.snapshot.error or DialError(connection.snapshot.problem)
                    return
                checkup.found = connection.snapshot.found
                checkup.readings.append(checkup.found.clock)
                await _watch(checkup, connection.node, clock, watch_ms)
        except TimeoutError:
            checkup.error = DialError(f"its answers did not all come within {deadline_ms / 1000:g} s")
        except DialError as error:
            checkup.error = error

    async with AsyncExitStack() as stack:
        await asyncio.gather(*map(collect, checkups))
    return checkups


async def _watch(checkup: Checkup, node: DialledNode, clock: WallClock, watch_ms: int) -> None:
    # Redis refuses PING while it refuses writes because of its disk.
    (pong,) = await node.commands(("PING",))
    checkup.refuses_writes = isinstance(pong, DialRefusedError) and "MISCONF" in str(pong)
    until_ms = clock.now_ms() + watch_ms
    while clock.now_ms() < until_ms:
        await asyncio.sleep(_PAUSE_MS / 1000)
        sent_ms = clock.now_ms()
        answer = await node.command("TIME")
        received_ms = clock.now_ms()
        try:
            seconds, microseconds = map(int, answer)
        except (TypeError, ValueError) as error:
            raise DialAnswerError(f"it answers TIME as no node does: {error}") from error
        node_ms = seconds * 1000 + microseconds / 1000
        checkup.readings.append(ClockReading(sent_ms, received_ms, node_ms))
