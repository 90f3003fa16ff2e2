"""How an Acquire waits for a held resource: for now, by trying again after a jittered pause.

This module is the seam for a queue with wake-ups: `pauses` is all that lock_service.py knows of waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from redfence_server.randomness import Randomness

# The first pause is about a round trip, so that a short hold is followed at once; the last bounds the load of a
# thousand waiters on one resource.
_PAUSE_MS_FIRST: Final = 4.0
_PAUSE_MS_LAST: Final = 128.0

SPLIT_TRIES_MAX: Final = 4
"""How often an attempt is made anew when the nodes are split between callers and nobody was granted."""


def pauses(randomness: Randomness) -> Iterator[float]:
    """Yield how long to wait before each further try, in ms: doubling, bounded, and spread so that rivals part."""
    longest = _PAUSE_MS_FIRST
    while True:
        yield randomness.uniform(0.25 * longest, longest)
        longest = min(2 * longest, _PAUSE_MS_LAST)
