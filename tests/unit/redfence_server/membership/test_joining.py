"""Joining and heartbeat over a scripted node: what happens between two looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import structlog

from harness.doubles.findings import identity, identity_fields
from harness.time.virtual_loop import LoopClock
from redfence_server.membership.admin import AdminSettings
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.examination import DURABLE_SETTINGS, examine
from redfence_server.membership.heartbeat import Heartbeat, HeartbeatSettings, NotAdmitted
from redfence_server.membership.joining import JoiningSettings, NodeJoining
from redfence_server.membership.node_clock import ClockWitnesses, Step
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import DialAnswerError, DialError, DialledNode, DialRefusedError, NodeUrl

pytestmark = pytest.mark.virtual_time

INDEX = 2
KEYS = scripts.Keyspace()
FIELDS = identity_fields(INDEX) | {"run_id": "run-1", "floor": "5"}


class ScriptedNode(DialledNode):
    """A durable node that votes.

    Attributes:
        on_look: called whenever it is examined; an error that it raises stands for the answer.
        sent: what was sent to it apart from that.
    """

    def __init__(self, *, run_id: str = "run-1", on_look: Callable[[], None] = lambda: None) -> None:
        self.run_id = run_id
        self.on_look = on_look
        self.looks = 0
        self.sent: list[tuple[str | bytes | int, ...]] = []
        self.fails = False

    async def commands(self, *batch: Sequence[str | bytes | int]) -> list[Any]:
        await asyncio.sleep(0.001)
        if len(batch) == 1:
            self.sent.append(tuple(batch[0]))
            if self.fails:
                raise DialError("EVAL: timed out")
            return [[b"changed"]]
        self.looks += 1
        self.on_look()
        return [self._answer(tuple(parts)) for parts in batch]

    def _answer(self, parts: tuple[str | bytes | int, ...]) -> Any:
        match parts:
            case ("INFO",):
                return f"redis_version:7.2.4\r\nrun_id:{self.run_id}\r\nrole:master\r\n".encode()
            case ("CONFIG", "GET", str(name)):
                return [name.encode(), DURABLE_SETTINGS[name].encode()]
        now_us = int((1.7e12 + LoopClock().now_ms()) * 1000)
        return [b"found", [part.encode() for pair in FIELDS.items() for part in pair], 3, now_us, b"", b"7"]


def joining(memory: ClusterMemory) -> NodeJoining:
    """Return what brings node 2 of three to its vote."""
    clock, log = LoopClock(), structlog.get_logger()
    settings = JoiningSettings(
        urls=[NodeUrl(f"redis://n{index}:6379") for index in range(3)],
        admin=AdminSettings(KEYS, 1_000, clock),
        assume_durable=False,
        accept_empty_nodes=False,
        fencing=asyncio.Lock(),
    )
    return NodeJoining(
        INDEX, settings=settings, memory=memory, clock=clock, randomness=SystemRandomness(), log=log
    )


async def test_a_process_is_taken_out_with_the_floor_that_was_known_before_it_was_examined() -> None:
    memory = ClusterMemory(3)
    memory.learn(identity(0, known_floors={INDEX: 5}))
    node = ScriptedNode(run_id="run-2", on_look=lambda: memory.raise_floor(INDEX, 9))
    with pytest.raises(DialError, match="changed it meanwhile"):
        await joining(memory).join(node)
    ((_, source, _, _, _, *arguments),) = node.sent
    assert source == scripts.load("quarantine")
    assert arguments[9] == 5


class Beating:
    """A heartbeat that runs; `alive` counts its beats, `refusals` has what each showed, also a missed one."""

    def __init__(self, node: ScriptedNode, *, interval_ms: int = 1_000) -> None:
        self.node = node
        self.alive = 0
        self.refusals: list[str] = []
        self.witnesses = ClockWitnesses(3)
        self._beat = Heartbeat(
            INDEX,
            settings=HeartbeatSettings(interval_ms, KEYS, self.witnesses),
            joining=joining(ClusterMemory(3)),
            clock=LoopClock(),
            randomness=SystemRandomness(),
            log=structlog.get_logger(),
        )
        self.bring_forward = self._beat.bring_forward

    async def start(self) -> asyncio.Task[NotAdmitted]:
        self._beat.begin(await examine(self.node, KEYS, LoopClock()), node_timeout_ms=500)
        return asyncio.create_task(self._beat.run(self.node, self._note, self._note_refusal))

    def _note(self) -> None:
        self.alive += 1
        self._note_refusal()

    def _note_refusal(self) -> None:
        self.refusals.append(self._beat.grant_refusal)


async def test_a_node_that_is_late_twice_or_refuses_once_is_dropped() -> None:
    errors: list[DialError] = [DialError("INFO: timed out")]

    def fail() -> None:
        if errors:
            raise errors.pop()

    for end in (DialRefusedError("EVAL: NOPERM"), DialAnswerError("its identity is malformed")):
        node = ScriptedNode()
        beating = Beating(node)
        task = await beating.start()
        node.on_look = fail
        await asyncio.sleep(10)
        assert beating.alive >= 5
        errors.append(end)
        assert await task == NotAdmitted(str(end), admission_is_void=False)
        errors = [DialError("INFO: timed out")]
    errors = [DialError("INFO: timed out")] * 2
    node = ScriptedNode()
    task = await Beating(node).start()
    node.on_look = fail
    assert await task == NotAdmitted("it missed 2 heartbeats: INFO: timed out", admission_is_void=False)


async def test_a_missed_heartbeat_shows_that_the_node_would_not_grant_until_the_next_one() -> None:
    errors = [DialError("INFO: timed out")]

    def fail() -> None:
        if errors:
            raise errors.pop()

    node = ScriptedNode()
    beating = Beating(node)
    task = await beating.start()
    node.on_look = fail
    await asyncio.sleep(5)
    task.cancel()
    assert beating.refusals[:3] == ["it missed a heartbeat: INFO: timed out", "", ""]


async def test_a_heartbeat_that_is_brought_forward_during_a_heartbeat_comes_right_after_it() -> None:
    node = ScriptedNode()
    beating = Beating(node, interval_ms=60_000)
    task = await beating.start()
    node.on_look = lambda: beating.bring_forward() if node.looks == 2 else None
    beating.bring_forward()
    await asyncio.sleep(1)
    assert node.looks == 3
    task.cancel()


async def test_a_node_that_is_not_told_of_its_step_in_time_goes_on_to_be_examined() -> None:
    node = ScriptedNode()
    node.fails = True
    beating = Beating(node)
    task = await beating.start()
    beating.witnesses.confirm = lambda _: not node.sent  # type: ignore[method-assign, assignment]
    beating.witnesses.note_step(INDEX, Step(1_000.0, at_ms=0.0, offset_ms=0.0), seen_at_ms=0.0)
    await asyncio.sleep(5)
    assert len(node.sent) == 1
    assert not task.done()
    assert beating.alive >= 3
    task.cancel()
