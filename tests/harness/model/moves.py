"""The events of the adversary's world (model/adversary.py); a list of them is a trace."""

from __future__ import annotations

from typing import NamedTuple

from redfence_server.locking.node import Command, Reply

Way = tuple[int, int, type[Command]]


class Message(NamedTuple):
    """A command or its reply under way.

    Attributes:
        attempt: whose it is; -1 for a release or a renewal.
        told: nobody waits for a reply, or the sender was told that none came in time.
    """

    attempt: int
    node: int
    command: Command
    reply: Reply | None
    told: bool

    @property
    def way(self) -> Way:
        """The attempt, the node and the kind of command."""
        return self.attempt, self.node, type(self.command)

    def given_up(self) -> Message:
        """Return the same message, for which nobody waits any more."""
        return self._replace(told=True)


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
