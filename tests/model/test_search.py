"""The product's own attempt and tally at small size: everything that can happen, in every order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from harness.model.adversary import Limits, Rules, World
from harness.model.invariants import Violation
from harness.model.moves import Begin, Expire, Lose, TimeOut
from harness.model.mutants import MUTANTS
from harness.model.search import search
from redfence_server.locking.node import Commit

NO_FAULT = Limits(losses=0, expiries=0, dropped_counters=0, give_ups=0, ends=0, handovers=0, keeps=0)
STATES_MAX = 400_000


def nothing_yet(_: World) -> None:
    """Search from the very beginning."""


def granted(world: World) -> None:
    """The first attempt is granted, and every node holds it."""
    world.make(Begin(0))
    world.exchange(0, 0, 1, 2)


def granted_twice(world: World) -> None:
    """The first attempt is granted, and so is its retry."""
    granted(world)
    world.make(Begin(1))
    world.exchange(1, 0, 1, 2)


def a_commit_is_late(world: World) -> None:
    """The first attempt begins to commit on a node that has lost its hold; a rival is on its way there."""
    limits, world.limits = world.limits, Limits()
    world.make(Begin(0))
    world.exchange(0, 0, 1)
    (mint,) = (message for message in world.under_way if message.node == 2)
    world.make(TimeOut(mint))
    world.make(Lose(mint.given_up()))
    assert [type(message.command) for message in world.under_way] == [Commit]
    world.make(Expire(1))
    world.make(Begin(1))
    world.exchange(1, 0)
    world.limits = limits


@dataclass(frozen=True)
class Case:
    """A small world: leases of attempts, counters of nodes, events beyond deliveries, first state."""

    leases: str
    counters: tuple[int, ...]
    limits: Limits
    beginning: Callable[[World], None] = nothing_yet

    def search(self, rules: Rules | None = None) -> int:
        """Return how many states there are."""

        def begin() -> World:
            world = World(tuple(self.leases), counters=self.counters, rules=rules, limits=self.limits)
            self.beginning(world)
            return world

        return search(begin, states_max=STATES_MAX)


A_NODE_AHEAD = Case("ab", (2, 0, 0), replace(NO_FAULT, expiries=1))
A_LATE_COMMIT = Case("aca", (1, 0, 1), replace(NO_FAULT, handovers=1), a_commit_is_late)
A_SHARED_HOLD = Case(
    "aab", (0, 0, 0), replace(NO_FAULT, handovers=1, give_ups=1, losses=1, expiries=1), granted_twice
)

CASES = {
    "two leases, a node ahead, a hold expires": A_NODE_AHEAD,
    "two leases, a message is lost or late": Case("ab", (0, 0, 0), replace(NO_FAULT, losses=1)),
    "a retried lease": Case("aa", (1, 0, 0), NO_FAULT),
    "a handover at any time, a node ahead": Case("ab", (2, 0, 0), replace(NO_FAULT, handovers=1)),
    "a handover, a message of it is lost or late": Case(
        "ab", (0, 0, 0), replace(NO_FAULT, handovers=1, losses=1)
    ),
    "a handover before or after an open release, holds expire, a message is lost or late": Case(
        "ab", (0, 0, 0), replace(NO_FAULT, handovers=1, ends=1, expiries=2, losses=1), granted
    ),
    "two servers hand over one lease": Case("abc", (0, 0, 0), replace(NO_FAULT, handovers=2), granted),
    "a retried lease is handed over to one who gives up": A_SHARED_HOLD,
    "a late commit and a handover to a retry": A_LATE_COMMIT,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
async def test_no_order_of_events_breaks_an_invariant(name: str) -> None:
    """T1, T2, K and C hold for three nodes and two or three attempts in every order of messages."""
    # Fewer states would mean that the search has lost its way.
    assert CASES[name].search() > 1_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "case", "broken"),
    [
        ("max without commit", A_NODE_AHEAD, "T2"),
        ("commit without nonce", A_LATE_COMMIT, "T1"),
        ("commit after a handover without nonce", A_LATE_COMMIT, "T1"),
        ("handover keeps the shared mark", A_SHARED_HOLD, "C"),
    ],
)
async def test_the_same_search_finds_a_mutant(mutant: str, case: Case, broken: str) -> None:
    """The search finds the popular recipe, and mutants that only a rare order of events shows."""
    with pytest.raises(Violation, match=f"^{broken}:"):
        case.search(MUTANTS[mutant])
