"""For how long a server may hand a lock over among its own waiters while another server waits too. Pure.

A hand-over is the cheapest way to pass a lock on, so a server with many waiters would keep it for ever. After a run of
`HAND_OVERS_MAX` the lock is released openly, to the others alone, and this server holds back for as long as they need to take it.

Only hand-overs that another server has to watch count. That one waits is told by the hold, on which it put itself down when it was
refused. A server that holds back has not been refused yet, but waits all the same: it is known by the notice that it yielded, or by numbers that
others were granted since the last grant here.
"""

from __future__ import annotations

from typing import Final

from redfence_server.randomness import Randomness
from redfence_server.redlock import AttemptGranted

HAND_OVERS_MAX: Final = 16
"""How often a resource is handed over in a row while another server waits for it. Higher: fewer changes, which cost some round
trips each; lower: the others wait less."""

# What a notice, a mint and a busy loop take elsewhere: a fixed part, and round trips as they are measured here.
_HOLD_BACK_MS: Final = (8.0, 12.0)
_HOLD_BACK_ROUND_TRIPS: Final = 3


class HandOverRun:
    """Of one resource at one server."""

    __slots__ = ("_count", "_randomness", "_rival_until_ms", "_round_trip_ms", "_token")

    def __init__(self, randomness: Randomness) -> None:
        self._randomness = randomness
        self._count = 0
        self._rival_until_ms = 0.0  # another server is taken to wait until then, although no hold tells
        self._token = 0  # of the last grant here
        self._round_trip_ms = 0.0  # of the last mint that was granted

    @property
    def under_way(self) -> bool:
        """Tell whether there is anything to be remembered."""
        return self._count > 0

    @property
    def is_over(self) -> bool:
        """Tell whether the next release has to be an open one."""
        return self._count >= HAND_OVERS_MAX

    def granted(self, grant: AttemptGranted, *, handed_over: bool, now_ms: float) -> None:
        """Note a grant by this server."""
        self._round_trip_ms = now_ms - grant.minted_at_ms
        if self._token and grant.token > self._token + 1:
            self.expect_rival(now_ms)
        self._token = grant.token
        contended = grant.contended or now_ms < self._rival_until_ms
        self._count = self._count + 1 if handed_over and contended else 0

    def expect_rival(self, now_ms: float) -> None:
        """Note that another server waits, and puts itself down on a hold when it has held back."""
        self._rival_until_ms = now_ms + 2 * self._hold_back_ms()

    def end(self) -> float:
        """Begin anew; return for how long to hold back, in ms."""
        self._count = 0
        return self._hold_back_ms()

    def _hold_back_ms(self) -> float:
        return self._randomness.uniform(*_HOLD_BACK_MS) + _HOLD_BACK_ROUND_TRIPS * self._round_trip_ms
