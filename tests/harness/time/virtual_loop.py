"""An event loop that never sleeps: where another one would wait for a timer, its time jumps there.

Only for code below sockets: while real I/O is in flight, time would race ahead of it. The decorator
`on_virtual_time` runs a test on it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")

# As in a real loop, a timer is always a little late; one exactly on time can be too early for rounded sums.
_LATE_S = 1e-6


class _JumpingSelector(selectors.SelectSelector):
    """Looks at its files without waiting, and moves the clock by as long as it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            # Nothing is due, ever: the test waits for what cannot come.
            assert timeout is not None, "everything waits and no timer is set"
            self.now_s += timeout + (_LATE_S if timeout else 0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jumping.now_s


def on_virtual_time(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run an async test on a virtual loop of its own."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


class LoopClock:
    """The running loop's time as the product's clock."""

    def now_ms(self) -> float:
        """Return the present instant in milliseconds."""
        return asyncio.get_running_loop().time() * 1000
