"""How long a waiter pauses between two tries."""

from __future__ import annotations

import itertools

import pytest

from redfence_server.waiting import pauses


class Fixed:
    """Chance that always takes one end."""

    def __init__(self, *, high: bool) -> None:
        self._high = high

    def hex_id(self) -> str:
        """Not used."""
        raise NotImplementedError

    def uniform(self, low: float, high: float) -> float:
        """Return the chosen end."""
        return high if self._high else low


@pytest.mark.parametrize(("high", "share"), [(True, 1.0), (False, 0.25)])
def test_pauses_double_up_to_a_bound_and_are_spread(high: bool, share: float) -> None:  # noqa: FBT001  (a parameter of the test)
    """The first is about a round trip, the last bounds the load; rivals part by chance."""
    first = list(itertools.islice(pauses(Fixed(high=high)), 8))
    assert first == [share * each for each in (4, 8, 16, 32, 64, 128, 128, 128)]


def test_the_longest_pause_grows_with_the_number_of_waiters() -> None:
    """However many wait, their retries together cost about the same."""
    many = list(itertools.islice(pauses(Fixed(high=True), lambda: 2_000), 12))
    assert many[-1] == 1_000
    few = list(itertools.islice(pauses(Fixed(high=True), lambda: 3), 12))
    assert few[-1] == 128
