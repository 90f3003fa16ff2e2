"""Define the randomness that other parts are given, and the system's own."""

from __future__ import annotations

import os
import random
from typing import Protocol


class Randomness(Protocol):
    """A source of unguessable ids, and of numbers for jitter."""

    def hex_id(self) -> str:
        """Return 128 fresh random bits as 32 lower-case hex digits."""
        ...

    def uniform(self, low: float, high: float) -> float:
        """Return a number between `low` and `high` for jitter; it may be guessable."""
        ...


class SystemRandomness:
    """The machine's randomness."""

    def __init__(self) -> None:
        self._jitter = random.Random()

    def hex_id(self) -> str:
        """Return 128 fresh random bits as 32 lower-case hex digits."""
        return os.urandom(16).hex()

    def uniform(self, low: float, high: float) -> float:
        """Return a number between `low` and `high`."""
        return self._jitter.uniform(low, high)
