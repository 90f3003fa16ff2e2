"""What a checkup keeps of a node's answers, also of one that breaks off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from redfence_server.clock import SystemClock
from redfence_server.diagnosis.checkup import Checkup, check_up
from redfence_server.membership.examination import ClockReading, ExaminationRefusedError, Findings
from redfence_server.redis_io.dial import DialAnswerError, DialError, DialRefusedError, NodeUrl
from redfence_server.redis_io.scripts import Keyspace

INFO = {"redis_version": "7.0.15", "run_id": "run-1", "role": "master", "used_memory": "1000"}


class ScriptedNode:
    """A dialled node. For each command: an answer, an error, or None for no answer at all."""

    def __init__(self, **answers: Any) -> None:
        info = "".join(f"{name}:{value}\r\n" for name, value in INFO.items()).encode()
        usual = {"INFO": info, "EVAL": [b"found", [], 0, 1_000_000, b""], "CONFIG": [], "PING": b"PONG"}
        self.answers: dict[str, Any] = {**usual, "TIME": [b"1", b"5"], **answers}
        self.hangs = asyncio.Event()
        self.closed = False

    async def commands(self, *batch: tuple[str, ...]) -> list[Any]:
        return [await self._answer(name) for name, *_ in batch]

    async def command(self, name: str) -> Any:
        answer = await self._answer(name)
        if isinstance(answer, DialRefusedError):
            raise answer
        return answer

    async def _answer(self, name: str) -> Any:
        answer = self.answers[name]
        if answer is None:
            self.hangs.set()
            await asyncio.Event().wait()
        if isinstance(answer, DialError) and not isinstance(answer, DialRefusedError):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


async def checked(scripted: ScriptedNode | OSError) -> Checkup:
    urls = [NodeUrl("redis://a:1")]

    async def dial(node: NodeUrl, *, timeout_ms: int) -> Any:
        assert node is urls[0]
        assert timeout_ms == 10
        if isinstance(scripted, OSError):
            raise scripted
        return scripted

    (checkup,) = await check_up(
        urls, Keyspace(), dial_timeout_ms=10, clock=SystemClock(), watch_ms=120, dial=dial
    )
    assert isinstance(scripted, OSError) or scripted.closed
    return checkup


async def test_a_node_is_examined_and_then_watched() -> None:
    checkup = await checked(ScriptedNode())
    assert (checkup.index, checkup.address, checkup.error) == (0, "a:1", None)
    assert checkup.found
    assert checkup.info == INFO
    assert [reading.node_ms for reading in checkup.readings[:2]] == [1_000.0, 1_000.005]
    assert len(checkup.trips_ms) == len(checkup.readings) - 1 >= 1
    assert checkup.readings[-1].received_ms - checkup.readings[0].sent_ms >= 120


@pytest.mark.parametrize(
    ("pong", "refuses"),
    [(DialRefusedError("PING: MISCONF"), True), (DialRefusedError("PING: NOPERM"), False), (b"PONG", False)],
)
async def test_a_refused_ping_shows_that_the_disk_refuses_writes(pong: Any, *, refuses: bool) -> None:
    checkup = await checked(ScriptedNode(PING=pong))
    assert checkup.refuses_writes == refuses
    assert checkup.error is None


BROKEN, REFUSED = DialError("it broke"), DialRefusedError("EVAL: NOPERM")
ERRORS: dict[str, tuple[Callable[[], ScriptedNode | OSError], type[DialError], str, bool]] = {
    "no file left": (lambda: OSError("too many files"), DialError, "too many files", False),
    "broken at once": (lambda: ScriptedNode(INFO=BROKEN), DialError, "it broke", False),
    "refused": (lambda: ScriptedNode(EVAL=REFUSED), ExaminationRefusedError, "NOPERM", False),
    "hangs": (lambda: ScriptedNode(EVAL=None), DialError, "within 0.29 s", False),
    "broken later": (lambda: ScriptedNode(PING=BROKEN), DialError, "it broke", True),
    "hangs later": (lambda: ScriptedNode(TIME=None), DialError, "within 0.29 s", True),
    "odd": (lambda: ScriptedNode(TIME=[b"soon"]), DialAnswerError, "TIME", True),
}


@pytest.mark.parametrize("case", ERRORS)
async def test_what_is_known_when_a_node_breaks_off_is_kept(case: str) -> None:
    node, error, text, examined = ERRORS[case]
    checkup = await checked(node())
    assert type(checkup.error) is error
    assert text in str(checkup.error)
    assert (checkup.found is not None) == bool(checkup.readings) == examined
    assert bool(checkup.info) == (examined or case == "refused")


async def test_a_checkup_that_is_cancelled_leaves_no_connection() -> None:
    node = ScriptedNode(TIME=None)
    checking = asyncio.create_task(checked(node))
    await node.hangs.wait()
    checking.cancel()
    await asyncio.wait([checking])
    assert node.closed


def checkup_of(*readings: ClockReading, wall_ms: float = 0.0, **info: str) -> Checkup:
    return Checkup(0, "a", Findings(None, "run", "7", info=info), readings=list(readings), wall_ms=wall_ms)


def test_info_tells_software_and_memory() -> None:
    redis = checkup_of(redis_version="7.0.15", used_memory="1000", mem_not_counted_for_evict="100")
    assert redis.software == ("redis", "7.0.15")
    assert redis.memory_bytes == (900, 0)
    valkey = checkup_of(redis_version="7.2.4", valkey_version="9.1.2", used_memory="many", maxmemory="5")
    assert valkey.software == ("valkey", "9.1.2")
    assert valkey.memory_bytes == (0, 5)


def test_the_offset_of_a_clock_comes_from_its_shortest_round_trip() -> None:
    slow = ClockReading(sent_ms=0.0, received_ms=90.0, node_ms=0.0)
    for read_at_ms in (100.0, 104.0, 110.0):
        fast = ClockReading(sent_ms=100.0, received_ms=110.0, node_ms=read_at_ms + 7_000)
        # This machine's steady clock is 2,000 ms behind its wall clock.
        offset = checkup_of(slow, fast, slow, wall_ms=2_000.0).clock_offset_ms
        assert offset
        offset_ms, unsure_ms = offset
        assert unsure_ms == 5.0
        assert abs(offset_ms - 5_000.0) <= unsure_ms
    assert checkup_of().clock_offset_ms is None
