"""How many commands a lock costs a node, and how many of them the node writes to its log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from harness.doubles.lua_node import Database, LuaNode
from harness.processes.fixture_types import FreshNodes
from harness.processes.node_data import log_file, transactions
from harness.processes.redis_nodes import RedisNode
from redfence_server.embedded.binary import RedisBinary
from redfence_server.locking.node import Command, Commit, Mint, Release, Renew
from redfence_server.redis_io.scripts import Keyspace

R = "orders/42"
KEYS = Keyspace()
LOCK, COUNTER, HIGH = KEYS.lock(R), KEYS.counter(R), KEYS.high
A = "a" * 64
TTL_MS = 3_600_000


def _counts(database: Database) -> Mapping[str, int]:
    stats = database.call("INFO", "commandstats").decode()
    return {name: int(calls) for name, calls in re.findall(r"cmdstat_(\w+):calls=(\d+)", stats)}


def cost(redis: RedisNode, node: LuaNode, command: Command) -> tuple[Mapping[str, int], Sequence[str]]:
    """Return how often the script ran each command, and each command that the node logged, with its key."""
    before, size = _counts(node.database), log_file(redis).stat().st_size
    node.apply(command, 0.0)
    after = _counts(node.database)
    ran = {name: calls - before.get(name, 0) for name, calls in after.items()}
    logged = [
        b" ".join(part[:2]).decode()
        for each in transactions(log_file(redis).read_bytes())
        if each.starts_at >= size
        for part in each.commands
    ]
    return {name: calls for name, calls in ran.items() if calls and name not in {"evalsha", "info"}}, logged


async def test_a_mint_and_a_release_cost_a_node_eight_commands_and_three_writes(
    fresh_nodes: FreshNodes, engine: RedisBinary
) -> None:
    (redis,) = await fresh_nodes(1, binary=engine)
    database = Database(redis.url)
    node = LuaNode(database).load().form()
    mint, release = Mint(R, A, "n1", "h", TTL_MS), Release(R, A, 0.0)
    inside = {"hmget": 1, "mget": 1, "time": 1}
    # A token that is the greatest of the node is written once more.
    writes = [f"SET {COUNTER}", f"SET {HIGH}", f"SET {LOCK}"]
    assert cost(redis, node, mint) == (inside | {"set": 3}, ["MULTI", *writes, "EXEC"])
    node.apply(Mint("other", A, "n1", "h", TTL_MS), 0.0)
    node.apply(Commit("other", A, "n1", 100), 0.0)
    ran, (logged,) = cost(redis, node, Renew(R, A))
    assert (ran, logged.split()[1]) == ({"hmget": 1, "get": 1, "pexpire": 1}, LOCK)
    assert cost(redis, node, release) == ({"hget": 1, "get": 1, "del": 1}, [f"DEL {LOCK}"])
    assert cost(redis, node, mint) == (inside | {"set": 2}, ["MULTI", writes[0], writes[2], "EXEC"])
    database.close()
