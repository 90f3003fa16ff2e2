"""Whether this process was stopped for a while: by SIGSTOP, a debugger, or a machine that was moved.

Its callers may have gone elsewhere meanwhile, and what tells of that is in its sockets, unread. Whoever would act for a caller that has
waited should hear that first, or a lock would be taken for somebody who is not there
(test_a_lease_and_a_waiter_survive_the_fault_of_one_of_two_servers).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from redfence_server.clock import Clock

_BEAT_MS: Final = 100.0
# A beat this late was held up by more than a busy event loop.
_STALLED_MS: Final = 250.0
# How long it takes at most, after a stop, to read what came meanwhile.
_QUIET_MS: Final = 250.0


class StallWatch:
    """A heart that beats in the event loop, and notices when it did not.

    Args:
        on_stall: is told after a stop. The loop's timers may not have counted it: its clock stops when the machine sleeps.
    """

    def __init__(self, clock: Clock, *, on_stall: Callable[[], None]) -> None:
        self._clock = clock
        self._on_stall = on_stall
        self._due_at_ms = 0.0
        self._quiet_until_ms = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to beat. Harmless to repeat."""
        if self._timer is None:
            self._set()

    def stop(self) -> None:
        """Beat no more. Harmless to repeat."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def quiet_ms(self) -> float:
        """Return for how long nothing should be done on behalf of those who wait; 0 or less: go on.

        A timer that is overdue rings in the same turn of the loop in which the first unread message is read, and a task
        that such a message wakes runs in the next. So whoever asks in a task of its own asks after the beat.
        """
        return self._quiet_until_ms - self._clock.now_ms()

    def _set(self) -> None:
        self._due_at_ms = self._clock.now_ms() + _BEAT_MS
        self._timer = asyncio.get_running_loop().call_later(_BEAT_MS / 1000, self._beat)

    def _beat(self) -> None:
        now_ms = self._clock.now_ms()
        if now_ms - self._due_at_ms > _STALLED_MS:
            self._quiet_until_ms = now_ms + _QUIET_MS
            self._on_stall()
        self._set()
