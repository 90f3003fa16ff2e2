"""Drive the adversary's world: a walk picks every move by chance, a search makes every possible move."""

from __future__ import annotations

import random
from collections.abc import Callable

from harness.model.adversary import Rules, World
from harness.model.invariants import Violation
from harness.model.moves import (
    Arrive,
    Begin,
    DropCounter,
    End,
    Expire,
    GiveUp,
    Handover,
    Keep,
    Lose,
    Move,
    TimeOut,
    Way,
)
from redfence_server.locking.node import Commit, Mint, Release, Renew, Undo

WEIGHTS: dict[type[Move], float] = {
    Arrive: 12,
    Begin: 0.4,
    TimeOut: 0.05,
    Lose: 0.05,
    Expire: 0.5,
    DropCounter: 0.1,
    GiveUp: 0.05,
    End: 0.05,
    Handover: 0.4,
    Keep: 0.02,
}
"""How much likelier each kind of move is in a walk, per move that may be made."""


SLOWNESS = (1.0, 1.0, 0.03)
"""How much less likely some messages move: those of one kind between one attempt and one node."""


def walk(world: World, *, seed: int, moves_max: int = 400) -> int:
    """Make moves by chance until nothing is left to do; return how many attempts were granted."""
    chance = random.Random(seed)
    speeds: dict[Way, float] = {
        (attempt, node, kind): WEIGHTS[Arrive] * chance.choice(SLOWNESS)
        for attempt in range(-1, len(world.players))
        for node in range(len(world.nodes))
        for kind in (Mint, Commit, Undo, Release, Renew)
    }
    trace: list[Move] = []
    try:
        for _ in range(moves_max):
            moves = world.moves()
            if not moves:
                break
            weights = [speeds[each[0].way] if type(each) is Arrive else WEIGHTS[type(each)] for each in moves]
            (move,) = chance.choices(moves, weights)
            trace.append(move)
            world.make(move)
    except Violation as found:
        raise Violation(f"seed {seed}: {found}\n{_told(trace)}") from None
    return sum(player.token > 0 for player in world.players)


def world_of(seed: int, rules: Rules | None = None) -> World:
    """Return the start of a walk: 3 or 5 nodes that disagree, and attempts, some of them retries."""
    chance = random.Random(f"world {seed}")
    node_count = chance.choice((3, 3, 3, 5))
    counters = tuple(chance.choice((0, 0, 1, 2)) for _ in range(node_count))
    leases = tuple(chance.choices(chance.choice(("aab", "aabc", "aabcde")), k=chance.randint(3, 7)))
    return World(leases, node_count=node_count, counters=counters, rules=rules)


def search(begin: Callable[[], World], *, states_max: int) -> int:
    """Make every sequence of moves from a beginning, each state once; return how many states there are.

    Raises:
        Violation: an invariant is broken; the message has the trace.
        AssertionError: there are more states than `states_max`, so nothing is proven.
    """
    first = begin()
    # By hash: a collision would skip a state, once in 2^64 / states^2.
    seen = {first.key()}
    stack = [(first, first.moves())]
    trace: list[Move] = []
    while stack:
        world, moves = stack[-1]
        if not moves:
            stack.pop()
            if trace:
                trace.pop()
            continue
        move = moves.pop()
        after = world.copy() if moves else world
        trace.append(move)
        try:
            after.make(move)
        except Violation as found:
            raise Violation(f"{found}\n{_told(trace)}") from None
        key = after.key()
        if key in seen:
            trace.pop()
            continue
        seen.add(key)
        assert len(seen) <= states_max, f"more than {states_max} states: nothing is proven"
        stack.append((after, after.moves()))
    return len(seen)


def _told(trace: list[Move]) -> str:
    return "\n".join(f"{step:4} {move}" for step, move in enumerate(trace))
