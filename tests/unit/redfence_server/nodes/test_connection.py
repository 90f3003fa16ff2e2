"""One pipelined socket for every caller, on virtual time with a transport that the test holds in its hand."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from harness.simulation.arriving_bytes import deliver
from redfence_server.locking.node import NoReply
from redfence_server.nodes import connection as node_connection
from redfence_server.nodes.connection import NodeConnection
from redfence_server.redis_io.dial import DialError, DialRefusedError

pytestmark = pytest.mark.virtual_time

TIMEOUT_MS = 100


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.aborted = False
        self.connection: NodeConnection | None = None

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.writes.append(bytes(data))

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            assert self.connection is not None
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)


class Bench:
    """A connection, its wire and the replies; `heard` has replies and notices in order."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.heard: list[Any] = []
        self.told: dict[object, list[Any]] = {}
        self.told_at: dict[object, float] = {}
        self.wire = Wire()
        self.connection = NodeConnection(
            node_timeout_ms=TIMEOUT_MS, on_lost=self.lost.append, on_notice=self.heard.append
        )
        self.wire.connection = self.connection
        self.connection.connection_made(self.wire)

    def call(self, name: object) -> bool:
        def note(raw: Any) -> None:
            self.heard.append(raw)
            self.told.setdefault(name, []).append(raw)
            self.told_at[name] = round(asyncio.get_running_loop().time() * 1000)

        return self.connection.call(f"<{name}>".encode(), note)

    def subscribe(self) -> list[str]:
        """Subscribe to a channel; return the list that will get the node's answer."""
        told: list[str] = []
        self.connection.subscribe("ours", told.append)
        return told

    def answer(self, *texts: object) -> None:
        """Let replies arrive in one piece."""
        self.arrive(b"".join(f"+{text}\r\n".encode() for text in texts))

    def arrive(self, data: bytes) -> None:
        deliver(self.connection, data)


async def test_commands_leave_at_once_or_gather_behind_the_batch_under_way() -> None:
    """They wait for its last reply, but not longer than `_GATHER_S` for a node that is far away."""
    bench = Bench()
    writes = bench.wire.writes
    for name in range(20):
        bench.call(name)
    assert writes == []
    await asyncio.sleep(0)
    assert writes == [b"".join(f"<{name}>".encode() for name in range(20))]
    bench.call("a")
    await asyncio.sleep(0)
    bench.call("b")
    bench.answer(*range(19))
    await asyncio.sleep(0)
    assert len(writes) == 1
    bench.answer(19)
    bench.call("c")
    await asyncio.sleep(0)
    assert writes[1:] == [b"<a><b><c>"]
    bench.call("d")
    await asyncio.sleep(node_connection._GATHER_S * 0.9)
    assert len(writes) == 2
    await asyncio.sleep(node_connection._GATHER_S * 0.2)
    assert writes[2:] == [b"<d>"]


async def test_a_large_batch_leaves_in_parts_that_grow_with_the_load() -> None:
    """The node works on a part while the server makes the next one; a part is as large as all before it."""
    bench = Bench()
    for name in range(200):
        bench.call(name)
    assert [write.count(b"<") for write in bench.wire.writes] == [32, 32, 64]
    bench.answer(*range(128))
    await asyncio.sleep(0)
    assert bench.wire.writes[-1].count(b"<") == 72
    bench.answer(*range(128, 200))
    bench.call("after")
    await asyncio.sleep(0)
    assert bench.wire.writes[-1] == b"<after>"
    assert bench.told.keys() == set(range(200))


async def test_a_reply_longer_than_what_is_read_at_once_is_put_together() -> None:
    bench = Bench()
    bench.call("long")
    bench.call("short")
    long = b"x" * 200_000
    bench.arrive(b"$%d\r\n%s\r\n:1\r\n" % (len(long), long))
    assert bench.told == {"long": [long], "short": [1]}


async def test_commands_time_out_in_order_each_at_its_own_time() -> None:
    bench = Bench()
    for name in range(5):
        bench.call(name)
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert bench.told == {name: [NoReply.TIMED_OUT] for name in range(5)}
    assert bench.told_at == {name: TIMEOUT_MS + 20 * name for name in range(5)}


@pytest.mark.parametrize("at_ms", [100, 150, 250, 290])
async def test_a_command_after_an_overdue_one_is_told_within_the_node_timeout(at_ms: int) -> None:
    bench = Bench()
    bench.call("overdue")
    await asyncio.sleep(at_ms / 1000)
    bench.call("next")
    await asyncio.sleep(1)
    assert bench.told_at["next"] <= at_ms + TIMEOUT_MS


async def test_a_caller_that_answers_a_time_out_with_a_command_starts_no_second_timer() -> None:
    bench = Bench()
    loop = asyncio.get_running_loop()

    def call_next(name: int, _: object) -> None:
        bench.call(name)

    for name in range(10):
        bench.connection.call(b"mint", partial(call_next, name))
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.15)
    timers = [each for each in loop._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
    assert len(timers) <= 1


async def test_a_node_that_owes_answers_for_four_timeouts_is_given_up() -> None:
    bench = Bench()
    bench.call("first")
    await asyncio.sleep(0.35)
    bench.call("last")
    await asyncio.sleep(0.06)
    assert bench.wire.aborted
    assert bench.told == {"first": [NoReply.TIMED_OUT], "last": [NoReply.DISCONNECTED]}
    assert bench.lost == ["it no longer answers"]
    assert not bench.call("too late")
    assert "too late" not in bench.told


async def test_a_node_that_is_slow_but_answers_is_kept() -> None:
    bench = Bench()
    for name in range(20):
        bench.call(name)
        await asyncio.sleep(0.05)
        if name >= 4:
            bench.answer(name - 4)
    assert not bench.wire.aborted


SUBSCRIBED = b">3\r\n$9\r\nsubscribe\r\n$4\r\nours\r\n:1\r\n"
NO_PERMISSION = b"-NOPERM no permissions to run the 'subscribe' command\r\n"


def push(payload: str) -> bytes:
    """Return a message published on our channel, as RESP3 has it."""
    return f">3\r\n$7\r\nmessage\r\n$4\r\nours\r\n${len(payload)}\r\n{payload}\r\n".encode()


async def test_a_subscription_goes_out_ahead_of_every_command() -> None:
    bench = Bench()
    told = bench.subscribe()
    bench.call("first")
    await asyncio.sleep(0)
    assert bench.wire.writes == [b"*2\r\n$9\r\nSUBSCRIBE\r\n$4\r\nours\r\n", b"<first>"]
    assert told == []


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [(SUBSCRIBED, ""), (NO_PERMISSION, "NOPERM no permissions to run the 'subscribe' command")],
    ids=["granted", "refused"],
)
async def test_the_answer_to_the_subscription_is_nobody_elses(answer: bytes, refusal: str) -> None:
    bench = Bench()
    told = bench.subscribe()
    bench.call("first")
    bench.call("second")
    for byte in answer + b"+for first\r\n-ERR for second\r\n":
        bench.arrive(bytes([byte]))
    assert told == [refusal]
    assert bench.told["first"] == [b"for first"]
    assert str(bench.told["second"][0]) == "ERR for second"
    assert not bench.wire.aborted


async def test_a_notice_among_the_replies_shifts_none_and_is_told_in_its_place() -> None:
    bench = Bench()
    bench.subscribe()
    bench.call("overdue")
    await asyncio.sleep(0.15)
    assert bench.heard == [NoReply.TIMED_OUT]
    bench.call("first")
    bench.call("second")
    told = SUBSCRIBED + push("1") + b"+too late\r\n" + push("2") + b"+for first\r\n" + push("3") + push("4")
    for byte in told + b"*2\r\n$4\r\nheld\r\n:7\r\n" + push("5"):
        bench.arrive(bytes([byte]))
    assert bench.heard[1:] == [b"1", b"2", b"for first", b"3", b"4", [b"held", 7], b"5"]
    assert not bench.wire.aborted


async def test_a_push_that_is_no_message_is_passed_over() -> None:
    bench = Bench()
    bench.subscribe()
    bench.arrive(SUBSCRIBED + SUBSCRIBED.replace(b"$9\r\n", b"$11\r\nun"))
    bench.call("first")
    bench.answer("for first")
    assert bench.told == {"first": [b"for first"]}
    assert bench.heard == [b"for first"]


@pytest.mark.parametrize("noise", [b"+nobody asked\r\n", b"HTTP/1.1 400\r\n"])
async def test_a_peer_that_talks_out_of_turn_or_no_redis_is_left(noise: bytes) -> None:
    bench = Bench()
    bench.arrive(noise)
    await asyncio.sleep(0)
    assert bench.wire.aborted
    assert bench.lost


async def test_unanswered_commands_are_bounded_overdue_ones_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_connection, "_UNANSWERED_MAX", 3)
    bench = Bench()
    assert [bench.call(name) for name in range(4)] == [True, True, True, False]
    await asyncio.sleep(0.15)
    assert not bench.call("overdue ones count")
    bench.answer(0)
    assert bench.call("there is room again")


async def test_a_batch_of_raw_commands_is_answered_in_order_among_the_others() -> None:
    bench = Bench()
    bench.call("first")
    batch = asyncio.ensure_future(bench.connection.commands(("INFO", "server"), ("GET", b"k"), ("PING",)))
    await asyncio.sleep(0)
    bench.call("last")
    await asyncio.sleep(node_connection._GATHER_S)
    assert b"".join(bench.wire.writes) == (
        b"<first>*2\r\n$4\r\nINFO\r\n$6\r\nserver\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n*1\r\n$4\r\nPING\r\n<last>"
    )
    bench.arrive(b"+1\r\n%1\r\n$1\r\na\r\n:2\r\n-NOPERM no\r\n$4\r\nPONG\r\n+5\r\n")
    info, refused, pong = await batch
    assert (info, pong) == ({b"a": 2}, b"PONG")
    assert isinstance(refused, DialRefusedError)
    assert str(refused) == "GET: NOPERM no"
    assert bench.told == {"first": [b"1"], "last": [b"5"]}


@pytest.mark.parametrize(
    ("end", "told"),
    [("late", "TWO: timed out"), ("lost", "TWO: disconnected"), ("full", "TWO: the"), ("closed", "ONE: the")],
)
async def test_a_batch_without_all_its_answers_is_an_error(
    end: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    if end == "full":
        monkeypatch.setattr(node_connection, "_UNANSWERED_MAX", 1)
    if end == "closed":
        bench.connection.connection_lost(None)
    batch = asyncio.ensure_future(bench.connection.commands(("ONE",), ("TWO",)))
    await asyncio.sleep(0)
    bench.answer(*(["one"] if end in {"late", "lost"} else []))
    if end == "lost":
        bench.wire.abort()
    with pytest.raises(DialError, match=told):
        await batch
    assert asyncio.get_running_loop().time() * 1000 <= TIMEOUT_MS + 1
    if end == "late":
        bench.call("next")
        bench.answer("two", "next")
        assert bench.told == {"next": [b"next"]}


async def test_a_batch_whose_caller_goes_away_takes_no_other_commands_answers() -> None:
    bench = Bench()
    batch = asyncio.ensure_future(bench.connection.commands(("ONE",), ("TWO",)))
    await asyncio.sleep(0)
    batch.cancel()
    await asyncio.wait([batch])
    bench.call("next")
    bench.answer("one", "two", "next")
    assert bench.told == {"next": [b"next"]}
