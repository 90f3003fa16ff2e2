"""The history finds what it is there to find."""

from __future__ import annotations

import pytest

from harness.token_history import Grant, TokenHistory


def history(*grants: tuple[str, int, float, float], resource: str = "r") -> TokenHistory:
    """Make a history of (lease id, token, began, answered)."""
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
    """Order is demanded only where one attempt began after another's answer."""
    history(*grants).check()


@pytest.mark.parametrize(
    ("grants", "told"),
    [
        ([("a", 1, 0, 9), ("b", 1, 0, 9)], "two leases"),
        ([("a", 2, 0, 1), ("b", 1, 2, 3)], "token 1 after 2"),
        ([("a", 5, 0, 1), ("b", 9, 0, 8), ("c", 4, 2, 3)], "token 4 after 5"),
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
    """Each broken promise is named."""
    with pytest.raises(AssertionError, match=told):
        history(*grants).check()


def test_resources_are_judged_apart() -> None:
    """The same number for two resources is no duplicate."""
    both = TokenHistory()
    both.grants = [*history(("a", 1, 0, 1)).grants, *history(("b", 1, 2, 3), resource="s").grants]
    both.check()
