"""The checker finds each broken promise, and finds nothing in a history that can be true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.chaos.faults import FAULTS
from harness.history.checker import VIOLATIONS_MAX, check
from harness.history.history_builder import HEALED_S, built
from harness.history.observations import DELAY_NOTHING
from harness.history.records import Kind, Outcome
from harness.history.verdict import Invariant, Verdict

OK, FAILED, UNKNOWN = Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN


def _histories() -> Iterator[object]:
    """Yield the expected verdict, the name and the text of each history in the table."""
    text = (Path(__file__).parent / "histories.txt").read_text("utf-8").replace("\n    ", " ")
    verdict = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            verdict = line.strip("[]")
        elif not line.startswith("#"):
            name, _, history = line.rpartition(":")
            yield pytest.param(verdict, name, history, id=f"{verdict}: {name}")


def letters(verdict: Verdict) -> set[str]:
    return {str(violation.invariant) for violation in verdict.violations}


@pytest.mark.parametrize(("expected", "name", "history"), list(_histories()))
def test_a_history_gets_the_verdict_of_its_section(expected: str, name: str, history: str) -> None:
    """It breaks one promise, or it is invalid for one reason, or it is clean; and nothing else is found."""
    verdict = check(built(history))
    if expected != "no violation":
        assert verdict.clean == (expected == "clean"), (verdict.violations, verdict.invalid)
    assert letters(verdict) == ({expected} & set(Invariant)), verdict.violations
    if expected == "invalid":
        (reason,) = verdict.invalid
        assert name in reason
    if expected in ("T2", "D") and name.startswith(("CheckToken", "GetLock")):
        (violation,) = verdict.violations
        assert "a token was shown" in violation.words
        assert len(violation.calls) == 2


def test_a_last_acquire_that_fails_breaks_progress_and_makes_the_run_invalid() -> None:
    """A resource that stays locked may hide what was wrong before."""
    verdict = check(built("no_last_acquire; acquire a 0 100-101 failed"))
    assert letters(verdict) == {"P"}
    assert verdict.invalid == ("the last acquire of 'r' failed after the healing",)


def test_a_run_in_which_nothing_was_granted_is_invalid() -> None:
    """Every reason is given."""
    history = built("kept_nothing")
    calls = [replace(call, outcome=FAILED) for call in history.operations if call.invoked_s < HEALED_S]
    verdict = check(replace(history, operations=tuple(calls)))
    assert not verdict.violations
    assert verdict.invalid[: len(Kind)] == tuple(f"no {kind} succeeded" for kind in Kind)
    assert len(verdict.invalid) == len(Kind) + 2


def test_a_run_without_faults_is_valid_if_no_fault_was_requested() -> None:
    """Its throughput counts until the healing."""
    assert check(replace(built("no_fault"), healed_s=1.0)).clean


def test_a_violation_names_its_calls_with_client_token_and_instants() -> None:
    """Instants count from the beginning of the run."""
    history = built("acquire a 6 10-10.25; acquire b 5 20-20.5")
    (violation,) = check(replace(history, began_s=-5.0)).violations
    assert violation.resource == "r"
    assert violation.at_s == 20.5
    assert [call.lease for call in violation.calls] == ["a", "b"]
    for words in ("client97", "client98", "token 6", "token 5", "+15.000000 s", "+25.500000 s", "lease b"):
        assert words in violation.words


def test_a_repeat_with_a_smaller_token_is_one_violation() -> None:
    """Two rules could find it."""
    assert len(check(built("acquire a 6 10-10.1; acquire a 5 11-11.1")).violations) == 1


def test_the_counts_are_those_of_the_run() -> None:
    """They hold calls, faults, refusals, throughput, and the longest time without a grant."""
    counts = check(
        built(
            "append x 5 40-40.1 failed stale; read 5 41-41.1 unknown; read 4 42-42.1 failed;"
            "acquire a 5 60-60.5; fault 5-6 node wiped; fault 7-8 node wiped"
        )
    ).counts
    assert counts.operations[Kind.APPEND] == {OK: 31, FAILED: 1, UNKNOWN: 0}
    assert counts.operations[Kind.READ] == {OK: 31, FAILED: 1, UNKNOWN: 1}
    assert counts.faults == {"server killed": 1, "node wiped": 2}
    assert counts.stale_writes_refused == 1
    assert counts.stale_reads_refused == 0
    assert counts.throughput_per_s == 150
    assert counts.longest_gap_s == pytest.approx(60.5 - 29 / 31 - 0.001)
    assert set(counts.violations.values()) == {0}


def test_the_verdict_lists_the_first_violations_and_counts_all() -> None:
    """A run that broke at its beginning does not fill the memory."""
    statements = [f"acquire a {10**5} 2-2.1"]
    for turn in range(VIOLATIONS_MAX + 7):
        at_s = 5 + turn / 1000
        statements.append(f"acquire b{turn} {turn + 1} {at_s}-{at_s + 0.0004}")
        statements.append(f"release b{turn} {at_s + 0.0005}-{at_s + 0.0006}")
    verdict = check(built(";".join(statements)))
    assert letters(verdict) == {"T2"}
    assert len(verdict.violations) == VIOLATIONS_MAX
    assert verdict.counts.violations[Invariant.ORDERED] == VIOLATIONS_MAX + 7


def test_the_faults_that_delay_no_message_are_known_faults() -> None:
    """A fault with another name would count as one that delays messages."""
    assert set(DELAY_NOTHING) <= set(FAULTS)
