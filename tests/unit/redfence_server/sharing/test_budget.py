"""How peers share a budget, and how many new names each may use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redfence_server.errors import TooManyNewResourcesError
from redfence_server.sharing.budget import Budget
from redfence_server.sharing.new_names import NewNames
from redfence_server.sharing.peer import peer_of

SIZE = 60


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-30, 30))))
def test_no_peer_takes_more_than_it_leaves_free(
    steps: list[tuple[str, int]],
) -> None:
    budget, taken = Budget(SIZE), dict.fromkeys("abcd", 0)
    for peer, count in steps:
        if count < 0:
            returned = min(-count, taken[peer])
            budget.give_back(peer, returned)
            taken[peer] -= returned
        elif budget.take(peer, count):
            taken[peer] += count
            assert taken[peer] <= SIZE - sum(taken.values())
        else:
            assert taken[peer] + count > SIZE - sum(taken.values()) - count
    for peer, count in taken.items():
        budget.give_back(peer, count)
    assert budget.take("new", SIZE // 2)


class Clock:
    def __init__(self) -> None:
        self.ms = 0.0

    def now_ms(self) -> float:
        return self.ms


def test_a_peer_has_a_burst_of_new_names_and_then_so_many_a_second() -> None:
    """A name that was used lately costs nothing, and another peer has its own rate."""
    clock = Clock()
    names = NewNames(5, clock)

    def used(peer: str, first: int) -> int:
        """Return how many of 100 names the peer could use."""
        for number in range(first, first + 100):
            try:
                names.check(peer, str(number))
            except TooManyNewResourcesError:
                return number - first
        return 100

    assert used("a", 0) == 10
    assert used("b", 1_000) == 10
    clock.ms += 2_000
    assert used("a", 2_000) == 10
    assert "9" in names.recent
    assert names.refusals == 3


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("ipv4:10.0.0.1:4000", "ipv4:10.0.0.1:4001", True),
        ("ipv4:10.0.0.1:4000", "ipv4:10.0.0.2:4000", False),
        ("ipv6:%5B2001:db8::1%5D:4000", "ipv6:[2001:db8::2]:5000", True),
        ("ipv6:[2001:db8::1]:4000", "ipv6:[2001:db8:0:1::1]:4000", False),
        ("ipv6:[fe80::1%25eth0]:4000", "ipv6:[fe80::2]:4000", True),
        ("unix:", "unix:", True),
    ],
)
def test_a_machine_is_one_peer(one: str, other: str, *, same: bool) -> None:
    assert (peer_of(one) == peer_of(other)) == same
