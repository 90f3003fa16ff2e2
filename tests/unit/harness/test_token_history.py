"""The history finds what it is there to find."""

from __future__ import annotations

import pytest

from harness.history.token_history import Grant, TokenHistory
from harness.processes.servers import now_ms


def history(*grants: tuple[str, int, float, float], resource: str = "r") -> TokenHistory:
    made = TokenHistory()
    made.grants = [
        Grant(resource, lease_id, token, began, answered, 0) for lease_id, token, began, answered in grants
    ]
    return made


@pytest.mark.parametrize(
    "grants",
    [
        [("a", 1, 0, 1), ("b", 2, 2, 3), ("c", 3, 4, 5)],
        [("a", 2, 0, 5), ("b", 1, 1, 4)],
        [("a", 1, 0, 1), ("b", 2, 2, 3), ("a", 1, 4, 5)],
    ],
    ids=["one after another", "overlapping attempts in any order", "a retry that is told its first token"],
)
def test_what_could_be_true_passes(grants: list[tuple[str, int, float, float]]) -> None:
    history(*grants).check()


@pytest.mark.parametrize(
    ("grants", "told"),
    [
        ([("a", 1, 0, 9), ("b", 1, 0, 9)], "two leases"),
        ([("a", 2, 0, 1), ("b", 1, 2, 3)], "token 1 was granted after token 2"),
        ([("a", 5, 0, 1), ("b", 9, 0, 8), ("c", 4, 2, 3)], "token 4 was granted after token 5"),
        ([("a", 1, 0, 1), ("a", 2, 2, 3)], "a retry"),
        ([], "nothing was granted"),
    ],
    ids=[
        "one token twice",
        "a smaller token later",
        "hidden among overlaps",
        "a retry told another",
        "empty",
    ],
)
def test_what_cannot_be_true_fails(grants: list[tuple[str, int, float, float]], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        history(*grants).check()


def test_resources_are_judged_apart() -> None:
    both = TokenHistory()
    both.grants = [*history(("a", 1, 0, 1)).grants, *history(("b", 1, 2, 3), resource="s").grants]
    both.check()


def held(*grants: tuple[str, int, float, float, float]) -> TokenHistory:
    """Make a history of (lease id, token, began, answered, counted on until)."""
    made = TokenHistory()
    made.grants = [
        Grant("r", lease_id, token, began, answered, round(until - began))
        for lease_id, token, began, answered, until in grants
    ]
    return made


@pytest.mark.parametrize(
    "grants",
    [
        [("a", 1, 0, 1, 10), ("b", 2, 2, 10, 20)],
        [("a", 1, 0, 1, 10), ("b", 2, 2, 30, 12), ("c", 3, 2, 11, 40)],
        [("b", 2, 12, 13, 20), ("a", 1, 0, 1, 10)],
        [("a", 1, 0, 1, 10), ("a", 1, 2, 3, 12), ("b", 2, 2, 13, 20)],
    ],
    ids=["the next begins as one ends", "an answer that came too late", "written down late", "a retry"],
)
def test_one_holder_after_another_passes(grants: list[tuple[str, int, float, float, float]]) -> None:
    held(*grants).check_exclusion()


@pytest.mark.parametrize(
    "grants",
    [
        [("a", 1, 0, 1, 10), ("b", 2, 2, 9, 20)],
        [("b", 2, 2, 9, 20), ("a", 1, 0, 1, 10)],
        [("a", 1, 0, 1, 100), ("b", 2, 2, 8, 5), ("c", 3, 2, 50, 60)],
    ],
    ids=["before the end", "written down late", "one that came too late in between"],
)
def test_two_holders_at_one_instant_fail(grants: list[tuple[str, int, float, float, float]]) -> None:
    with pytest.raises(AssertionError, match="two leases were valid"):
        held(*grants).check_exclusion()


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
