"""What may happen in the world of nodes that forget (forgetful_world.py), one value per event; a list of them is a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from harness.adversary_moves import Begin, GiveUp, HandOver
from harness.joining_commands import JoiningAnswer, JoiningCommand, Sight
from redfence_server.lock_node import Command, Reply


class ByAttempt(NamedTuple):
    """An attempt waits for the answer."""

    attempt: int


class ByJoining(NamedTuple):
    """The server itself does, which is about to find out whether the node at a place may vote."""

    place: int


class ByRejoin(NamedTuple):
    """The rejoin of a place does, which the server drives over this connection to it."""

    place: int
    connection: int


class ByPulse(NamedTuple):
    """The server itself does, which asks what a node knows."""

    place: int


Sender = ByAttempt | ByJoining | ByRejoin | ByPulse


@dataclass(frozen=True, slots=True)
class Letter:
    """A command, or its answer, on one connection.

    Attributes:
        process: at the other end, and the run of it with which the connection was made.
        connection: its number among all that this server has made to the place.
        under: the admission id under which it was sent.
        known: how many changes the node was known to have made then.
        reply: None on the way there.
        changes: that the answer tells of.
        told: nobody waits for a reply, or the sender was told that none came.
    """

    sender: Sender
    server: int
    place: int
    process: int
    run_id: str
    connection: int
    under: str
    known: int
    command: Command | JoiningCommand
    reply: Reply | JoiningAnswer | None = None
    changes: int = 0
    told: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A search hashes each of them many times.
        way = (
            self.sender,
            self.server,
            self.place,
            self.process,
            self.run_id,
            self.connection,
            self.under,
            self.known,
        )
        reply = repr(self.reply) if isinstance(self.reply, Sight) else self.reply
        object.__setattr__(self, "_hash", hash((way, self.command, reply, self.changes, self.told)))

    def __hash__(self) -> int:
        return self._hash


class Arrive(NamedTuple):
    """A request is carried out, or a reply read."""

    letter: Letter


class TimeOut(NamedTuple):
    """The sender is told that nothing came; the letter goes on."""

    letter: Letter


class Lose(NamedTuple):
    """A letter that nobody waits for never arrives."""

    letter: Letter


class Dial(NamedTuple):
    """A server makes a connection to a process at a place, and looks at it."""

    server: int
    place: int
    process: int


class Break(NamedTuple):
    """A server's connection to a place breaks, or it notices that it has."""

    server: int
    place: int


class Tell(NamedTuple):
    """A server sends its pulses."""

    server: int


class Restart(NamedTuple):
    """A server dies and begins anew, knowing nothing."""

    server: int


class Expire(NamedTuple):
    """The hold on a process ends before its time, if there is one."""

    process: int


class DropCounter(NamedTuple):
    """The counter on a process is dropped as idle, if there is one."""

    process: int


class Save(NamedTuple):
    """What a process remembers now is kept somewhere: on its disk, in a snapshot."""

    process: int


class Crash(NamedTuple):
    """A process dies and starts again with what it knew when it was saved the n-th time; -1: it has lost nothing.

    Who is connected to it does not notice yet: answers may still be on the way.
    """

    process: int
    saved: int


class Wipe(NamedTuple):
    """A process forgets everything while it runs, connections and all."""

    process: int


class Replace(NamedTuple):
    """An operator puts an empty node in the place of another one, which lives on."""

    place: int


Move = (
    Begin
    | GiveUp
    | HandOver
    | Arrive
    | TimeOut
    | Lose
    | Dial
    | Break
    | Tell
    | Restart
    | Expire
    | DropCounter
    | Save
    | Crash
    | Wipe
    | Replace
)
