"""Nodes that crash, fall back, are wiped and replaced, and come back by the product's own `Rejoin`: random walks, on fakes and on the real scripts.

The tokens need no clock, so a rejoin may come at once, a hold may end at any moment and a message may be as late as it likes. Every walk is told by its
seed. On the real scripts a node is a database of one real server, expiry is a deletion, and to fall back is to be given older data.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from harness.adversary import Violation
from harness.fixture_types import FreshNodes
from harness.forgetful_beginnings import BEGINNINGS
from harness.forgetful_mutants import MUTANTS
from harness.forgetful_walk import walk, world_of
from harness.forgetful_world import Born, MakeMemory
from harness.lua_node import Database, LuaNode, ScriptSet

WALKS = 120
LUA_WALKS = 25
# The most processes that a walk has: five nodes, and one that replaces one of them.
PROCESSES = 6

every_beginning = pytest.mark.parametrize("beginning", BEGINNINGS, ids=lambda each: each.__name__)


@every_beginning
async def test_no_walk_of_nodes_that_forget_breaks_an_invariant(beginning: object) -> None:
    """Tokens are unique and ordered, whatever was forgotten on the way; and attempts are granted, or nothing was shown."""
    granted = sum(walk(world_of(seed, beginning=beginning), seed=seed) for seed in range(WALKS))  # type: ignore[arg-type]
    assert granted > WALKS


# The walk that shows it, by beginning and seed.
CAUGHT = {
    "vote before rejoin": (5, 1),
    "rejoin that reads f nodes": (2, 13),
}


@pytest.mark.parametrize("name", CAUGHT)
async def test_a_mutant_that_forgets_a_rule_is_caught(name: str) -> None:
    """Each rule of the rejoin is there for something."""
    beginning, seed = CAUGHT[name]
    with pytest.raises(Violation):
        walk(world_of(seed, MUTANTS[name], beginning=BEGINNINGS[beginning]), seed=seed)


# --- the real scripts -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def databases(fresh_nodes: FreshNodes) -> AsyncIterator[list[Database]]:
    """One real server; each database is a node."""
    (redis,) = await fresh_nodes(1, appendfsync="no")
    databases = [Database(redis.url, number) for number in range(PROCESSES)]
    yield databases
    for database in databases:
        database.close()


def real(databases: list[Database], scripts: ScriptSet) -> MakeMemory:
    """Return what makes the memories of a world: the scripts on real databases."""

    def make(number: int, born: Born) -> LuaNode:
        node = LuaNode(databases[number], script_set=scripts).load()
        return node.form(
            admission=born.admission, formation=born.formation, run_id=born.run_id, durable=born.durable
        )

    return make


@every_beginning
async def test_no_walk_on_the_real_scripts_breaks_an_invariant(
    databases: list[Database], beginning: object
) -> None:
    """The same walks, with every step carried out by Lua."""
    make = real(databases, ScriptSet())
    granted = 0
    for seed in range(LUA_WALKS):
        granted += walk(world_of(seed, make_memory=make, beginning=beginning), seed=seed)  # type: ignore[arg-type]
    assert granted > LUA_WALKS / 2


LUA_MUTANTS = {
    "mint without a greater number": ("mint", "tonumber(node[2] or 0)) + 1", "tonumber(node[2] or 0))"),
    "commit without the nonce": (
        "commit",
        "hold[1] ~= ARGV[2] or hold[2] ~= ARGV[3]",
        "hold[1] ~= ARGV[2]",
    ),
    "counter from zero": ("mint", "redis.call('GET', KEYS[4]) or high)", "redis.call('GET', KEYS[4]) or 0)"),
}


@pytest.mark.parametrize("name", LUA_MUTANTS)
async def test_a_mutant_of_the_scripts_is_caught(databases: list[Database], name: str) -> None:
    """The walks see what the scripts do, and not what the fake would."""
    make = real(databases, ScriptSet(*LUA_MUTANTS[name]))
    with pytest.raises(Violation):
        for beginning in BEGINNINGS:
            for seed in range(6 * LUA_WALKS):
                walk(world_of(seed, make_memory=make, beginning=beginning), seed=seed)
