"""Makes the SDK's random values: secrets for lease ids, and fractions for jitter."""

from __future__ import annotations

import os
import random
from typing import Protocol


class Randomness(Protocol):
    """Makes lease ids and jitter."""

    def lease_id(self) -> str:
        """Return 128 unguessable bits as 32 lower-case hex digits."""
        ...

    def fraction(self) -> float:
        """Return a number in [0, 1) for jitter; it need not be unguessable."""
        ...


class SystemRandomness:
    """Makes secrets with the operating system's randomness, and jitter with Python's generator."""

    def lease_id(self) -> str:
        """Return 128 bits from the operating system."""
        return os.urandom(16).hex()

    def fraction(self) -> float:
        """Return a pseudo-random number in [0, 1)."""
        return random.random()
