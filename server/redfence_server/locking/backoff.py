"""How long to pause before a try is made again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from redfence_server.randomness import Randomness

# The first pause is about a round trip; the last is long beside any, so that a few dozen rivals part.
_SPLIT_MS_FIRST: Final = 4.0
_SPLIT_MS_LAST: Final = 128.0
# To examine a node again takes some ten round trips.
_REVALIDATION_MS_FIRST: Final = 10.0
_REVALIDATION_MS_LAST: Final = 80.0


def pauses(randomness: Randomness) -> Iterator[float]:
    """Yield pauses in ms for rivals that split the nodes so that none was granted: doubling, bounded, and spread."""
    longest = _SPLIT_MS_FIRST
    while True:
        yield randomness.uniform(0.25 * longest, longest)
        longest = min(2 * longest, _SPLIT_MS_LAST)


def revalidation_pauses() -> Iterator[float]:
    """Yield pauses in ms for a command that met nodes which have to be examined again: doubling and bounded."""
    pause_ms = _REVALIDATION_MS_FIRST
    while True:
        yield pause_ms
        pause_ms = min(2 * pause_ms, _REVALIDATION_MS_LAST)
