"""How long rivals wait that have split the nodes between them, so that nobody was granted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from redfence_server.randomness import Randomness

# The first pause is about a round trip; the last is long beside any, so that a few dozen rivals part.
_PAUSE_MS_FIRST: Final = 4.0
_PAUSE_MS_LAST: Final = 128.0


def pauses(randomness: Randomness) -> Iterator[float]:
    """Yield how long to wait before each further try, in ms: doubling, bounded, and spread so that rivals part."""
    longest = _PAUSE_MS_FIRST
    while True:
        yield randomness.uniform(0.25 * longest, longest)
        longest = min(2 * longest, _PAUSE_MS_LAST)
