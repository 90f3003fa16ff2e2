"""In the midst of an upgrade, nodes keep holds of earlier servers, which are hashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import hiredis
import pytest

from harness.doubles.lua_node import Database, LuaNode, hold_fields
from harness.processes.fixture_types import FlushedNodes
from harness.processes.redis_nodes import RedisNode
from redfence_server.embedded.binary import RedisBinary
from redfence_server.locking.node import Command, Commit, Held, Inspect, Mint, Release, Renew, Reply, Undo
from redfence_server.redis_io.scripts import Keyspace

R = "orders/42"
LOCK = Keyspace().lock(R)
A, B = "a" * 64, "b" * 64
TTL_MS = 3_600_000
COMMANDS: tuple[Command, ...] = (
    Mint(R, B, "n2", "they", TTL_MS),
    Mint(R, B, "n2", "they", TTL_MS, watch_blocking_hold=True),
    Mint(R, A, "n2", "again", 2 * TTL_MS),
    Mint(R, A, "n2", "again", TTL_MS, watch_own_hold=True),
    Mint(R, B, "n2", "they", TTL_MS, Release(R, A, 0.0)),
    Mint(R, B, "n2", "they", TTL_MS // 2, Release(R, A, 0.0)),
    Commit(R, A, "n1", 9),
    Commit(R, A, "n2", 9),
    Undo(R, "n1", 0.0),
    Undo(R, "n2", 0.0),
    Renew(R, A),
    Renew(R, B),
    Release(R, A, 0.0),
    Release(R, B, 0.0),
    Inspect(R),
)


@pytest.fixture
async def redis(flushed_nodes: FlushedNodes, engine: RedisBinary) -> RedisNode:
    (redis,) = await flushed_nodes(1, binary=engine)
    return redis


@pytest.fixture
def node(redis: RedisNode) -> Iterator[LuaNode]:
    database = Database(redis.url)
    yield LuaNode(database).load()
    database.close()


def hold(node: LuaNode, *, waited_for: bool) -> None:
    """Let A hold the lock; the server at the channel `away` may wait for its end."""
    node.form()
    node.apply(Mint(R, A, "n1", "żółć with\tspaces ", TTL_MS), 0.0)
    if waited_for:
        node.apply(Mint(R, B, "n0", "", TTL_MS, watch_blocking_hold=True), 0.0, channel="away")


def make_earlier(node: LuaNode) -> None:
    """Write the hold as an earlier server did."""
    call = node.database.call
    fields, left_ms = hold_fields(call("GET", LOCK).decode()), call("PTTL", LOCK)
    call("DEL", LOCK)
    call("HSET", LOCK, *chain(*fields.items()))
    call("PEXPIRE", LOCK, left_ms)


def kept(node: LuaNode) -> Mapping[str, str] | None:
    """Return the fields of the hold, in either form."""
    match node.database.call("TYPE", LOCK):
        case b"hash":
            texts = [each.decode() for each in node.database.call("HGETALL", LOCK)]
            return dict(zip(texts[::2], texts[1::2], strict=True))
        case b"string":
            return hold_fields(node.database.call("GET", LOCK).decode())
    return None


def _timeless(reply: Reply) -> object:
    return (reply.digest, reply.token, reply.holder) if isinstance(reply, Held) else reply


@pytest.mark.parametrize("waited_for", [False, True])
def test_a_hold_of_an_earlier_server_is_answered_as_any_other(node: LuaNode, *, waited_for: bool) -> None:
    """Each command gives the same reply, hold, ttl and notice."""
    for command in COMMANDS:
        seen = []
        for is_earlier in (False, True):
            hold(node, waited_for=waited_for)
            if is_earlier:
                make_earlier(node)
            reply = node.apply(command, 0.0)
            left_ms = node.database.call("PTTL", LOCK)
            assert left_ms != -1, "every hold expires"
            seen.append((_timeless(reply), kept(node), round(left_ms / TTL_MS, 1)))
        assert seen[0] == seen[1], command


@pytest.mark.parametrize("command", [Undo(R, "n1", 0.0), Release(R, A, 0.0)])
def test_servers_hear_of_the_end_of_an_earlier_hold(
    redis: RedisNode, node: LuaNode, command: Command
) -> None:
    hold(node, waited_for=True)
    make_earlier(node)
    away = Database(redis.url)
    away.call("SUBSCRIBE", "away")
    node.apply(command, 0.0)
    assert away.exchange(b"", 1) == [[b"message", b"away", f"1 {LOCK}".encode()]]
    away.close()


@pytest.mark.parametrize(
    "command",
    [Mint(R, B, "n2", "they", TTL_MS, watch_blocking_hold=True), Renew(R, A), Inspect(R), Release(R, B, 0.0)],
)
def test_an_earlier_server_can_go_on_with_its_lease(node: LuaNode, command: Command) -> None:
    """Other callers leave the hold a hash, which an earlier server renews and releases."""
    hold(node, waited_for=False)
    make_earlier(node)
    node.apply(command, 0.0)
    assert node.database.call("TYPE", LOCK) == b"hash"


def test_an_earlier_server_neither_reads_nor_changes_a_hold_of_this_form(node: LuaNode) -> None:
    """Each script of an earlier server reads the hold first, by HMGET."""
    hold(node, waited_for=False)
    before = node.save()
    with pytest.raises(hiredis.ReplyError, match="WRONGTYPE"):
        node.database.call("EVAL", "return redis.call('HMGET', KEYS[1], 'digest')", 1, LOCK)
    assert [value for value, _ in node.save().values()] == [value for value, _ in before.values()]
