"""The product's own attempt and tally at small size: everything that can happen, in every order."""

from __future__ import annotations

import pytest

from harness.adversary import Limits, Rules, Violation, World
from harness.adversary_mutants import MUTANTS
from harness.adversary_search import search

NO_FAULT = Limits(losses=0, expiries=0, dropped_counters=0, give_ups=0, ends=0, keeps=0)
AN_EXPIRY = Limits(losses=0, expiries=1, dropped_counters=0, give_ups=0, ends=0, keeps=0)
A_LOSS = Limits(losses=1, expiries=0, dropped_counters=0, give_ups=0, ends=0, keeps=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leases", "counters", "limits"),
    [
        pytest.param("ab", (2, 0, 0), AN_EXPIRY, id="two leases, a node ahead, a hold expires"),
        pytest.param("ab", (0, 0, 0), A_LOSS, id="two leases, a message is lost or late"),
        pytest.param("aa", (1, 0, 0), NO_FAULT, id="a retried lease"),
    ],
)
async def test_no_order_of_events_breaks_an_invariant(
    leases: str, counters: tuple[int, ...], limits: Limits
) -> None:
    """Three nodes, two attempts, every interleaving of mints, replies, commits and undos: T1, T2 and K hold."""
    states = search(lambda: World(tuple(leases), counters=counters, limits=limits), states_max=400_000)
    # Fewer would mean that the search has lost its way.
    assert states > 1_000, states


async def test_the_search_finds_that_the_naive_recipe_fails() -> None:
    """The same search in the same world, but without the commit: a later grant gets the smaller token."""
    rules: Rules = MUTANTS["max without commit"]
    with pytest.raises(Violation, match="T2:"):
        search(
            lambda: World(("a", "b"), counters=(2, 0, 0), rules=rules, limits=AN_EXPIRY), states_max=400_000
        )
