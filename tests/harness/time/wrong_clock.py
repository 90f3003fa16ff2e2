"""A server's own clock that is set, stands still, or runs at another rate."""

from __future__ import annotations

from redfence_server.clock import SystemClock


class WrongClock(SystemClock):
    """The clock of one server; it is right until a test changes it. It never goes back."""

    def __init__(self) -> None:
        self._rate = 1.0
        self._changed_at_ms = self._offset_ms = 0.0
        self._last_ms = 0.0

    def now_ms(self) -> float:
        true_ms = super().now_ms()
        shown_ms = true_ms + self._offset_ms + (self._rate - 1) * (true_ms - self._changed_at_ms)
        self._last_ms = max(self._last_ms, shown_ms)
        return self._last_ms

    def set_forward(self, ms: float) -> None:
        self._offset_ms += ms

    def stand_still(self, *, for_ms: float) -> None:
        """Show one instant for so long, and go on from there."""
        self._offset_ms -= for_ms

    def run_at(self, rate: float) -> None:
        self._changed_at_ms, self._rate = super().now_ms(), rate
