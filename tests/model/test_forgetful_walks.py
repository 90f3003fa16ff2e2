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
