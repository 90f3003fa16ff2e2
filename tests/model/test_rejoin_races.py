"""Two servers bring one of five nodes back at once, in every kind of order, and one of them may die: the real rejoin over fake nodes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from harness.fake_node import FakeNodeState
from harness.joining_commands import Claim as ClaimStep
from harness.joining_commands import Formation, Known, Look, Quarantine, Readmit, Sight, Step
from redfence_server.lock_node import Command, NodeReport, Notice, Reply, Silence, Vouch
from redfence_server.randomness import SystemRandomness
from redfence_server.rejoin import Claim, Rejoin, Vouched

NODES: Final = 5
LOST: Final = 4
Q: Final = "0a" * 16
SEEDS: Final = 500


class World:
    """Five nodes, of which the last is in quarantine, and what may happen next: any of it, in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes = [
            FakeNodeState(admission=f"{i}{i}" * 16, formation=Formation("cluster", i, NODES, 1_000))
            for i in range(NODES)
        ]
        for node in self.nodes:
            node.high = self.random.randrange(40)
        self.lost = self.nodes[LOST]
        self.lost.wipe()
        assert (
            self.lost.join(Quarantine(Known(), Q, Formation("cluster", LOST, NODES, 1_000), "run-2"))
            is Step.DONE
        )
        self.due: list[tuple[Driver, Callable[[], None]]] = []

    def run(self, *drivers: Driver, mortal: Driver) -> None:
        """Let things happen until nothing is left to happen; one driver dies at some moment of its life, or none does."""
        dies_at = self.random.randrange(25)
        for driver in drivers:
            self.due.append((driver, driver.begin))
        for step in range(2_000):
            if step == dies_at:
                self.due = [each for each in self.due if each[0] is not mortal]
            if not self.due:
                return
            _, happen = self.due.pop(self.random.randrange(len(self.due)))
            happen()
        raise AssertionError("it does not come to an end")


class Wire:
    """One driver's way to one other node. Delivery comes at any time."""

    def __init__(self, world: World, driver: Driver, index: int) -> None:
        self._world = world
        self._driver = driver
        self.index = index

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Deliver it some time."""
        assert on_reply is not None
        self._world.due.append((self._driver, lambda: on_reply(self._deliver(command))))
        return True

    def _deliver(self, command: Command) -> Reply:
        if self.index in self._driver.unreachable:
            return Silence.UNREACHABLE
        node = self._world.nodes[self.index]
        # Whoever recalls has looked at the node anew; a vouch goes under the id of its recall.
        under = command.under if isinstance(command, Vouch) else node.admission
        return node.apply(command, 0.0, admission=under)

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        """Not asked for."""
        raise NotImplementedError

    def report(self) -> NodeReport:
        """Not asked for."""
        raise NotImplementedError


class Driver:
    """What node_joining.py does with a node whose quarantine has lasted long enough, one step after another."""

    def __init__(self, world: World, *, unreachable: frozenset[int], claims: bool) -> None:
        self._world = world
        self._claims = claims
        self.unreachable = unreachable
        self.readmitted = False

    def begin(self) -> None:
        """Look, and recall."""
        sight = self._world.lost.join(Look())
        assert isinstance(sight, Sight)
        assert sight.identity is not None
        if sight.identity.admission != Q:
            return
        wires = [Wire(self._world, self, index) for index in range(NODES) if index != LOST]
        number = max(sight.identity.floor, sight.high or 0)
        changes = sight.identity.changes
        self._rejoin = Rejoin(LOST, wires, number=number, changes=changes, randomness=SystemRandomness())
        self._rejoin.start()
        self._then(self._claim)

    def _then(self, step: Callable[[], None]) -> None:
        self._world.due.append((self, step))

    def _claim(self) -> None:
        if not self._rejoin.recalled.done():
            self._then(self._claim)
            return
        claim = self._rejoin.recalled.result()
        assert isinstance(claim, Claim), "a quorum of others is there"
        if self._claims and self._world.lost.join(ClaimStep(Q, claim.floor, claim.changes)) is not Step.DONE:
            self._then(self.begin)
            return
        self._rejoin.vouch(claim)
        self._then(self._readmit)

    def _readmit(self) -> None:
        if not self._rejoin.outcome.done():
            self._then(self._readmit)
            return
        vouched = self._rejoin.outcome.result()
        if not isinstance(vouched, Vouched):
            self._then(self.begin)
            return
        numbers = (vouched.claim.floor, vouched.claim.changes)
        step = self._world.lost.join(Readmit(Q, "ff" * 16, *numbers, "run-2", vouched.known_floors))
        self.readmitted = step is Step.DONE
        if not self.readmitted:
            self._then(self.begin)


def is_outdone(seed: int, *, claims: bool = True) -> bool:
    """Tell whether the node votes again in the end, and yet another one knows of a greater floor at its place."""
    world = World(seed)
    # Each is cut off from one node, and not from the same one.
    away = [frozenset({world.random.randrange(LOST)}) for _ in range(2)]
    drivers = [Driver(world, unreachable=each, claims=claims) for each in away]
    world.run(*drivers, mortal=drivers[0])
    assert any(driver.readmitted for driver in drivers)
    assert world.lost.floor > 0
    told = max(node.known_floors.get(LOST, 0) for node in world.nodes)
    return told > world.lost.floor


async def test_whoever_brings_a_node_back_nobody_takes_it_for_one_that_was_replaced() -> None:
    """What the others know of its floor is never more than it has."""
    assert [seed for seed in range(SEEDS) if is_outdone(seed)] == []


async def test_without_claims_a_server_that_dies_leaves_the_others_with_a_floor_that_nobody_has() -> None:
    """So the claim is what does it."""
    assert any(is_outdone(seed, claims=False) for seed in range(SEEDS))
