"""The history of a load test reaches `check`, whose rules tests/chaos/histories.txt pins one by one."""

from __future__ import annotations

import pytest

from harness.history.token_history import Grant, TokenHistory
from harness.processes.servers import now_ms


def held(*grants: tuple[str, int, float, float, float], resource: str = "r") -> TokenHistory:
    """Make a history of (lease id, token, began, answered, counted on until)."""
    made = TokenHistory()
    made.grants = [
        Grant(resource, lease_id, token, began, answered, round(until - began))
        for lease_id, token, began, answered, until in grants
    ]
    return made


def test_what_could_be_true_passes() -> None:
    """Leases may follow on each other, and a retry is told its first token; resources are judged apart."""
    one = held(("a", 1, 0, 1, 10), ("a", 1, 2, 3, 12), ("b", 2, 2, 13, 20), ("c", 3, 14, 20, 30))
    other = held(("d", 1, 40, 41, 50), resource="s")
    one.grants += other.grants
    one.check()
    one.check_exclusion()


@pytest.mark.parametrize(
    ("grants", "told"),
    [
        ([("a", 1, 0, 9, 9), ("b", 1, 0, 9, 9)], "two leases"),
        ([("a", 5, 0, 1, 1), ("b", 9, 0, 8, 8), ("c", 4, 2, 3, 3)], "token 4 was granted after token 5"),
        ([("a", 1, 0, 1, 1), ("a", 2, 2, 3, 3)], "a retry"),
        ([], "nothing was granted"),
    ],
    ids=["one token twice", "a smaller token among overlaps", "a retry told another", "empty"],
)
def test_what_cannot_be_true_fails(grants: list[tuple[str, int, float, float, float]], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        held(*grants).check()


def test_two_holders_at_one_instant_fail() -> None:
    """Also if the later one is written down first, and one came too late in between."""
    made = held(("c", 3, 2, 50, 60), ("b", 2, 2, 8, 5), ("a", 1, 0, 1, 100))
    made.check()
    with pytest.raises(AssertionError, match="two leases were valid"):
        made.check_exclusion()


def test_a_release_ends_what_a_holder_counts_on_and_a_renewal_lengthens_it() -> None:
    now = now_ms()
    made = held(("a", 1, now, now, now + 10_000), ("b", 2, now, now, now - 10_000))
    lives, ended = made.grants
    assert made.renewed(lives, sent_at_ms=now, validity_ms=20_000)
    assert made.end_ms(lives) == now + 20_000
    made.given_up(lives)
    assert now <= made.end_ms(lives) <= now_ms()
    assert not made.renewed(ended, sent_at_ms=now, validity_ms=20_000)
    made.given_up(ended)
    assert made.end_ms(ended) == now - 10_000
    assert made.succeeded == {"renew": 1}
