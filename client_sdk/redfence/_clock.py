"""Defines the SDK's clock: a Protocol, and the system clock that does not stop in suspend."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that does not stop in suspend."""

    def now_ms(self) -> float:
        """Return the present instant in milliseconds since an arbitrary origin; it never decreases."""
        ...

    def watch(self, listener: Callable[[], None], /) -> Callable[[], None]:
        """Call `listener` each time a test moves the clock; return a function that stops this.

        No test moves the system clock, so there `watch` does nothing.
        """
        ...


# On Linux CLOCK_MONOTONIC stops in suspend, so an expired lease would seem valid. Other systems,
# such as macOS, have only the ordinary monotonic clock.
_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """Reads the machine's clock: CLOCK_BOOTTIME if it exists, else CLOCK_MONOTONIC."""

    def now_ms(self) -> float:
        """Return the milliseconds since boot, including time in suspend."""
        return time.clock_gettime(_CLOCK_ID) * 1000.0

    def watch(self, _listener: Callable[[], None], /) -> Callable[[], None]:
        """Do nothing, because no test moves this clock."""
        return _nothing


def _nothing() -> None:
    pass
