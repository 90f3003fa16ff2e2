"""The attempts of the adversary's world: the product's own, with what the checks know of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from redfence_server.locking.attempt import Attempt
from redfence_server.locking.node import Command, Reply

T = TypeVar("T")


class StandingStill:
    """A clock for attempts: no time passes, so no grant is too late."""

    def now_ms(self) -> float:
        return 0.0


@dataclass(slots=True)
class Wire:
    """Where an attempt's commands to one node go: into an outbox, which is emptied after every move."""

    index: int
    outbox: list[tuple[int, Command]]

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        self.outbox.append((self.index, command))
        return True


@dataclass(slots=True, eq=False)
class Player:
    """An attempt and what the checks know of it.

    Attributes:
        floor: the greatest token of other leases that was answered before it began.
        nonces: of the holds it was granted, by node.
    """

    lease: str
    attempt: Attempt | None = None
    floor: int = 0
    nonces: dict[int, str] = field(default_factory=dict)
    token: int = 0

    @property
    def is_open(self) -> bool:
        return self.attempt is not None and self.attempt.is_open

    def copy(self) -> Player:
        attempt = None if self.attempt is None else _copy_attempt(self.attempt)
        return Player(self.lease, attempt, self.floor, self.nonces.copy(), self.token)

    def key(self) -> Hashable:
        if self.attempt is None:
            return None
        tally = self.attempt._tally
        tallied = (*tally._replies, *tally._standing, *tally._asked, tally._greatest)
        return (tallied, self.is_open, self.floor, self.token, *self.nonces.items())


def copy_of(original: T) -> T:
    """Return what `copy.copy` does, several times as fast."""
    twin = object.__new__(type(original))
    twin.__dict__.update(original.__dict__)
    return twin


def _copy_attempt(attempt: Attempt) -> Attempt:
    twin = copy_of(attempt)
    twin._admission_ids, twin._may_hold = attempt._admission_ids.copy(), attempt._may_hold.copy()
    tally = twin._tally = copy_of(attempt._tally)
    tally._replies, tally._standing, tally._asked = (
        *(tally._replies.copy(), tally._standing.copy(), tally._asked.copy()),
    )
    return twin
