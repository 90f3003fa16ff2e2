"""What a judge says of a run: which promises were broken, by which calls, and whether the run proves anything at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from harness.history.records import Kind, Operation, Outcome


class Invariant(StrEnum):
    """The promises, by the letters that they have in the reports."""

    UNIQUE = "T1"
    """No two leases of a resource share a token."""
    ORDERED = "T2"
    """A later grant carries the greater token."""
    FENCED = "F"
    """The storage lets no lower token in after a higher one, and keeps what it has acknowledged."""
    EXCLUSION = "L"
    """At most one lease of a resource is inside its validity."""
    DEADLINE = "D"
    """A lease lasts as long as its holder was told, and no longer."""
    PROGRESS = "P"
    """Once all is well somebody is granted; while a majority has forgotten nobody is."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise.

    Attributes:
        words: what happened, with every call that shows it.
        at_s: when it showed, on the clock of the records.
        operations: the calls that show it; none where the lack of a call does.
    """

    invariant: Invariant
    resource: str
    words: str
    at_s: float
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True, slots=True)
class Counts:
    """The figures of a run.

    Attributes:
        operations: how many calls of each kind ended how; every kind and outcome is there.
        faults: how many of each kind there were.
        violations: how many of each invariant were found; every invariant is there.
        stale_writes_refused: appends that the storage refused because of their token.
        stale_reads_refused: the same of reads.
        throughput_per_s: calls that were OK per second, from the beginning to the first fault, or to the healing if there was none.
        longest_gap_s: for how long nobody was granted anything, at most, until all was healed.
    """

    operations: Mapping[Kind, Mapping[Outcome, int]]
    faults: Mapping[str, int]
    violations: Mapping[Invariant, int]
    stale_writes_refused: int
    stale_reads_refused: int
    throughput_per_s: float
    longest_gap_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it.

    Attributes:
        violations: the first of each invariant, in the order of their instants; `counts` tells how many there are in all.
        invalid: why the run proves nothing; empty if it does.
    """

    violations: tuple[Violation, ...]
    invalid: tuple[str, ...]
    counts: Counts

    @property
    def clean(self) -> bool:
        """Whether the run proves something, and nothing was broken."""
        return not self.violations and not self.invalid


@dataclass(frozen=True, slots=True)
class Words:
    """Names calls and instants for people.

    Args:
        began_s: the instant from which all others are told.
    """

    began_s: float

    def instant(self, at_s: float) -> str:
        """Return an instant, as seconds since the beginning."""
        return f"{at_s - self.began_s:+.6f} s"

    def call(self, call: Operation) -> str:
        """Return a call: what, whose, with which token, when, and how it ended."""
        of = f" of {call.entry!r}" if call.entry else ""
        token = f", token {call.token}" if call.token else ""
        completed = "never answered" if call.completed_s is None else self.instant(call.completed_s)
        until = f", valid until {self.instant(call.until_s)}" if call.until_s else ""
        return (
            f"{call.kind}{of} by {call.client} for lease {call.lease}{token} "
            f"[{self.instant(call.invoked_s)} … {completed}, {call.outcome}{until}]"
        )


def shown_at_s(*calls: Operation) -> float:
    """Return the last instant of some calls: from then on what they show could be known."""
    return max(call.invoked_s if call.completed_s is None else call.completed_s for call in calls)
