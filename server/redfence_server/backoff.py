"""How an Acquire waits for a held resource: for now, by trying again after a jittered pause.

This module is the seam for a queue with wake-ups: `pauses` is all that lock_service.py knows of waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from redfence_server.randomness import Randomness

# The first pause is about a round trip, so that a short hold is followed at once; the last grows with the number of waiters, so
# that all of them together cost about a quarter of a core, however many they are.
_PAUSE_MS_FIRST: Final = 4.0
_PAUSE_MS_LAST: Final = 128.0
_PAUSE_MS_LAST_PER_WAITER: Final = 0.5

SPLIT_TRIES_MAX: Final = 4
"""How often an attempt is made anew when the nodes are split between callers and nobody was granted."""


def pauses(randomness: Randomness, waiters: Callable[[], int] = lambda: 0) -> Iterator[float]:
    """Yield how long to wait before each further try, in ms: doubling, bounded, and spread so that rivals part.

    `waiters` tells how many wait at this server.
    """
    longest = _PAUSE_MS_FIRST
    while True:
        yield randomness.uniform(0.25 * longest, longest)
        longest = min(2 * longest, max(_PAUSE_MS_LAST, waiters() * _PAUSE_MS_LAST_PER_WAITER))
