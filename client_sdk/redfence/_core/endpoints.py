"""Which address to try next, and after which pause. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from redfence._config import ClientOptions
from redfence._core.backoff import backoff_ms
from redfence._errors import InvalidArgumentError
from redfence._randomness import Randomness


class Endpoints:
    """A ring of addresses: stay while it works, go on when it fails, pause once per round of failures."""

    __slots__ = ("_addresses", "_failures", "_index", "_options", "_randomness")

    def __init__(self, addresses: Sequence[str], *, options: ClientOptions, randomness: Randomness) -> None:
        if not addresses:
            raise InvalidArgumentError('a client needs at least one address, e.g. "127.0.0.1:50051"')
        for address in addresses:
            if not isinstance(address, str) or not address.strip():
                raise InvalidArgumentError(
                    f'an address is a string like "127.0.0.1:50051", several are given one by one; not {address!r}'
                )
        self._addresses = tuple(addresses)
        self._options = options
        self._randomness = randomness
        self._index = 0
        self._failures = 0

    def __len__(self) -> int:
        return len(self._addresses)

    def current(self) -> str:
        """Return the address to use now."""
        return self._addresses[self._index]

    def mark_healthy(self) -> None:
        """Note that the current address answered: the pauses start anew."""
        self._failures = 0

    def advance(self) -> float:
        """Move to the next address and return the milliseconds to pause before it is tried.

        The first round over several addresses is made without a pause: another server is probably well.
        """
        self._index = (self._index + 1) % len(self._addresses)
        self._failures += 1
        rounds = self._failures // len(self._addresses)
        if rounds == 0:
            return 0.0
        return backoff_ms(
            rounds,
            base_ms=self._options.reconnect_backoff_ms_min,
            cap_ms=self._options.reconnect_backoff_ms_max,
            fraction=self._randomness.fraction(),
        )
