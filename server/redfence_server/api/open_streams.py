"""Keep the open streams of this server, to drain them and to show them to operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

from redfence_proto.v1 import lock_pb2
from redfence_server.clock import Clock


class DrainableStream(Protocol):
    """One open stream, as streams.py has it."""

    @property
    def unanswered(self) -> int:
        """How many commands have no written result."""
        ...

    @property
    def waiting(self) -> int | None:
        """How many acquires are unanswered; None for a stream without acquires."""
        ...

    @property
    def kind(self) -> lock_pb2.SessionKind.ValueType:
        """The kind of the stream."""
        ...

    def drain(self) -> None:
        """End once the commands are answered."""
        ...


@dataclass(frozen=True, slots=True)
class SessionView:
    """One open stream.

    Attributes:
        number: counts the streams of this server process, from 1.
        unanswered: commands without a written result.
        waiting: unanswered acquires among them; None for a stream without acquires.
    """

    number: int
    kind: lock_pb2.SessionKind.ValueType
    peer: str
    age_ms: float
    unanswered: int
    waiting: int | None


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Some of the open streams, the oldest first."""

    sessions: Sequence[SessionView]
    has_more: bool


class OpenStreams:
    """Numbers streams in the order of their opening.

    Attributes:
        draining: whether `drain` was called.
    """

    def __init__(self, clock: Clock) -> None:
        self.draining = False
        self._clock = clock
        self._numbers = count(1)
        # By number; a dict keeps the order.
        self._open: dict[int, tuple[DrainableStream, str, float]] = {}

    @contextmanager
    def opened(self, stream: DrainableStream, peer: str) -> Iterator[None]:
        """Keep a stream until the end of the `with`."""
        number = next(self._numbers)
        self._open[number] = stream, peer, self._clock.now_ms()
        try:
            yield
        finally:
            del self._open[number]

    def drain(self) -> None:
        """End each stream once its commands are answered."""
        self.draining = True
        for stream, _, _ in self._open.values():
            stream.drain()

    def page(self, *, after: int, size: int) -> SessionPage:
        """Return the oldest streams with a number above `after`."""
        now_ms = self._clock.now_ms()
        numbers = list(islice((each for each in self._open if each > after), size + 1))
        views = []
        for number in numbers[:size]:
            stream, peer, began_at_ms = self._open[number]
            age_ms = now_ms - began_at_ms
            views.append(SessionView(number, stream.kind, peer, age_ms, stream.unanswered, stream.waiting))
        return SessionPage(views, has_more=len(numbers) > size)
