"""Time as the SDK sees it: one Protocol, and the system's clock that does not stop while the machine sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that goes on in suspend."""

    def now_ms(self) -> float:
        """Return the present instant in milliseconds since an arbitrary origin; it never goes back."""
        ...

    def watch(self, listener: Callable[[], None], /) -> Callable[[], None]:
        """Call `listener` whenever time was moved by hand; return a function that ends this.

        The system's clock is never moved by hand, so there it does nothing.
        """
        ...


# CLOCK_MONOTONIC stops during suspend on Linux, and with it a lease would seem to live on. Elsewhere (macOS)
# the ordinary monotonic clock is what there is.
_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The machine's own clock: CLOCK_BOOTTIME where there is one."""

    def now_ms(self) -> float:
        """Return the milliseconds since boot, suspended time included."""
        return time.clock_gettime(_CLOCK_ID) * 1000.0

    def watch(self, _listener: Callable[[], None], /) -> Callable[[], None]:
        """Do nothing: nobody moves this clock by hand."""
        return _nothing


def _nothing() -> None:
    pass
