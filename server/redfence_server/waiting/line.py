"""The waiters for one resource at one server, in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Final

from redfence_server.errors import RedfenceServerError
from redfence_server.locking.attempt import Attempt
from redfence_server.locking.backoff import pauses
from redfence_server.model import AcquireCall
from redfence_server.randomness import Randomness

# A view shows this many waiters: each takes up to 300 bytes of a message of 64 KiB.
_SHOWN_MAX: Final = 100


class Turn(Enum):
    """What the queue tells a waiter to do."""

    TRY = auto()
    """Make an attempt, and tell the queue its outcome."""
    GIVE_UP = auto()
    """The wait is over."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """The waiters for a resource, the head first: label, and how long already in ms. Cut at 100; `count` is not."""

    count: int
    first: tuple[tuple[str, float], ...]
    position: int


class Waiter:
    """An Acquire that waits.

    Attributes:
        counted: it has a place in the waiting room.
        asked_for_notice: its last mint asked_for_notice for a notice of the end of the hold that it would make.
        is_retry: when it came, its own lease held the lock.
        future: tells it what to do; None while it does not wait to be told.
    """

    __slots__ = ("_pauses", "asked_for_notice", "call", "counted", "future", "is_retry")

    def __init__(self, call: AcquireCall) -> None:
        self.call = call
        self.counted = False
        self.asked_for_notice = False
        self.is_retry = False
        self.future: asyncio.Future[Turn | Attempt] | None = None
        self._pauses: Iterator[float] | None = None

    @property
    def digest(self) -> str:
        """The digest of its lease id."""
        return self.call.lease_id.digest

    @property
    def idle(self) -> bool:
        """Tell whether it waits to be told what to do."""
        return self.future is not None and not self.future.done()

    def wake(self, turn: Turn | Attempt) -> None:
        """Tell it what to do, unless it was told already."""
        if self.future is not None and not self.future.done():
            self.future.set_result(turn)

    def fail(self, error: RedfenceServerError) -> None:
        """End its wait with an error, unless it was told what to do already."""
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)

    def next_pause_ms(self, randomness: Randomness) -> float:
        """Return how long to pause before its next try. Each pause is longer than the one before."""
        if self._pauses is None:
            self._pauses = pauses(randomness)
        return next(self._pauses)

    def reset_pauses(self) -> None:
        """Begin with a short pause the next time."""
        self._pauses = None


class WaitingLine:
    """Keeps the waiters in order. Any of them may leave at any time."""

    def __init__(self) -> None:
        self._waiters: dict[Waiter, None] = {}
        self._by_digest: dict[str, list[Waiter]] = {}

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at the end."""
        self._waiters[waiter] = None
        self._by_digest.setdefault(waiter.digest, []).append(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter from any place."""
        del self._waiters[waiter]
        same = self._by_digest[waiter.digest]
        same.remove(waiter)
        if not same:
            del self._by_digest[waiter.digest]

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def head(self) -> Waiter | None:
        """The waiter that came first."""
        return next(iter(self._waiters), None)

    def of_lease(self, digest: str) -> Sequence[Waiter]:
        """Return the waiters with this lease id: one Acquire, repeated."""
        return self._by_digest.get(digest, ())

    def position(self, waiter: Waiter) -> int:
        """Return the place of a waiter; 1 is the head's."""
        return next(position for position, each in enumerate(self._waiters, 1) if each is waiter)

    def view(self, digest: str, now_ms: float) -> QueueView:
        """Show the waiters, and the place of the first one with this lease id; 0 if there is none."""
        same = self.of_lease(digest)
        first = islice(self._waiters, _SHOWN_MAX)
        return QueueView(
            len(self._waiters),
            tuple((each.call.holder, now_ms - each.call.arrived_at_ms) for each in first),
            self.position(same[0]) if same else 0,
        )

    def fail(self, error: Callable[[], RedfenceServerError]) -> None:
        """End every wait with an error."""
        for waiter in self._waiters:
            waiter.fail(error())
