"""An event loop that never sleeps: where another one would wait for a timer, its time jumps there.

Only for code below sockets: it has no selector, and watches no file. The async tests of a module with
`pytestmark = pytest.mark.virtual_time` run on it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from functools import wraps
from heapq import heapify, heappop, heappush
from typing import Any, Final, ParamSpec, TypeVarTuple

P = ParamSpec("P")
Arguments = TypeVarTuple("Arguments")

# As in a real loop, a timer is always a little late; one exactly on time can be too early for rounded sums.
_LATE_S: Final = 1e-6
# Timers that are due within this time run in the same turn.
_RESOLUTION_S: Final = 1e-9
# Above this many timers the cancelled ones are removed as soon as they are the greater part.
_FEW_TIMERS: Final = 100


class VirtualLoop(asyncio.BaseEventLoop):
    _ready: deque[Any]

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        # Tuples, because a heap compares floats much faster than timers.
        self._timers: list[tuple[float, Any]] = []
        self._cancelled_timers = 0

    def time(self) -> float:
        return self._now_s

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.schedule(timer)
        return timer

    def schedule(self, timer: Any) -> None:
        timer._scheduled = True
        heappush(self._timers, (timer._when, timer))

    def _timer_handle_cancelled(self, handle: Any) -> None:
        if handle._scheduled:
            self._cancelled_timers += 1

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps, so nothing needs to wake it."""

    def _remove_cancelled(self) -> None:
        timers = self._timers
        if len(timers) > _FEW_TIMERS and self._cancelled_timers > len(timers) / 2:
            timers[:] = [each for each in timers if not each[1]._cancelled]
            heapify(timers)
            self._cancelled_timers = 0
        while timers and timers[0][1]._cancelled:
            self._cancelled_timers -= 1
            heappop(timers)[1]._scheduled = False

    def _run_once(self) -> None:
        """Jump to the first timer if nothing is due; then run the due callbacks, not those they schedule."""
        self._remove_cancelled()
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:  # type: ignore[attr-defined]  # its stub leaves it out
            # Nothing is due, ever: the test waits for what cannot come.
            assert timers, "everything waits and no timer is set"
            left_s = timers[0][0] - self._now_s
            if left_s > 0:
                self._now_s += left_s + _LATE_S
        end_s = self._now_s + _RESOLUTION_S
        while timers and timers[0][0] < end_s:
            timer = heappop(timers)[1]
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()


def on_virtual_time(
    test: Callable[P, Coroutine[None, None, None]], *, loop: Callable[[], VirtualLoop] = VirtualLoop
) -> Callable[P, None]:
    """Run an async test on a virtual loop of its own."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


class LoopClock:
    """The running loop's time as the product's clock."""

    def now_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000
