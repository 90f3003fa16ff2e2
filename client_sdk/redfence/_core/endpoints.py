"""Chooses the next server address and the pause before the client tries it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from redfence._config import Timeouts
from redfence._core.backoff import backoff_ms
from redfence._errors import InvalidArgumentError
from redfence._randomness import Randomness


class Endpoints:
    """Rotates through the server addresses; pauses after each full round of failures."""

    __slots__ = ("_addresses", "_failures", "_index", "_randomness", "_timeouts")

    def __init__(self, addresses: Sequence[str], *, timeouts: Timeouts, randomness: Randomness) -> None:
        for address in addresses:
            if not isinstance(address, str) or not address.strip():
                raise InvalidArgumentError(
                    f"server address {address!r} is not a non-empty string; "
                    'pass each address as one argument, e.g. "127.0.0.1:50051"'
                )
        self._addresses = tuple(addresses)
        self._timeouts = timeouts
        self._randomness = randomness
        self._index = 0
        self._failures = 0

    def __len__(self) -> int:
        return len(self._addresses)

    def current(self) -> str:
        """Return the address to use now."""
        return self._addresses[self._index]

    def mark_healthy(self) -> None:
        """Record that the current address answered, so the next pause is the shortest again."""
        self._failures = 0

    def advance(self) -> float:
        """Move to the next address and return the pause in milliseconds before the client tries it.

        The first round over several addresses has no pause, because another server is probably healthy.
        """
        self._index = (self._index + 1) % len(self._addresses)
        self._failures += 1
        rounds = self._failures // len(self._addresses)
        if rounds == 0:
            return 0.0
        return backoff_ms(
            rounds,
            base_ms=self._timeouts.reconnect_backoff_ms_min,
            cap_ms=self._timeouts.reconnect_backoff_ms_max,
            fraction=self._randomness.fraction(),
        )
