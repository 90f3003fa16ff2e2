"""When a server that hands a lock over has to let another one have it."""

from __future__ import annotations

from redfence_server.hand_over_run import HAND_OVERS_MAX, HandOverRun
from redfence_server.redlock import AttemptGranted


class Least:
    """Chance that always takes the low end."""

    def hex_id(self) -> str:
        """Not used."""
        raise NotImplementedError

    def uniform(self, low: float, high: float) -> float:
        """Return the low end."""
        return low


def run_of(
    tokens: range, *, contended: bool, run: HandOverRun | None = None, now_ms: float = 1_000.0
) -> HandOverRun:
    """Return a run in which the first token was minted and each other handed over, in 2 ms each."""
    run = run or HandOverRun(Least())
    for token in tokens:
        grant = AttemptGranted(token, now_ms - 2, "", contended)
        run.granted(grant, handed_over=token != tokens[0], now_ms=now_ms)
    return run


def test_a_run_is_over_after_so_many_hand_overs_that_another_server_watched() -> None:
    """The mint it began with is none."""
    assert not run_of(range(1, 1 + HAND_OVERS_MAX), contended=True).is_over
    assert run_of(range(1, 2 + HAND_OVERS_MAX), contended=True).is_over


def test_while_no_other_server_waits_a_run_has_no_end() -> None:
    """And nothing is remembered of it."""
    run = run_of(range(1, 200), contended=False)
    assert not run.is_over
    assert not run.under_way


def test_a_hand_over_that_nobody_watched_begins_the_run_anew() -> None:
    """The other server has had the lock, or given up."""
    run = run_of(range(1, 1 + HAND_OVERS_MAX), contended=True)
    after = AttemptGranted(1 + HAND_OVERS_MAX, 998.0, "", False)
    run.granted(after, handed_over=True, now_ms=1_000)
    assert not run.under_way


def test_a_server_that_holds_back_is_known_by_its_notice() -> None:
    """For twice as long as this one would hold back."""
    for later_ms, counts in ((27, True), (29, False)):
        run = run_of(range(1, 2), contended=False)
        run.expect_rival(1_000)  # 2 * (8 + 3 * 2)
        run.granted(AttemptGranted(2, 998.0 + later_ms, "", False), handed_over=True, now_ms=1_000 + later_ms)
        assert run.under_way is counts


def test_a_server_that_holds_back_is_known_by_the_numbers_that_it_used() -> None:
    """Its turn was between two grants here."""
    run = run_of(range(1, 3), contended=False)
    run_of(range(3, 5), contended=False, run=run)
    assert not run.under_way
    run_of(range(9, 11), contended=False, run=run)
    assert run.under_way


def test_at_its_end_a_run_begins_anew_and_holds_back_for_some_round_trips() -> None:
    """As long as the others need to take the lock."""
    run = run_of(range(1, 2 + HAND_OVERS_MAX), contended=True)
    assert run.end() == 8 + 3 * 2
    assert not run.under_way
