"""A walk through the world of nodes that forget: every move is picked by chance, and one seed is one walk."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

from harness.adversary import Violation
from harness.adversary_moves import Begin, GiveUp, HandOver
from harness.forgetful_beginnings import Beginning, connect
from harness.forgetful_moves import (
    Arrive,
    Break,
    Crash,
    Dial,
    DropCounter,
    Expire,
    Lose,
    Move,
    Replace,
    Restart,
    Save,
    Tell,
    TimeOut,
    Wipe,
)
from harness.forgetful_wire import NOBODY, Letter
from harness.forgetful_world import ForgetfulRules, ForgetfulWorld, Limits, MakeMemory
from redfence_server import node_joining, rejoin

WEIGHTS: dict[type[Move], float] = {
    Begin: 0.03,
    HandOver: 0.03,
    GiveUp: 0.005,
    TimeOut: 0.005,
    Lose: 0.01,
    Dial: 2,
    Break: 0.5,
    Tell: 0.02,
    Restart: 0.02,
    Expire: 0.3,
    DropCounter: 0.02,
    Save: 0.1,
    Crash: 0.03,
    Wipe: 0.05,
    Replace: 0.1,
}
"""How much likelier each kind of event is, per event that may happen."""
SLOWNESS = (1.0, 1.0, 0.1)
"""How much less likely letters move between one server and one place, but for those of attempts."""
OUT_OF_REACH = 0.0002
"""And those of an attempt to places beyond a quorum that chance has picked for it: so quorums share as little as they can."""
EVENTS = 0.1
"""How likely an event is, against one letter that may move."""


STRAY = 0.04
"""How many letters are delayed for long."""
DELAYED = 0.01
"""And how much less likely they move."""
LEFT_UNDER_WAY = 0.7
"""How many are of those that a beginning has left under way."""


@dataclass(frozen=True, slots=True)
class Mood:
    """What is likelier for a while, so that something comes of it before the next thing happens."""

    attempts: float = 1.0
    joining: float = 1.0
    forgetting: float = 1.0


MOODS = (Mood(joining=0.03, forgetting=0.03), Mood(attempts=0.03, forgetting=0.2), Mood())
MOOD_CHANGES = 0.04
"""How likely, per move."""
ASLEEP = 0.01
"""How much a server does whose process is stopped for a while."""


VIOLENCE = (1.0, 0.03)
"""How likely faults are in a walk, and holds that end early: in a calm one, what a beginning has left is seen through to its end."""
FAULTS = (TimeOut, Lose, Restart, Expire, DropCounter, Crash, Wipe, Replace)


class Outcome(NamedTuple):
    """What came of a walk, or of several.

    Attributes:
        granted: how many attempts were granted, those of the beginning included.
        rejoined: how often a node came back in the walk.
        granted_after: how many attempts were granted after one had.
    """

    granted: int = 0
    rejoined: int = 0
    granted_after: int = 0

    def plus(self, other: Outcome) -> Outcome:
        """Return what came of both."""
        return Outcome(*map(sum, zip(self, other, strict=True)))


class Walk:
    """One walk.

    Attributes:
        trace: the moves that were made.
    """

    def __init__(self, world: ForgetfulWorld, *, seed: int) -> None:
        self.world = world
        self._chance = random.Random(seed)
        self._seed = seed
        self._reached = [self._reach() for _ in world.players]
        ways = [(server.number, place) for server in world.servers for place in range(world.node_count)]
        self._speeds = {way: self._chance.choice(SLOWNESS) for way in ways}
        self._violence = self._chance.choice(VIOLENCE)
        self._luck = {letter: self._draw_luck(LEFT_UNDER_WAY) for letter in world.under_way}
        self._dialled: Counter[Dial] = Counter()
        self._change_mood()
        self.trace: list[Move] = []

    async def go(self, *, moves_max: int) -> Outcome:
        """Make moves until every attempt has come to an end.

        Raises:
            Violation: an invariant is broken; the message has the seed and the trace.
        """
        rejoined_before, granted_before = self.world.rejoined, self._granted()
        try:
            for _ in range(moves_max):
                if self.world.is_over():
                    break
                if self._chance.random() < MOOD_CHANGES:
                    self._change_mood()
                move = self._pick()
                self.trace.append(move)
                await self.world.make(move)
                if self.world.rejoined == rejoined_before:
                    granted_before = self._granted()
        except Violation as found:
            raise Violation(f"seed {self._seed}: {found}\n{self._told()}") from None
        granted = self._granted()
        return Outcome(granted, self.world.rejoined - rejoined_before, granted - granted_before)

    def _granted(self) -> int:
        return sum(player.token > 0 for player in self.world.players)

    def _reach(self) -> frozenset[int]:
        places = range(self.world.node_count)
        count = self._chance.choice((len(places), len(places) // 2 + 1, len(places) // 2 + 1))
        return frozenset(self._chance.sample(places, count))

    def _change_mood(self) -> None:
        self._mood = self._chance.choice(MOODS)
        asleep = self._chance.choice((-1, -1, *(server.number for server in self.world.servers)))
        self._alertness = [ASLEEP if server.number == asleep else 1.0 for server in self.world.servers]
        self._dialled.clear()

    def _pick(self) -> Move:
        letters = self.world.under_way
        speeds = [self._speed(letter) for letter in letters]
        lost = sum(link.connection is None for server in self.world.servers for link in server.links)
        events = EVENTS + 0.2 * self._mood.joining * lost
        if self._chance.random() * (sum(speeds) + events) >= events:
            return Arrive(self._chance.choices(letters, speeds)[0])
        moves = list(self.world.events())
        open_count = sum(player.is_open for player in self.world.players)
        away = self.world.places_away()
        weights = [self._weight(move) * self._bias(move, open_count, away) for move in moves]
        move = self._chance.choices(moves, weights)[0]
        if isinstance(move, Dial):
            self._dialled[move] += 1
        return move

    def _draw_luck(self, stray: float) -> float:
        return DELAYED if self._chance.random() < stray else 1.0

    def _speed(self, letter: Letter) -> float:
        speed = self._luck.get(letter)
        if speed is None:
            speed = self._luck[letter] = self._draw_luck(STRAY)
        way = letter.connection
        if letter.answer is not None:
            speed *= self._alertness[way.server]
        if letter.sender != NOBODY:
            reached = way.place in self._reached[letter.sender]
            return speed * self._mood.attempts * (1 if reached else OUT_OF_REACH)
        return speed * self._mood.joining * self._speeds[way.server, way.place]

    def _weight(self, move: Move) -> float:
        return WEIGHTS[type(move)] * (self._violence if isinstance(move, FAULTS) else 1)

    def _bias(self, move: Move, open_count: int, away: set[int]) -> float:  # noqa: PLR0911  (one return per kind of event)
        """Return how much likelier an event is than others of its kind."""
        match move:
            case Dial(server):
                return self._mood.joining * 0.3 ** self._dialled[move] * self._alertness[server]
            case Begin(index) | HandOver(_, index):
                can = 2 * self.world.ready_count(index) > self.world.node_count
                alert = self._alertness[self.world.home(index)]
                return self._mood.attempts * alert * (1 if can else 0.02) * 0.3**open_count
            case Tell(server):
                return self._alertness[server]
            case Break(server, place):
                broken = self.world.is_broken(server, place)
                return self._alertness[server] * (1 if broken else 0.01 * self._violence)
            case Replace(place):
                return self._mood.forgetting * (0.02 if away - {place} else 1)
            case Crash(index) | Wipe(index):
                return self._mood.forgetting * (0.02 if away - {self.world.processes[index].place} else 1)
        return 1

    def _told(self) -> str:
        return "\n".join(f"{step:4} {move}" for step, move in enumerate(self.trace))


LIMITS = Limits(saves=2, crashes=2, wipes=1, replacements=1, restarts=1)
PROCESSES_MAX = 7
"""How many processes a walk has at most: five nodes, one that a beginning replaces one with, and one that the walk does."""


async def walk(
    seed: int,
    beginning: Beginning,
    *,
    rules: ForgetfulRules | None = None,
    make_memory: MakeMemory | None = None,
    moves_max: int = 800,
) -> Outcome:
    """Walk from a beginning; see `Walk.go`.

    3 or 5 nodes, two servers, attempts for many leases or few, so that some are retries.
    """
    chance = random.Random(f"world {seed}")
    node_count = chance.choice((3, 3, 5))
    leases = tuple("abcdefgh"[: chance.randint(5, 8)])
    if chance.random() < 0.2:
        leases = tuple(chance.choices("abcd", k=len(leases)))
    rules = rules or ForgetfulRules()
    with (
        patch.object(node_joining, "Rejoin", rules.rejoin),
        patch.object(rejoin, "NUMBERS_JUMP", rules.numbers_jump),
    ):
        world = ForgetfulWorld(
            leases,
            # Those of which a beginning tells are all of one server, and its first rejoin is driven by the other one.
            (1, 1, 1, *(chance.choice((0, 1)) for _ in leases[3:])),
            node_count=node_count,
            durable=frozenset(chance.choice(((), (), (node_count - 1,)))),
            adopts_empty=chance.choice((True, True, False)),
            rules=rules,
            make_memory=make_memory,
        )
        try:
            await connect(world)
            await beginning(world)
            world.limits = LIMITS
            return await Walk(world, seed=seed).go(moves_max=moves_max)
        finally:
            await world.end()
