"""Examine one voting node again and again, as admission does, and sample its clock.

Within one heartbeat a node that admission would refuse now loses its vote at this server. Its votes for new
grants count only while the server trusts its clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Final

import structlog

from redfence_server.clock import Clock
from redfence_server.membership import fence
from redfence_server.membership.admission import Admitted, Forgot, Judgement, Rejected
from redfence_server.membership.examination import ClockReading, Examinable, Findings, examine
from redfence_server.membership.joining import NodeJoining
from redfence_server.membership.node_clock import ClockWitnesses, NodeClock, Step
from redfence_server.randomness import Randomness
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import DialAnswerError, DialError, DialRefusedError

_MISSED_MAX: Final = 2
"""The server examines a node on a new connection after so many missed heartbeats in a row."""


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """The heartbeats of all nodes share these; the server examines each node every `interval_ms`."""

    interval_ms: int
    keys: scripts.Keyspace
    witnesses: ClockWitnesses


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """Why the server must examine a node that voted on a new connection.

    Attributes:
        admission_is_void: its admission id has changed, so the node refuses every command under the old one.
    """

    reason: str
    admission_is_void: bool


class Heartbeat:
    """Examines one node at intervals, and keeps what its clock showed over all connections."""

    def __init__(
        self,
        index: int,
        *,
        settings: HeartbeatSettings,
        joining: NodeJoining,
        clock: Clock,
        randomness: Randomness,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._index = index
        self._settings = settings
        self._joining = joining
        self._clock = clock
        self._randomness = randomness
        self._log = log
        self._now = asyncio.Event()
        self._admission = ""
        # A clock step costs the node its votes for this long: every lease from before has ended by then.
        self._step_cost_ms = 0.0
        self.node_clock: NodeClock | None = None
        """None until this server first admitted the node."""
        self.grant_refusal = ""
        """Why the node would not have granted at its last examination: its error, or that it is late."""
        self.memory_share = 0.0
        """The part of its memory that the node used at its last examination."""

    def begin(self, found: Findings, *, node_timeout_ms: int) -> None:
        """Take the findings of the admission: votes count only once the clock is known.

        An examination at an admission may take longer than `node_timeout_ms`, but a command may not.
        """
        assert found.identity is not None, "a node that was admitted has an identity"
        self._admission = found.identity.admission
        self._step_cost_ms = fence.wait_ms(found.identity.max_ttl_ms)
        self._note_findings(found)
        if found.clock.trip_ms >= node_timeout_ms:
            self._note_lateness(
                f"its answer took {found.clock.trip_ms:.0f} ms; node_timeout_ms is {node_timeout_ms}"
            )

    def bring_forward(self) -> None:
        """Make the next heartbeat come now."""
        self._now.set()

    async def run(
        self, connection: Examinable, on_alive: Callable[[], None], on_missed: Callable[[], None]
    ) -> NotAdmitted:
        """Return when admission would refuse the node.

        Before that, call `on_alive` after each heartbeat with an answer in time, else `on_missed`.

        Cancellation: nothing is changed.
        """
        missed = 0
        while True:
            await self._pause()
            known = self._joining.known()
            try:
                found = await examine(connection, self._settings.keys, self._clock)
            except (DialRefusedError, DialAnswerError) as error:
                return NotAdmitted(str(error), admission_is_void=False)
            except DialError as error:
                # A node may be late once. But without an examination, nothing shows that it may still vote.
                missed += 1
                self._note_lateness(f"it missed a heartbeat: {error}")
                if missed < _MISSED_MAX:
                    on_missed()
                    continue
                return NotAdmitted(f"it missed {missed} heartbeats: {error}", admission_is_void=False)
            missed = 0
            judgement = self._joining.judge(found, known)
            is_void = found.identity is None or found.identity.admission != self._admission
            if is_void or not isinstance(judgement, Admitted):
                return NotAdmitted(_reason(judgement), admission_is_void=is_void)
            self._note_findings(found)
            try:
                await self._record_step(connection)
            except DialError as error:
                self._log.warning("node_clock_step_untold", problem=str(error))
            on_alive()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(
                self._settings.interval_ms * self._randomness.uniform(0.9, 1.1) / 1000
            ):
                await self._now.wait()
        except TimeoutError:
            return
        # Only now: `bring_forward` may have been called during the examination.
        self._now.clear()

    def vote_counts(self, node_ms: float) -> bool:
        """Tell whether a vote for a new grant counts; it came now and shows `node_ms` of the node's clock."""
        assert self.node_clock is not None, "the clock was read at the admission"
        now_ms = self._clock.now_ms()
        self._note_step(self.node_clock.check(received_ms=now_ms, node_ms=node_ms))
        return self.node_clock.trusted(now_ms)

    def _note_findings(self, found: Findings) -> None:
        self.grant_refusal = found.grant_refusal
        self.memory_share = found.memory_share
        self._note_sample(found.clock)

    def _note_lateness(self, problem: str) -> None:
        """Report that the node would not grant, until an examination that it answers in time."""
        self.grant_refusal = self.grant_refusal or problem

    def _note_sample(self, reading: ClockReading) -> None:
        """Judge a full sample of the node's clock, and take over the distrust that other servers recorded."""
        if self.node_clock is None:
            self.node_clock = NodeClock(distrust_ms=self._step_cost_ms)
        if reading.distrusted_ms:
            distrusted_ms = min(reading.distrusted_ms, self._step_cost_ms)
            self.node_clock.distrust_until(reading.received_ms + distrusted_ms)
        step = self.node_clock.note(
            sent_ms=reading.sent_ms, received_ms=reading.received_ms, node_ms=reading.node_ms
        )
        self._note_step(step)
        self._settings.witnesses.note_sample(
            self._index, self.node_clock, sent_ms=reading.sent_ms, received_ms=reading.received_ms
        )

    def _note_step(self, step: Step | None) -> None:
        if step is None or self.node_clock is None:
            return
        now_ms = self._clock.now_ms()
        distrusted_ms = self.node_clock.distrusted_for_ms(now_ms)
        self._log.warning("node_clock_set", by_ms=round(step.by_ms), votes_count_in_ms=round(distrusted_ms))
        self._settings.witnesses.note_step(self._index, step, seen_at_ms=now_ms)

    async def _record_step(self, connection: Examinable) -> None:
        """Record a step on the node, for other servers, once other clocks show that it was the node's."""
        if self.node_clock is None or not self._settings.witnesses.confirm(self._index):
            return
        left_ms = ceil(self.node_clock.distrusted_for_ms(self._clock.now_ms()))
        note = ("EVAL", scripts.load("distrust_clock"), 1, self._settings.keys.node, self._admission)
        await connection.commands((*note, left_ms, ceil(self._step_cost_ms)))


def _reason(judgement: Judgement) -> str:
    match judgement:
        case Forgot(detail) | Rejected(_, detail):
            return detail
    return "its admission id has changed"
