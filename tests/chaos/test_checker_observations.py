"""What the judge of chaos runs makes of CheckToken and GetLock: they may be a call's length old, and no older."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.chaos.faults import FAULTS
from harness.history.history_builder import FAILED, UNKNOWN, Cases, HistoryBuilder, letters, verdict_of
from harness.history.observations import _ELSEWHERE


def released(builder: HistoryBuilder) -> HistoryBuilder:
    """Add a lease that is acquired and released through one server, from 10 s to 10.3 s."""
    return builder.acquire("a", 5, (10, 10.1)).at("x").release("a", (10.2, 10.3)).at("x")


LATE: Cases = {
    "a check after a greater token was granted": lambda s: (
        s.acquire("a", 5, (10, 10.1)).acquire("b", 6, (20, 20.1)).live(5, (20.2, 20.3))
    ),
    "a look after a greater token was granted": lambda s: (
        s.acquire("a", 5, (10, 10.1)).acquire("b", 6, (20, 20.1)).look(5, (20.2, 20.3))
    ),
    "a check after a greater token was granted and given back": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .acquire("b", 6, (20, 20.1))
        .release("b", (20.2, 20.3))
        .live(5, (20.4, 20.5))
    ),
    "a check after a greater token was granted, clocks and nodes or not": lambda s: (
        s.fault("clock", 5, 30, moves_clocks=True)
        .fault("node wiped", 5, 30)
        .acquire("a", 5, (10, 10.1))
        .acquire("b", 6, (20, 20.1))
        .live(5, (20.2, 20.3))
    ),
    "a check after a greater token was granted before a smaller one": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .acquire("b", 9, (20, 20.1))
        .acquire("c", 4, (9.9, 22.2), until=24)
        .live(5, (22.3, 22.4))
    ),
    "a check after a greater token was granted to another, and then one to itself": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .acquire("b", 6, (20, 20.1))
        .acquire("a", 7, (30, 30.1))
        .live(5, (30.2, 30.3))
    ),
    "a check after a greater token was granted before a smaller one, and both after one to itself": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .acquire("a", 20, (12.2, 12.3))
        .acquire("b", 9, (9.8, 20.1), until=21.9)
        .acquire("c", 4, (9.9, 22.2), until=24)
        .live(5, (22.3, 22.4))
    ),
    "a check after its release, while clients and the storage are paused": lambda s: released(
        s.fault("holder paused", 5, 30).fault("storage killed", 5, 30)
    ).live(5, (10.4, 10.5)),
    "a check after its release": lambda s: released(s).live(5, (10.4, 10.5)),
    "a look after its release": lambda s: released(s).look(5, (10.4, 10.5)),
    "a check after its release, and a fault before it was called": lambda s: released(
        s.fault("delay", 5, 9.9)
    ).live(5, (10.4, 10.5)),
}
UNTRUE: Cases = {
    "while its holder counts on it": lambda s: s.acquire("a", 5, (10, 10.1)).not_live("a", 5, (10.2, 10.3)),
    "while its holder counts on it by a renewal": lambda s: (
        s.acquire("a", 5, (10, 10.1)).renew("a", (11, 11.1)).not_live("a", 5, (12.5, 12.6))
    ),
    "though a minority fails": lambda s: (
        s.fault("node killed", 10.15, 11).acquire("a", 5, (10, 10.1)).not_live("a", 5, (10.2, 10.3))
    ),
    "when a clock was set right before it was called": lambda s: (
        s.fault("clock", 5, 9.9, moves_clocks=True).acquire("a", 5, (10, 10.1)).not_live("a", 5, (10.2, 10.3))
    ),
    "before a majority was wiped": lambda s: (
        s.acquire("a", 5, (10, 10.1)).not_live("a", 5, (10.2, 10.3)).fault("majority wiped", 10.4, 11)
    ),
}
RIGHT: Cases = {
    "live while it is held": lambda s: s.acquire("a", 5, (10, 10.1)).live(5, (10.2, 10.3)),
    "live before its holder was told": lambda s: (
        s.acquire("a", 5, (10, 10.1)).acquire("b", 6, (12.5, 14)).look(6, (13, 13.1))
    ),
    "live beyond its validity, which its nodes may keep longer": lambda s: s.acquire("a", 5, (10, 10.1)).live(
        5, (12.1, 12.2)
    ),
    "live, asked before a greater one was granted": lambda s: (
        s.acquire("a", 5, (10, 10.1)).acquire("b", 6, (20, 20.2)).live(5, (20.2, 20.3))
    ),
    "live, asked before its release was answered": lambda s: released(s).live(5, (10.3, 10.5)),
    "live after a release that may not have come": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .at("x")
        .release("a", (10.2, 10.3), UNKNOWN)
        .at("x")
        .live(5, (10.4, 10.5))
    ),
    "live after a release through another server": lambda s: (
        s.acquire("a", 5, (10, 10.1)).at("x").release("a", (10.2, 10.3)).at("y").live(5, (10.4, 10.5))
    ),
    "live after a release through one of two servers that were asked for it": lambda s: (
        s.acquire("a", 0, (9.8, 9.9), UNKNOWN)
        .at("y")
        .acquire("a", 5, (10, 10.1))
        .at("x")
        .release("a", (10.2, 10.3))
        .at("x")
        .live(5, (10.4, 10.5))
    ),
    "live after a release through nobody knows which server": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 10.3)).live(5, (10.4, 10.5))
    ),
    "live after a release, and a fault met the lease": lambda s: released(
        s.fault("delay", 10.05, 10.06)
    ).live(5, (10.4, 10.5)),
    "live after a release, and a fault met its first try": lambda s: released(
        s.acquire("a", 0, (9.5, 9.6), UNKNOWN).at("x").fault("delay", 9.7, 9.8)
    ).live(5, (10.4, 10.5)),
    "live, for it was granted again after the release": lambda s: (
        released(s).acquire("a", 6, (10.4, 10.5)).at("x").live(6, (10.6, 10.7))
    ),
    "an older token of a lease that was asked for again": lambda s: (
        s.acquire("a", 5, (10, 10.1)).acquire("a", 6, (10.2, 10.3)).live(5, (10.4, 10.5))
    ),
    "a token that nobody was told": lambda s: (
        s.acquire("a", 6, (10, 10.1)).acquire("b", 0, (9, 10.2), UNKNOWN).look(4, (10.4, 10.5))
    ),
    "nobody": lambda s: s.acquire("a", 5, (10, 10.1)).look(0, (10.2, 10.3)),
    "nobody while a majority had forgotten": lambda s: s.fault("majority wiped", 10, 12).look(
        0, (10.2, 10.3)
    ),
    "not live after its release": lambda s: (
        s.acquire("a", 5, (10, 10.1)).release("a", (10.2, 10.3)).not_live("a", 5, (10.4, 10.5))
    ),
    "not live when its validity ended in the meantime": lambda s: s.acquire("a", 5, (10, 10.1)).not_live(
        "a", 5, (11.9, 12)
    ),
    "not live, asked before it was granted": lambda s: s.acquire("a", 5, (10, 10.2)).not_live(
        "a", 5, (10.1, 10.3)
    ),
    "not live, but a clock was set": lambda s: (
        s.acquire("a", 5, (10, 10.1))
        .fault("clock", 10.15, 11, moves_clocks=True)
        .not_live("a", 5, (10.2, 10.3))
    ),
    "not live, but a majority was wiped": lambda s: (
        s.acquire("a", 5, (10, 10.1)).fault("majority wiped", 10.15, 11).not_live("a", 5, (10.2, 10.3))
    ),
    "not live, for it was granted again with a greater one": lambda s: (
        s.acquire("a", 5, (10, 10.1)).acquire("a", 6, (10.2, 10.3)).not_live("a", 5, (10.4, 10.5))
    ),
    "not live, and nobody knows whether it was granted": lambda s: s.acquire(
        "a", 0, (10, 10.1), FAILED
    ).not_live("a", 5, (10.2, 10.3)),
}


@pytest.mark.parametrize("tell", LATE.values(), ids=LATE)
def test_a_token_that_is_told_live_after_its_lease_was_over_is_found(
    tell: Callable[[HistoryBuilder], object],
) -> None:
    """Whatever clocks and nodes did."""
    verdict = verdict_of(tell)
    assert letters(verdict) == {"T2"}, verdict.violations
    (violation,) = verdict.violations
    assert "told live after" in violation.words
    assert len(violation.operations) == 2


@pytest.mark.parametrize("tell", UNTRUE.values(), ids=UNTRUE)
def test_a_token_that_is_told_not_to_be_live_though_it_is_is_found(
    tell: Callable[[HistoryBuilder], object],
) -> None:
    """Where no fault could have taken it."""
    verdict = verdict_of(tell)
    assert letters(verdict) == {"D"}, verdict.violations


@pytest.mark.parametrize(
    "see", [lambda s: s.live(5, (10.3, 10.4)), lambda s: s.look(5, (10.3, 10.4))], ids=["check", "look"]
)
def test_a_token_that_is_seen_live_while_a_majority_had_forgotten_is_found(
    see: Callable[[HistoryBuilder], object],
) -> None:
    """There was nobody left to tell."""
    verdict = verdict_of(lambda s: see(s.acquire("a", 5, (10, 10.1)).fault("majority wiped", 10.2, 12)))
    assert letters(verdict) == {"P"}, verdict.violations


def test_what_makes_no_message_late_is_a_fault() -> None:
    """By the names of those who bring it about."""
    assert set(_ELSEWHERE) <= set(FAULTS)


@pytest.mark.parametrize("tell", RIGHT.values(), ids=RIGHT)
def test_what_could_have_been_seen_is_right(tell: Callable[[HistoryBuilder], object]) -> None:
    """Sights are as old as their call at most, and unknown is unknown."""
    assert not verdict_of(tell).violations
