"""The events of the adversary's world (model/adversary.py); a list of them is a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from redfence_server.locking.node import Command, Reply

Way = tuple[int, int, type[Command]]


@dataclass(slots=True)
class Message:
    """A command or its reply under way. It never changes, but a frozen class is twice as slow to make.

    Attributes:
        attempt: whose it is; -1 for a release or a renewal.
        told: nobody waits for a reply, or the sender was told that none came in time.
        way: the attempt, the node and the kind of command.
        arrive: the move by which it arrives.
        key: its hash.
        miss: the move by which it is lost, or by which its sender is told that it is late.
    """

    attempt: int
    node: int
    command: Command
    reply: Reply | None
    told: bool
    way: Way = field(init=False, repr=False, compare=False)
    arrive: Arrive = field(init=False, repr=False, compare=False)
    miss: Lose | TimeOut = field(init=False, repr=False, compare=False)
    key: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A walk asks for these moves, and a search for the hash, many times.
        self.way = (self.attempt, self.node, type(self.command))
        self.arrive = Arrive(self)
        self.miss = Lose(self) if self.told else TimeOut(self)
        self.key = hash((self.attempt, self.node, self.command, self.reply, self.told))

    def __hash__(self) -> int:
        return self.key

    def answered(self, reply: Reply) -> Message:
        return Message(self.attempt, self.node, self.command, reply, self.told)

    def given_up(self) -> Message:
        """Return the same message, for which nobody waits any more."""
        return Message(self.attempt, self.node, self.command, self.reply, told=True)


class Begin(NamedTuple):
    """An attempt begins."""

    attempt: int


class GiveUp(NamedTuple):
    """The caller of an attempt goes away."""

    attempt: int


class Arrive(NamedTuple):
    """A request is applied, or a reply read."""

    message: Message


class TimeOut(NamedTuple):
    """The sender is told that nothing came; the message goes on."""

    message: Message


class Lose(NamedTuple):
    """A message that nobody waits for never arrives."""

    message: Message


class Expire(NamedTuple):
    """The hold on a node ends before its time."""

    node: int


class DropCounter(NamedTuple):
    """The counter on a node is dropped as idle."""

    node: int


class End(NamedTuple):
    """The owner of a granted lease releases it; or any owner whose attempts all failed, to be sure."""

    lease: str


class Handover(NamedTuple):
    """A release reaches a server, which begins an attempt for a waiter with it."""

    lease: str
    attempt: int


class Keep(NamedTuple):
    """The owner of a lease renews it."""

    lease: str


Move = Begin | GiveUp | Arrive | TimeOut | Lose | Expire | DropCounter | End | Handover | Keep
