"""What may happen in the world of nodes that forget (forgetful_world.py), one value per event; a list of them is a trace."""

from __future__ import annotations

from typing import NamedTuple

from harness.adversary_moves import Begin, GiveUp, HandOver
from harness.forgetful_wire import Letter


class Arrive(NamedTuple):
    """A request is carried out, or an answer read."""

    letter: Letter


class TimeOut(NamedTuple):
    """The sender is told that nothing came; the letter goes on."""

    letter: Letter


class Lose(NamedTuple):
    """A letter that nobody waits for never arrives."""

    letter: Letter


class Dial(NamedTuple):
    """A server makes a connection to a process at a place, and begins to join it."""

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
