"""How long rivals pause between two tries."""

from __future__ import annotations

import itertools

import pytest

from redfence_server.locking.backoff import pauses


class Fixed:
    def __init__(self, *, high: bool) -> None:
        self._high = high

    def hex_id(self) -> str:
        raise NotImplementedError

    def uniform(self, low: float, high: float) -> float:
        return high if self._high else low


@pytest.mark.parametrize(("high", "share"), [(True, 1.0), (False, 0.25)])
def test_pauses_double_up_to_a_bound_and_are_spread(high: bool, share: float) -> None:  # noqa: FBT001  (a parameter of the test)
    first = list(itertools.islice(pauses(Fixed(high=high)), 8))
    assert first == [share * each for each in (4, 8, 16, 32, 64, 128, 128, 128)]
