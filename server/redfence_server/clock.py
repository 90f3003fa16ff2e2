"""Time, as a thing that is passed in."""

from __future__ import annotations

import time
from typing import Protocol

# CLOCK_MONOTONIC stops while a Linux machine is suspended; a lease does not. Elsewhere the ordinary clock must do.
_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class Clock(Protocol):
    """A clock that never goes back and never stops. Its zero means nothing."""

    def now_ms(self) -> float:
        """Return the present instant in milliseconds."""
        ...


class WallClock(Clock, Protocol):
    """A clock that also tells the time of day, which may be set at any moment: for people, and never to decide by."""

    def wall_ms(self) -> float:
        """Return the milliseconds since 1970."""
        ...


class SystemClock:
    """The machine's clock, which goes on while the machine sleeps."""

    def now_ms(self) -> float:
        """Return the present instant in milliseconds."""
        if _BOOTTIME is None:  # pragma: no cover  (not on Linux)
            return time.monotonic_ns() / 1e6
        return time.clock_gettime_ns(_BOOTTIME) / 1e6

    def wall_ms(self) -> float:
        """Return the milliseconds since 1970."""
        return time.time_ns() / 1e6
