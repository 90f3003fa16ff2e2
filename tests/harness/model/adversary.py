"""A world in which everything that may happen to an Acquire happens at the worst moment, in any order.

The attempts are the product's own (`Attempt` with its `Tally`); the nodes and the network are the
harness's. `moves()` and `make(move)` move a world, so one driver can walk it at random and another one
can search it whole.

Time does not pass here: a hold ends at any moment, which is more than any clock can do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from harness.doubles.node_state import FakeNodeState
from harness.model.invariants import Invariants
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
    Message,
    Move,
    TimeOut,
)
from harness.model.players import Player, StandingStill, Wire, copy_of
from redfence_server.locking.attempt import Attempt, AttemptGranted
from redfence_server.locking.node import Command, Commit, Granted, Mint, NoReply, Release, Renew, Reply, Undo
from redfence_server.locking.tally import Tally

RESOURCE = "orders/42"
TTL_MS = 3_600_000
"""As real nodes count time, longer than any world lasts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How often the world may do what is not a delivery. None: without limit.

    Attributes:
        losses: time-outs, and undos or releases that never arrive.
        ends: open releases.
    """

    losses: int | None = None
    expiries: int | None = None
    dropped_counters: int | None = None
    give_ups: int | None = None
    ends: int | None = None
    handovers: int | None = None
    keeps: int | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """The algorithm under test: the project's own, or a mutant of one of its parts (model/mutants.py).

    Attributes:
        breaks: a pattern of the letters of the invariants that a mutant breaks.
    """

    attempt: type[Attempt] = Attempt
    tally: type[Tally] = Tally
    node: type[FakeNodeState] = FakeNodeState
    breaks: str = ""


class World:
    """Nodes, attempts, and what is under way between them. `leases` names the lease of each attempt."""

    def __init__(
        self,
        leases: tuple[str, ...],
        *,
        node_count: int = 3,
        counters: tuple[int, ...] | None = None,
        rules: Rules | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.rules = rules or Rules()
        self.limits = limits or Limits()
        self.nodes = [self.rules.node() for _ in range(node_count)]
        for node, count in zip(self.nodes, counters or (0,) * node_count, strict=True):
            if count:
                node._count(RESOURCE, count, 0.0)
        self.players = [Player(lease) for lease in leases]
        self.under_way: list[Message] = []
        self.invariants = Invariants()
        self._outbox: list[tuple[int, Command]] = []
        self._wires: list[Any] = [Wire(index, self._outbox) for index in range(node_count)]

    def copy(self) -> Self:
        """Return a world in the same state with a future of its own."""
        twin = copy_of(self)
        twin.nodes = [node.save() for node in self.nodes]
        twin.players = [player.copy() for player in self.players]
        twin.under_way, twin.invariants = self.under_way.copy(), self.invariants.copy()
        return twin

    def key(self) -> int:
        """Return a hash of what tells this state from every other that can follow from the same beginning."""
        nodes = [(node.high, *node.holds.values(), *node.counters.values()) for node in self.nodes]
        players = [player.key() for player in self.players]
        return hash((*nodes, *players, frozenset(self.under_way), self.invariants.key(), self.limits))

    # --- what may happen --------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        limits, ended = self.limits, self.invariants.ended
        found: list[Move] = []
        idle: list[int] = []
        for index, player in enumerate(self.players):
            if player.attempt is None:
                # A lease id is never used again after its release: the contract asks for it.
                if player.lease not in ended:
                    found.append(Begin(index))
                    idle.append(index)
            elif limits.give_ups != 0 and player.is_open:
                found.append(GiveUp(index))
        for message in self.under_way:
            found.append(Arrive(message))
            if limits.losses != 0 and (message.told or self.players[message.attempt].is_open):
                found.append(Lose(message) if message.told else TimeOut(message))
        for index, node in enumerate(self.nodes):
            if limits.expiries != 0 and node.holds:
                found.append(Expire(index))
            if limits.dropped_counters != 0 and node.counters:
                found.append(DropCounter(index))
        for lease in sorted({player.lease for player in self.players if player.attempt}):
            if limits.handovers != 0:
                found += [Handover(lease, index) for index in idle if self.players[index].lease != lease]
            if lease not in ended and limits.ends != 0:
                found.append(End(lease))
            if lease not in ended and limits.keeps != 0:
                found.append(Keep(lease))
        return found

    def make(self, move: Move) -> None:
        """Let it happen."""
        match move:
            case Arrive(message):
                self._take(message)
                if message.reply is None:
                    self._apply(message)
                else:
                    self._tell(message, message.reply)
            case Begin(index):
                self._begin(index)
            case GiveUp(index):
                self._spend("give_ups")
                attempt = self.players[index].attempt
                assert attempt is not None
                attempt.give_up()
                self._post(index)
            case TimeOut(message):
                self._spend("losses")
                self._take(message)
                if message.reply is None:
                    self.under_way.append(message.given_up())
                if isinstance(message.command, Mint) and message.command.release_first is not None:
                    # The link keeps the release for when the node is back.
                    self.under_way.append(
                        message._replace(command=message.command.release_first, reply=None, told=True)
                    )
                self._tell(message, NoReply.TIMED_OUT)
            case Lose(message):
                self._spend("losses")
                self._take(message)
            case Expire(index):
                self._spend("expiries")
                self.nodes[index].expire(RESOURCE)
            case DropCounter(index):
                self._spend("dropped_counters")
                self.nodes[index].drop_counter(RESOURCE)
            case Keep(lease):
                self._spend("keeps")
                self._send_all(Renew(RESOURCE, lease))
            case End(lease):
                self._spend("ends")
                self.invariants.ended |= {lease}
                self._send_all(Release(RESOURCE, lease, 0))
            case Handover(lease, index):
                self._spend("handovers")
                self.invariants.ended |= {lease}
                self._begin(index, ends=Release(RESOURCE, lease, 0))

    def exchange(self, attempt: int, *nodes: int) -> None:
        """Carry an attempt's new messages to these nodes, and their answers back, to begin a search."""
        for way in ((attempt, node) for node in nodes for _ in ("there", "back")):
            message = next(each for each in self.under_way if (each.attempt, each.node) == way)
            self.make(Arrive(message))

    def _take(self, message: Message) -> None:
        """Remove a message. A walk knows it by identity; to compare messages takes long."""
        for place, each in enumerate(self.under_way):
            if each is message:
                del self.under_way[place]
                return
        self.under_way.remove(message)

    def _spend(self, kind: str) -> None:
        left = getattr(self.limits, kind)
        if left is not None:
            self.limits = replace(self.limits, **{kind: left - 1})

    def _begin(self, index: int, *, ends: Release | None = None) -> None:
        player = self.players[index]
        rivals = (each for each in self.players if each.lease != player.lease)
        player.floor = max((rival.token for rival in rivals), default=0)
        mint = Mint(RESOURCE, player.lease, f"nonce-{index}", "", TTL_MS, release_first=ends)
        player.attempt = self.rules.attempt(self._wires, mint, clock=StandingStill())
        player.attempt._tally = self.rules.tally(len(self.nodes))
        player.attempt.start()
        self._post(index)

    def _post(self, index: int) -> None:
        for node, command in self._outbox:
            told = isinstance(command, Undo | Release)
            self.under_way.append(Message(index, node, command, None, told=told))
        self._outbox.clear()
        if not self.players[index].is_open:
            self.under_way = [
                message.given_up()
                if message.attempt == index and not message.told and not self._is_awaited(message)
                else message
                for message in self.under_way
                if message.attempt != index or message.reply is None or self._is_awaited(message)
            ]

    def _is_awaited(self, message: Message) -> bool:
        """Tell whether a reply still matters: after a grant a late mint's, after a failure none."""
        player = self.players[message.attempt]
        return not message.told and (
            player.is_open or (player.token > 0 and isinstance(message.command, Mint))
        )

    def _send_all(self, command: Command) -> None:
        self.under_way += [Message(-1, node, command, None, told=True) for node in range(len(self.nodes))]

    def _apply(self, message: Message) -> None:
        node = self.nodes[message.node]
        before = node.holds.get(RESOURCE)
        answer = message._replace(reply=node.apply(message.command, 0.0))
        if before is not None:
            self.invariants.check_hold(self.players, message, before, node.holds.get(RESOURCE))
        if self._is_awaited(message):
            self.under_way.append(answer)

    def _tell(self, message: Message, reply: Reply) -> None:
        player = self.players[message.attempt]
        attempt = player.attempt
        assert attempt is not None
        was_open = player.is_open
        if isinstance(reply, Granted):
            player.nonces[message.node] = reply.nonce
        if isinstance(message.command, Commit):
            attempt._on_commit(message.node, message.command.token, reply)
        else:
            attempt._on_mint(message.node, reply)
        if was_open and isinstance(attempt.outcome, AttemptGranted):
            self.invariants.check_grant(self.players, message.attempt)
        self._post(message.attempt)
