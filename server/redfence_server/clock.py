"""Define the clocks that other parts are given, and the system's own."""

from __future__ import annotations

import time
from typing import Protocol

# Only Linux has it. CLOCK_MONOTONIC stops while the machine is suspended, but a lease goes on.
_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class Clock(Protocol):
    """A clock that never goes back and never stops; its zero has no meaning."""

    def now_ms(self) -> float:
        """Return the present instant in milliseconds."""
        ...


class WallClock(Clock, Protocol):
    """A clock that also gives the time of day, which may be set at any moment, so no decision may use it."""

    def wall_ms(self) -> float:
        """Return the milliseconds since 1970."""
        ...


class SystemClock:
    """The machine's clock, which also runs while the machine is suspended."""

    def now_ms(self) -> float:
        """Return the present instant in milliseconds."""
        if _BOOTTIME is None:  # pragma: no cover  (not on Linux)
            return time.monotonic_ns() / 1e6
        return time.clock_gettime_ns(_BOOTTIME) / 1e6

    def wall_ms(self) -> float:
        """Return the milliseconds since 1970."""
        return time.time_ns() / 1e6
