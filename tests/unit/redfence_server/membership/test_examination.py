"""What a node says of itself, read from its answers, without a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.doubles.findings import findings, identity, identity_fields
from redfence_server.membership.examination import (
    DURABLE_SETTINGS,
    ClockReading,
    ExaminationRefusedError,
    Findings,
    examine,
    read_identity,
)
from redfence_server.redis_io.dial import DialAnswerError, DialError, DialRefusedError
from redfence_server.redis_io.scripts import Keyspace

ME = identity(1, floor=7, reserved=9, evicted=1, known_floors={0: 5, 2: 6}, known_fences={2: "q" * 32})
NODE_MS = 1_700_000_000_000.25
CLOCK = ClockReading(sent_ms=0.0, received_ms=10.0, node_ms=NODE_MS)
FOUND = findings(1, ME, key_count=4, evicted=2, clock=CLOCK)

# What every identity has.
FIELDS = identity_fields(1)
# What came with the first fence or the first eviction.
MORE = {"floor": "7", "reserved": "9", "evicted": "1", "floor:0": "5", "floor:2": "6", "fence:2": "q" * 32}

INFO = {
    "redis_version": "7.2.4",
    "run_id": "run-1",
    "role": "master",
    "second_repl_offset": "-1",
    "maxmemory": "0",
    "maxmemory_policy": "allkeys-lru",
    "evicted_keys": "2",
}
PROMOTED = {"second_repl_offset": "17", "master_replid": "abc"}


def _flat(fields: dict[str, str]) -> list[bytes]:
    return [text.encode() for pair in fields.items() for text in pair]


def test_an_identity_is_read_back_as_it_was_written() -> None:
    assert read_identity(_flat(FIELDS | MORE)) == ME
    as_formed = replace(ME, floor=0, reserved=0, evicted=0, known_floors={}, known_fences={})
    assert read_identity(_flat(FIELDS)) == as_formed
    assert read_identity([]) is None


@pytest.mark.parametrize("missing", FIELDS)
def test_an_identity_that_lacks_a_field_is_a_dial_error(missing: str) -> None:
    with pytest.raises(DialError):
        read_identity(_flat({name: text for name, text in FIELDS.items() if name != missing}))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("index", "one"),
        ("nodes", ""),
        ("admission", "short"),
        ("state", "odd"),
        ("floor", ""),
        ("reserved", "x"),
        ("floor:1", "x"),
    ],
)
def test_an_identity_with_a_malformed_field_is_a_dial_error(name: str, text: str) -> None:
    with pytest.raises(DialError):
        read_identity(_flat({**FIELDS, name: text}))


class ScriptedNode:
    """A scripted node, and a clock by which each answer takes 10 ms."""

    def __init__(self, settings: Mapping[str, str] | None = None, *, resp3: bool = False) -> None:
        self.settings = {**DURABLE_SETTINGS, **(settings or {})}
        self.resp3 = resp3
        self.high: list[bytes] = [b"5"]
        self.refusal: Any = b""
        self.more: dict[str, str] = {}
        self.info = dict(INFO)
        self.info_answer: Any = None
        self.script: Any = None
        self.setting_answer: Any = None
        self.may_read_settings = True
        self._now_ms = 0.0

    def now_ms(self) -> float:
        return self._now_ms

    async def commands(self, *batch: Sequence[str | bytes | int]) -> list[Any]:
        self._now_ms += 10.0
        return [self._answer(tuple(parts)) for parts in batch]

    def _answer(self, parts: tuple[str | bytes | int, ...]) -> Any:
        match parts:
            case ("INFO",):
                lines = "".join(f"{name}:{value}\r\n" for name, value in self.info.items())
                return self.info_answer or f"# Server\r\n{lines}\r\n".encode()
            case ("EVAL", *_):
                fields = _flat(FIELDS | MORE | self.more)
                return self.script or [b"found", fields, 4, int(NODE_MS * 1000), self.refusal, *self.high]
            case ("CONFIG", "GET", str(name)):
                if not self.may_read_settings:
                    return DialRefusedError("CONFIG: unknown command 'CONFIG', with args beginning with: …")
                pair = (name.encode(), self.settings[name].encode())
                return self.setting_answer or (dict([pair]) if self.resp3 else list(pair))
        raise AssertionError(parts)


async def _examine(node: ScriptedNode) -> Findings:
    return await examine(node, Keyspace(), node)


@pytest.mark.parametrize("resp3", [False, True])
async def test_everything_that_a_node_says_of_itself_is_gathered(*, resp3: bool) -> None:
    assert await _examine(ScriptedNode(resp3=resp3)) == FOUND
    worse = await _examine(ScriptedNode({"appendfsync": "everysec"}, resp3=resp3))
    assert worse == replace(FOUND, durability_gap="appendfsync is everysec, not always")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("appendonly", "no"),
        ("appendfsync", "no"),
        ("no-appendfsync-on-rewrite", "yes"),
        ("aof-load-truncated", "yes"),
    ],
)
async def test_every_setting_that_can_lose_a_write_is_a_gap(name: str, value: str) -> None:
    gap = (await _examine(ScriptedNode({name: value}))).durability_gap
    assert f"{name} is {value}" in gap


async def test_settings_that_may_not_be_read_prove_nothing() -> None:
    node = ScriptedNode()
    node.may_read_settings = False
    found = await _examine(node)
    assert found.durability_gap == "it does not show its settings (CONFIG: unknown command 'CONFIG')"
    assert found == replace(FOUND, durability_gap=found.durability_gap, settings_hidden=True)


async def test_a_node_shows_what_it_lacks() -> None:
    node = ScriptedNode()
    node.high = []
    assert await _examine(node) == replace(FOUND, max_token=None)
    for change in ({}, PROMOTED):
        node = ScriptedNode()
        node.info.update(change)
        del node.info["run_id"]
        assert (await _examine(node)).run_id == ""


async def test_the_whole_of_info_is_kept_also_if_the_rest_is_refused() -> None:
    node = ScriptedNode()
    assert (await _examine(node)).info == INFO
    node.script = DialRefusedError("EVAL: NOPERM")
    with pytest.raises(ExaminationRefusedError, match="EVAL: NOPERM") as caught:
        await _examine(node)
    assert caught.value.info == INFO
    node.info_answer = DialRefusedError("INFO: NOPERM")
    with pytest.raises(DialRefusedError, match="INFO: NOPERM"):
        await _examine(node)


async def test_a_distrust_that_servers_noted_is_told_by_what_is_left_of_it() -> None:
    node = ScriptedNode()
    for until_ms, left_ms in ((NODE_MS + 900.75, 900.75), (NODE_MS - 0.25, 0.0)):
        node.more = {"distrusted_until": f"{until_ms:.0f}"}
        assert (await _examine(node)).clock.distrusted_ms == left_ms


async def test_a_promoted_replica_shows_the_history_of_its_data() -> None:
    node = ScriptedNode()
    node.info.update(PROMOTED)
    assert replace(await _examine(node), clock=FOUND.clock) == replace(
        FOUND, promoted=True, run_id="run-1/abc"
    )
    node.info["role"] = "slave"
    assert (await _examine(node)).is_replica


@pytest.mark.parametrize(
    ("policy", "eviction"),
    [("noeviction", ""), ("volatile-ttl", "maxmemory 100, maxmemory-policy volatile-ttl")],
)
async def test_a_node_drops_keys_if_it_has_a_limit_and_a_policy(policy: str, eviction: str) -> None:
    node = ScriptedNode()
    node.info.update(maxmemory="100", maxmemory_policy=policy)
    assert (await _examine(node)).eviction == eviction


@pytest.mark.parametrize(
    ("part", "answer"),
    [
        ("info_answer", 7),
        ("second_repl_offset", "soon"),
        ("evicted_keys", "many"),
        ("script", [b"found", [], 4]),
        ("script", [b"found", [b"cluster_id"], 4, 1_000, b""]),
        ("script", [b"found", [], 4, b"now", b""]),
        ("script", [b"found", None, 4, 1_000, b""]),
        ("script", b"found"),
        ("script", {b"appendonly": b"yes"}),
        ("script", [b"found", [7], 4, 1_000, b""]),
        ("refusal", 7),
        ("setting_answer", b"OK"),
        ("high", [b"many"]),
        ("more", {"distrusted_until": "never"}),
    ],
)
async def test_an_answer_that_no_node_gives_is_told_as_one(part: str, answer: Any) -> None:
    node = ScriptedNode()
    if part in node.info:
        node.info[part] = answer
    else:
        setattr(node, part, answer)
    with pytest.raises(DialAnswerError):
        await _examine(node)
