"""Yield the pauses between repeated tries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from redfence_server.randomness import Randomness

# The first pause is about one round trip. The last is much longer, so that a few dozen rivals spread out.
_SPLIT_MS_FIRST: Final = 4.0
_SPLIT_MS_LAST: Final = 128.0
# An examination of a node takes about ten round trips.
_REVALIDATION_MS_FIRST: Final = 10.0
_REVALIDATION_MS_LAST: Final = 80.0


def pauses(randomness: Randomness) -> Iterator[float]:
    """Yield doubling, bounded, jittered pauses in ms for rivals that split the nodes between them."""
    longest = _SPLIT_MS_FIRST
    while True:
        yield randomness.uniform(0.25 * longest, longest)
        longest = min(2 * longest, _SPLIT_MS_LAST)


def revalidation_pauses() -> Iterator[float]:
    """Yield doubling, bounded pauses in ms for a command to nodes that must be examined again."""
    pause_ms = _REVALIDATION_MS_FIRST
    while True:
        yield pause_ms
        pause_ms = min(2 * pause_ms, _REVALIDATION_MS_LAST)
