"""Nodes that crash, fall back, are wiped and replaced, and come back: random walks by the product's own links, on fakes and on the real scripts.

Each walk is told by its beginning and its seed. On the real scripts a node is a database of one server, expiry is a deletion, and to fall
back is to be given older data.

Not every rule can be shown to be needed this way: where two defences cover one another (the jump of the floor and the renewed admission ids), or where
only one order of events in millions does harm, walks of this number find nothing. Those rules are left out one by one in docs/model, which
tries every order (test_promela.py). The mutants of grants themselves, without a loss, are those of test_walks.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from harness.adversary import Violation
from harness.fixture_types import FreshNodes
from harness.forgetful_beginnings import BEGINNINGS, Beginning
from harness.forgetful_mutants import MUTANTS
from harness.forgetful_walk import PROCESSES_MAX, Outcome, walk
from harness.forgetful_world import Born, MakeMemory
from harness.lua_node import Database, LuaNode, ScriptSet

WALKS = 100
LUA_WALKS = 6

every_beginning = pytest.mark.parametrize("beginning", BEGINNINGS, ids=lambda each: each.__name__)


@every_beginning
async def test_no_walk_of_nodes_that_forget_breaks_an_invariant(beginning: Beginning) -> None:
    """Tokens are unique and ordered, whatever was forgotten on the way."""
    outcome = Outcome()
    for seed in range(WALKS):
        outcome = outcome.plus(await walk(seed, beginning))
    # Where nobody is granted anything, or no node comes back, nothing was shown.
    assert min(outcome) > WALKS / 3, outcome


# The walk that shows it, by beginning and seed.
CAUGHT: dict[str, tuple[Beginning, int]] = {}


@pytest.mark.parametrize("name", CAUGHT)
async def test_a_mutant_that_forgets_a_rule_is_caught(name: str) -> None:
    """Each of these rules is needed: where the same walk does no harm, it does without it."""
    beginning, seed = CAUGHT[name]
    await walk(seed, beginning)
    with pytest.raises(Violation, match=rf"^seed {seed}: T[12]:"):
        await walk(seed, beginning, rules=MUTANTS[name])


async def test_one_seed_is_one_walk() -> None:
    """A failure can be replayed."""
    assert await walk(3, BEGINNINGS[-1]) == await walk(3, BEGINNINGS[-1])


# --- the real scripts -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def databases(fresh_nodes: FreshNodes) -> AsyncIterator[list[Database]]:
    """One real server; each database is a node."""
    (redis,) = await fresh_nodes(1, appendfsync="no")
    databases = [Database(redis.url, number) for number in range(PROCESSES_MAX)]
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
    databases: list[Database], beginning: Beginning
) -> None:
    """The same walks, with every step carried out by Lua."""
    make = real(databases, ScriptSet())
    outcome = Outcome()
    for seed in range(LUA_WALKS):
        outcome = outcome.plus(await walk(seed, beginning, make_memory=make))
    assert min(outcome) > 0, outcome
