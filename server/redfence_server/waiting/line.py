"""Keep the waiters for one resource at one server in the order of their arrival."""

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

# The most waiters that a view shows: each takes up to 300 bytes of a message of 64 KiB.
_SHOWN_MAX: Final = 100


class Turn(Enum):
    """The next step of a waiter, as its queue decides."""

    TRY = auto()
    """Make an attempt, and report its outcome to the queue."""
    GIVE_UP = auto()
    """Stop waiting."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """How many waiters there are, the label and waiting time in ms of the first 100, and one position."""

    count: int
    first: tuple[tuple[str, float], ...]
    position: int


class Waiter:
    """An Acquire that waits.

    Args:
        on_turn: called with each turn that the waiter waited for, or with the error that ends its wait.

    Attributes:
        counted: the limiter counts it.
        asked_for_notice: its last mint asked for a notice when the new hold ends.
        is_retry: its own lease held the lock when it arrived.
        idle: it waits for its turn.
    """

    __slots__ = (
        "_pauses",
        "_timer",
        "asked_for_notice",
        "call",
        "counted",
        "idle",
        "is_retry",
        "on_turn",
    )

    def __init__(self, call: AcquireCall, on_turn: Callable[[Turn | Attempt | Exception], None]) -> None:
        self.call = call
        self.counted = False
        self.asked_for_notice = False
        self.is_retry = False
        self.idle = False
        self.on_turn = on_turn
        self._timer: asyncio.TimerHandle | None = None
        self._pauses: Iterator[float] | None = None

    @property
    def digest(self) -> str:
        """The digest of its lease id."""
        return self.call.lease_id.digest

    def wait(self, *, give_up_in_ms: float) -> None:
        """Wait for a turn; without one, give up in time."""
        self.idle = True
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(give_up_in_ms / 1000, self.wake, Turn.GIVE_UP)

    def wake(self, turn: Turn | Attempt | Exception) -> None:
        """Give it its turn, or an error that ends its wait, if it waits."""
        if self.idle:
            self.stop()
            self.on_turn(turn)

    def stop(self) -> None:
        """Wait no more."""
        self.idle = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def next_pause_ms(self, randomness: Randomness) -> float:
        """Return how long to pause before its next try; pauses grow until `reset_pauses`."""
        if self._pauses is None:
            self._pauses = pauses(randomness)
        return next(self._pauses)

    def reset_pauses(self) -> None:
        """Start again with a short pause."""
        self._pauses = None


class WaitingLine:
    """Keeps the waiters in order; any waiter may leave at any time."""

    def __init__(self) -> None:
        self._waiters: dict[Waiter, None] = {}
        self._by_digest: dict[str, list[Waiter]] = {}

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at the end."""
        self._waiters[waiter] = None
        self._by_digest.setdefault(waiter.digest, []).append(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter at any position."""
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
        """Return the position of a waiter; the head has 1."""
        return next(position for position, each in enumerate(self._waiters, 1) if each is waiter)

    def view(self, digest: str, now_ms: float) -> QueueView:
        """Show the waiters, and the position of the first one with this digest; 0 if there is none."""
        same = self.of_lease(digest)
        first = islice(self._waiters, _SHOWN_MAX)
        return QueueView(
            len(self._waiters),
            tuple((each.call.holder, now_ms - each.call.arrived_at_ms) for each in first),
            self.position(same[0]) if same else 0,
        )

    def fail(self, error: Callable[[], RedfenceServerError]) -> None:
        """End every wait with an error of its own. A waiter that already has its turn goes on."""
        waiting = [waiter for waiter in self._waiters if waiter.idle]
        for waiter in waiting:
            waiter.stop()  # first, so that none gets its turn when the one before it leaves
        for waiter in waiting:
            waiter.on_turn(error())
