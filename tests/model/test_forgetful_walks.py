"""Nodes that crash, fall back, are wiped and replaced, and come back: random walks of the product's own links, on fakes and on the real scripts.

Each walk is told by its beginning and its seed. On the real scripts a node is a database of one server, expiry is a deletion, and to fall
back is to be given older data.

Not every rule is shown to be needed here. Some are covered by another one until both are gone, or need an order of events that no few hundred walks
come upon: that a node is asked to vouch under the id under which it was read, that a commit goes under the id of its mint, that R is written
back, that a node which comes back is told the floors of other places, and that only its own quarantine is ended. docs/model does without each rule in
turn and tries every order (test_promela.py). The claim has walks of its own (test_rejoin_races.py), and so has what is wrong with a grant while
nobody forgets (test_walks.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from harness.adversary import Violation
from harness.fixture_types import FreshNodes
from harness.forgetful_beginnings import (
    BEGINNINGS,
    Beginning,
    a_commit_is_late,
    a_grant_is_forgotten_after_a_return,
    a_grant_is_half_forgotten,
    a_vote_is_late,
    replaced_unnoticed,
)
from harness.forgetful_mutants import MUTANTS
from harness.forgetful_walk import PROCESSES_MAX, Outcome, walk
from harness.forgetful_world import Born, ForgetfulRules, MakeMemory
from harness.lua_node import Database, LuaNode, ScriptSet
from redfence_server.rejoin import NUMBERS_JUMP

WALKS = 80
LUA_WALKS = 8

every_beginning = pytest.mark.parametrize("beginning", BEGINNINGS, ids=lambda each: each.__name__)


@pytest.mark.slow
@every_beginning
async def test_no_walk_of_nodes_that_forget_breaks_an_invariant(beginning: Beginning) -> None:
    """Tokens are unique and ordered, whatever was forgotten on the way."""
    outcome = Outcome()
    for seed in range(WALKS):
        outcome = outcome.plus(await walk(seed, beginning))
    # Where nobody is granted anything, or no node comes back, or nothing is granted after that, nothing was shown.
    assert min(outcome) > WALKS / 4, outcome


async def caught(
    beginning: Beginning, seed: int, rules: ForgetfulRules, make_memory: MakeMemory | None = None
) -> int:
    """Return the first seed, from this one on, whose walk breaks an invariant by these rules."""
    for each in range(seed, seed + WALKS):
        try:
            await walk(each, beginning, rules=rules, make_memory=make_memory)
        except Violation:
            return each
    pytest.fail(f"not caught in {WALKS} walks")


# By which walk. If a change of the product has made that one harmless, a later one is looked for.
CAUGHT: dict[str, tuple[Beginning, int]] = {
    "vote before rejoin": (a_grant_is_forgotten_after_a_return, 22),
    "rejoin that reads f nodes": (replaced_unnoticed, 6),
    "rejoin without new ids": (replaced_unnoticed, 32),
    "rejoin without jump and new ids": (a_vote_is_late, 31),
    "mint without floor": (a_grant_is_half_forgotten, 83),
    "others not heeded": (replaced_unnoticed, 324),
}


@pytest.mark.parametrize("name", CAUGHT)
async def test_a_rejoin_without_a_rule_is_caught(name: str) -> None:
    """Each of these rules is needed: in a walk that does no harm with it, tokens repeat or fall behind without."""
    beginning, seed = CAUGHT[name]
    await walk(await caught(beginning, seed, MUTANTS[name]), beginning)


def test_every_mutant_is_tried() -> None:
    """One that nobody runs shows nothing."""
    assert CAUGHT.keys() == MUTANTS.keys()


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


@pytest.mark.slow
@every_beginning
async def test_a_walk_on_the_real_scripts_is_the_walk_on_fakes(
    databases: list[Database], beginning: Beginning
) -> None:
    """With every step carried out by Lua, no walk breaks an invariant either, and the same comes of each."""
    make = real(databases, ScriptSet())
    outcome = Outcome()
    for seed in range(LUA_WALKS):
        outcome = outcome.plus(on_scripts := await walk(seed, beginning, make_memory=make))
        assert on_scripts == await walk(seed, beginning), seed
    assert outcome.granted > 0
    assert outcome.rejoined > 0


@dataclass(frozen=True, slots=True)
class LuaMutant:
    """A piece of a script and what stands there instead, and the walk that shows the harm.

    Attributes:
        numbers_jump: of each rejoin. Where two defences cover one another, this takes the other one away.
    """

    script: str
    old: str
    new: str
    beginning: Beginning
    seed: int
    numbers_jump: int = NUMBERS_JUMP


LUA_MUTANTS = {
    "mint ignores the floor": LuaMutant(
        "mint", "math.max(counter, floor) + 1", "counter + 1", a_grant_is_half_forgotten, 83
    ),
    "mint counts from zero": LuaMutant(
        "mint",
        "redis.call('GET', KEYS[4]) or high)",
        "redis.call('GET', KEYS[4]) or 0)",
        *(a_grant_is_half_forgotten, 1),
    ),
    "commit leaves `high` as it is": LuaMutant(
        "commit", "if high < token then", "if false then", a_grant_is_half_forgotten, 7
    ),
    "commit under any admission id": LuaMutant(
        "commit",
        "redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] or not (high and high >= 0)",
        "not high",
        *(a_commit_is_late, 0, 1),
    ),
    "vouch keeps the admission id": LuaMutant(
        "vouch", "'admission', ARGV[2], 'floor:'", "'floor:'", a_commit_is_late, 6, 1
    ),
}


@pytest.mark.parametrize("name", LUA_MUTANTS)
async def test_a_mutant_of_the_scripts_is_caught(databases: list[Database], name: str) -> None:
    """What the walks on real scripts see is what the scripts do, and not what the fake would."""
    mutant = LUA_MUTANTS[name]
    rules = ForgetfulRules(numbers_jump=mutant.numbers_jump)
    broken = real(databases, ScriptSet(mutant.script, mutant.old, mutant.new))
    seed = await caught(mutant.beginning, mutant.seed, rules, broken)
    await walk(seed, mutant.beginning, rules=rules, make_memory=real(databases, ScriptSet()))
