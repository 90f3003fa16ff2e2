"""What a node says of itself, read from its answers, without a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from redfence_server import node_examination
from redfence_server.node_examination import Findings, Identity, Phase, read_identity
from redfence_server.redis_dial import DialError, DialRefusedError
from redfence_server.scripts import Keyspace

ME = Identity(
    cluster_id="c",
    index=1,
    node_count=3,
    max_ttl_ms=300_000,
    admission="a" * 32,
    run_id="run-1",
    durable=True,
    phase=Phase.READY,
    floor=7,
    changes=12,
    evicted=1,
    known_floors={0: 5, 2: 6},
    known_changes={0: 8, 2: 9},
)
FOUND = Findings(
    identity=ME, run_id="run-1", version="7.2.4", high=5, key_count=4, durability_gap="", evicted=2
)
GAP = "appendfsync is everysec, not always"

# What every identity has.
FIELDS = {
    "cluster_id": "c",
    "index": "1",
    "nodes": "3",
    "max_ttl_ms": "300000",
    "admission": "a" * 32,
    "run_id": "run-1",
    "durable": "1",
    "state": "ready",
}
# What came with the first change, the first rejoin or the first eviction.
MORE = {
    "floor": "7",
    "changes": "12",
    "evicted": "1",
    "floor:0": "5",
    "floor:2": "6",
    "changes:0": "8",
    "changes:2": "9",
}


def _flat(fields: dict[str, str]) -> list[bytes]:
    return [text.encode() for pair in fields.items() for text in pair]


def test_an_identity_is_read_back_as_it_was_written() -> None:
    """No answer is no identity."""
    assert read_identity(_flat(FIELDS | MORE)) == ME
    as_formed = replace(ME, floor=0, changes=0, evicted=0, known_floors={}, known_changes={})
    assert read_identity(_flat(FIELDS)) == as_formed
    assert read_identity([]) is None


@pytest.mark.parametrize("missing", FIELDS)
def test_an_identity_that_lacks_a_field_is_a_dial_error(missing: str) -> None:
    """Half an identity admits nobody."""
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
        ("changes:1", "x"),
    ],
)
def test_an_identity_with_a_malformed_field_is_a_dial_error(name: str, text: str) -> None:
    """Whoever wrote it, it was not form.lua."""
    with pytest.raises(DialError):
        read_identity(_flat({**FIELDS, name: text}))


class ScriptedNode:
    """A dialled node whose answers the test has written down."""

    def __init__(self, **settings: str) -> None:
        self.settings = {
            "appendonly": "yes",
            "appendfsync": "always",
            "no-appendfsync-on-rewrite": "no",
            "aof-load-truncated": "no",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        self.high: bytes | None = b"5"
        self.replication = b"role:master\r\nsecond_repl_offset:-1\r\n"
        self.memory = b"maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n"
        self.may_read_settings = True
        self.breaks_at_settings = False

    async def commands(self, *batch: Sequence[str | bytes | int]) -> list[Any]:
        """Answer as a node does."""
        return [self._answer(tuple(parts)) for parts in batch]

    def _answer(self, parts: tuple[str | bytes | int, ...]) -> Any:  # noqa: PLR0911  (one return per command)
        match parts:
            case ("INFO", "server"):
                return b"# Server\r\nredis_version:7.2.4\r\nrun_id:run-1\r\n"
            case ("INFO", "replication"):
                return self.replication
            case ("INFO", "memory"):
                return self.memory
            case ("INFO", "stats"):
                return b"evicted_keys:2\r\n"
            case ("EVAL", *_):
                return [b"found", _flat(FIELDS | MORE), 4, *([] if self.high is None else [self.high])]
            case ("CONFIG", "GET", str(name)):
                if self.breaks_at_settings:
                    raise DialError("it closed the connection")
                if not self.may_read_settings:
                    return DialRefusedError("NOPERM")
                return [name.encode(), self.settings[name].encode()]
        raise AssertionError(parts)


async def _examine(node: ScriptedNode) -> Findings:
    return await node_examination.examine(node, Keyspace())  # type: ignore[arg-type]  # its twin in shape


async def test_a_node_that_syncs_every_write_has_no_gap() -> None:
    """Everything it says of itself is gathered."""
    assert await _examine(ScriptedNode()) == FOUND


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("appendonly", "no"),
        ("appendfsync", "everysec"),
        ("appendfsync", "no"),
        ("no_appendfsync_on_rewrite", "yes"),
        ("aof_load_truncated", "yes"),
    ],
)
async def test_every_setting_that_can_lose_a_write_is_a_gap(name: str, value: str) -> None:
    """Each of them alone breaks the proof, and is named."""
    gap = (await _examine(ScriptedNode(**{name: value}))).durability_gap
    assert f"{name.replace('_', '-')} is {value}" in gap


async def test_settings_that_may_not_be_read_prove_nothing() -> None:
    """An access list that hides them leaves only the operator's word."""
    node = ScriptedNode()
    node.may_read_settings = False
    found = await _examine(node)
    assert "does not let this server read" in found.durability_gap
    assert found == replace(FOUND, durability_gap=found.durability_gap, settings_hidden=True)


async def test_a_connection_that_breaks_in_the_middle_of_a_look_is_no_look() -> None:
    """What is read over the next one may be of another run of the node."""
    node = ScriptedNode()
    node.breaks_at_settings = True
    with pytest.raises(DialError):
        await _examine(node)


async def test_a_node_without_its_greatest_number_shows_that() -> None:
    """Whatever else it still has."""
    node = ScriptedNode()
    node.high = None
    assert await _examine(node) == replace(FOUND, high=None)


async def test_a_promoted_replica_shows_the_history_of_its_data() -> None:
    """A process keeps its run_id when it changes sides, so that alone would not tell."""
    node = ScriptedNode()
    node.replication = b"role:master\r\nsecond_repl_offset:17\r\nmaster_replid:abc\r\n"
    assert await _examine(node) == replace(FOUND, promoted=True, run_id="run-1/abc")
    node.replication = b"role:slave\r\nsecond_repl_offset:-1\r\n"
    assert (await _examine(node)).is_replica


@pytest.mark.parametrize(
    ("memory", "eviction"),
    [
        (b"maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n", ""),
        (b"maxmemory:100\r\nmaxmemory_policy:noeviction\r\n", ""),
        (
            b"maxmemory:100\r\nmaxmemory_policy:volatile-ttl\r\n",
            "maxmemory 100, maxmemory-policy volatile-ttl",
        ),
    ],
)
async def test_a_node_drops_keys_if_it_has_a_limit_and_a_policy(memory: bytes, eviction: str) -> None:
    """One without the other drops nothing."""
    node = ScriptedNode()
    node.memory = memory
    assert (await _examine(node)).eviction == eviction
