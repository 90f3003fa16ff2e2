"""The verdict on a run: which invariants were broken, by which calls, and whether the run proves anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from harness.history.records import Kind, Operation, Outcome


class Invariant(StrEnum):
    """The promises that `check` judges, by the letters that reports use."""

    UNIQUE = "T1"
    """No two leases of a resource share a token."""
    ORDERED = "T2"
    """A later grant carries the greater token."""
    FENCED = "F"
    """The storage accepts no lower token after a higher one, and keeps every acknowledged append."""
    EXCLUSION = "L"
    """At most one lease of a resource is inside its validity."""
    DEADLINE = "D"
    """A lease lasts exactly as long as its holder was told."""
    PROGRESS = "P"
    """After the healing clients acquire again; while a majority has forgotten, no server grants."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise.

    Attributes:
        says: what happened, without the calls.
        calls: the calls that show it; empty where the lack of a call shows it.
        shown_s: when it showed; if None, at the last end of a call.
        began_s: the instant from which `words` counts.
    """

    invariant: Invariant
    resource: str
    says: str
    calls: tuple[Operation, ...] = ()
    shown_s: float | None = None
    began_s: float = 0.0

    @property
    def at_s(self) -> float:
        """When it showed, on the clock of the records."""
        if self.shown_s is not None:
            return self.shown_s
        return max(call.invoked_s if call.completed_s is None else call.completed_s for call in self.calls)

    @property
    def words(self) -> str:
        calls = " and ".join(_call_in_words(call, self.began_s) for call in self.calls)
        return f"{self.says}: {calls}" if calls else self.says


@dataclass(frozen=True, slots=True)
class Counts:
    operations: Mapping[Kind, Mapping[Outcome, int]]
    faults: Mapping[str, int]
    violations: Mapping[Invariant, int]
    stale_writes_refused: int
    stale_reads_refused: int
    throughput_per_s: float
    longest_gap_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `check`.

    Attributes:
        violations: the first ones of each invariant, in the order of time; `counts` has the full numbers.
        invalid: why the run proves nothing; empty if it proves something.
    """

    violations: tuple[Violation, ...]
    invalid: tuple[str, ...]
    counts: Counts

    @property
    def clean(self) -> bool:
        return not self.violations and not self.invalid


def _call_in_words(call: Operation, began_s: float) -> str:
    entry = f" of {call.entry!r}" if call.entry else ""
    token = f", token {call.token}" if call.token else ""
    completed = "never answered" if call.completed_s is None else f"{call.completed_s - began_s:+.6f} s"
    until = f", valid until {call.until_s - began_s:+.6f} s" if call.until_s else ""
    return (
        f"{call.kind}{entry} by {call.client} for lease {call.lease}{token} "
        f"[{call.invoked_s - began_s:+.6f} s … {completed}, {call.outcome}{until}]"
    )
