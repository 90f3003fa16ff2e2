"""Histories of chaos runs, written by hand for the judge's tests: what matters to a test, in a run that is otherwise valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from harness.history.checker import check
from harness.history.records import Fault, History, Kind, Operation, Outcome, in_order
from harness.history.verdict import Verdict

OK, FAILED, UNKNOWN = Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN
TTL_S = 2.0
# What the contract leaves of a ttl of 2 s: less 1 % and 2 ms.
VALIDITY_S = 1.978
HEALED_S = 100.0
ENDED_S = 110.0
# When whatever works does so once more.
AGAIN_S = 105.0
# Of each lease.
CLIENTS: dict[str, int] = {}
# A time, from a call's invocation to its answer; None if there was none.
Span = tuple[float, float | None]


class HistoryBuilder:
    """A history to which a test adds what matters to it, on resource "r"; all else makes the run a valid one.

    Without more a client of its own works on "background" before the first fault, at 1 s, and once more at 105 s; and every resource is
    acquired once after all was healed, at 100 s.
    """

    def __init__(self) -> None:
        self.operations = background()
        self.faults = [Fault("server killed", "server 0", 1.0, 1.5)]
        self.kept: dict[str, tuple[str, ...]] = {"background": tuple(f"e{turn}" for turn in range(31))}
        self.last_acquires = True
        self.asked: tuple[str, ...] = ()

    def acquire(
        self,
        lease: str,
        token: int,
        span: Span,
        outcome: Outcome = OK,
        *,
        until: float | None = None,
        ttl: float = TTL_S,
        resource: str = "r",
    ) -> Self:
        """Add an Acquire; granted, it is valid until what a server tells that granted it at once."""
        if until is None:
            until = span[0] + VALIDITY_S if outcome is OK else 0.0
        return self._add(
            Kind.ACQUIRE, lease, span, outcome, token=token, until_s=until, ttl_s=ttl, resource=resource
        )

    def renew(
        self, lease: str, span: Span, outcome: Outcome = OK, *, until: float | None = None, token: int = 0
    ) -> Self:
        """Add a renewal."""
        if until is None:
            until = span[0] + VALIDITY_S if outcome is OK else 0.0
        return self._add(Kind.RENEW, lease, span, outcome, until_s=until, token=token)

    def lost(self, lease: str, span: Span) -> Self:
        """Add a renewal that is told that the lease has ended."""
        return self._add(Kind.RENEW, lease, span, FAILED, lost=True)

    def not_held(self, lease: str, span: Span) -> Self:
        """Add a release that is told that the lease does not hold."""
        return self._add(Kind.RELEASE, lease, span, FAILED, lost=True)

    def at(self, server: str) -> Self:
        """Say which server the last call was made to."""
        self.operations[-1] = replace(self.operations[-1], server=server)
        return self

    def by(self, client: str) -> Self:
        """Say whose the last call was."""
        self.operations[-1] = replace(self.operations[-1], client=client)
        return self

    def release(self, lease: str, span: Span, outcome: Outcome = OK) -> Self:
        """Add a release."""
        return self._add(Kind.RELEASE, lease, span, outcome)

    def read(self, token: int, span: Span, outcome: Outcome = OK) -> Self:
        """Add a fenced read."""
        return self._add(Kind.READ, f"of {token}", span, outcome, token=token)

    def append(
        self, entry: str, token: int, span: Span, outcome: Outcome = OK, *, stale: bool = False
    ) -> Self:
        """Add an append."""
        return self._add(Kind.APPEND, f"of {token}", span, outcome, token=token, entry=entry, stale=stale)

    def keeps(self, *entries: str) -> Self:
        """Say what the storage shows in the end."""
        self.kept["r"] = entries
        return self

    def keeps_nothing(self) -> Self:
        """Say that the storage shows nothing in the end."""
        self.kept.clear()
        return self

    def fault(
        self,
        kind: str,
        began_s: float,
        ended_s: float,
        *,
        moves_clocks: bool = False,
        overlaps_s: float | None = None,
    ) -> Self:
        """Add a fault."""
        self.faults.append(Fault(kind, "node 1", began_s, ended_s, moves_clocks, overlaps_s))
        return self

    def without_last_acquires(self) -> Self:
        """Leave out what is acquired after all was healed."""
        self.last_acquires = False
        return self

    def late(self, *, of: int, unknown: int = 0, admission_refused: int = 0, at_s: float = 106.0) -> Self:
        """Add acquires at that instant that are refused, some of them without an answer or a judgement; the last one is granted."""
        for turn in range(of - 1):
            outcome = UNKNOWN if turn < unknown else FAILED
            self.acquire(f"late {turn}", 0, (at_s, at_s + 1), outcome)
            self.operations[-1] = replace(self.operations[-1], admission_refused=turn < admission_refused)
        return self.acquire("the last", 3 * 10**6, (at_s + 2, at_s + 2.1))

    def asks(self, *kinds: str) -> Self:
        """Say which faults the run was to have."""
        self.asked = kinds
        return self

    def live(self, token: int, span: Span) -> Self:
        """Add a check that is told that the token is live."""
        return self._add(Kind.CHECK, f"check of {token}", span, OK, token=token)

    def not_live(self, lease: str, token: int, span: Span) -> Self:
        """Add a check, by the holder of a lease, that is told that its token is not live."""
        return self._add(Kind.CHECK, lease, span, FAILED, token=token, lost=True)

    def look(self, token: int, span: Span) -> Self:
        """Add a look that shows this token, or with 0 nobody."""
        return self._add(Kind.GET_LOCK, f"look at {span[0]}", span, OK, token=token)

    def only(self, keep: Callable[[Operation], bool]) -> Self:
        """Leave out calls."""
        self.operations = [call for call in self.operations if keep(call)]
        return self

    def failing(self, fails: Callable[[Operation], bool]) -> Self:
        """Let calls fail instead."""
        self.operations = [replace(call, outcome=FAILED) if fails(call) else call for call in self.operations]
        return self

    def without_faults(self) -> Self:
        """Leave out the fault of every builder."""
        self.faults.clear()
        return self

    def history(self) -> History:
        """Return it."""
        operations = list(self.operations)
        if self.last_acquires:
            for number, resource in enumerate(sorted({call.resource for call in operations})):
                last = HistoryBuilder.__new__(HistoryBuilder)
                last.operations = []
                last.acquire(f"last {number}", 10**6, (HEALED_S, 100.1), resource=resource)
                operations += last.operations
        return History(
            seed=1,
            operations=in_order(operations),
            faults=tuple(self.faults),
            began_s=0.0,
            healed_s=HEALED_S,
            ended_s=ENDED_S,
            kept=self.kept,
            asked=self.asked,
        )

    def _add(
        self, kind: Kind, lease: str, span: Span, outcome: Outcome, *, resource: str = "r", **fields: Any
    ) -> Self:
        client = f"client{CLIENTS.setdefault(lease, len(CLIENTS))}"
        call = Operation(client, kind, resource, lease, span[0], span[1], outcome)
        self.operations.append(replace(call, **fields))
        return self


def background() -> list[Operation]:
    """Return the calls of a client that does everything, 150 of them in the first second, and some in the end."""
    builder = HistoryBuilder.__new__(HistoryBuilder)
    builder.operations = []
    for turn in range(31):
        last = turn == 30
        lease, token, at = (
            f"background {turn}",
            2 * 10**6 if last else turn + 1,
            AGAIN_S if last else turn / 31,
        )
        builder.acquire(lease, token, (at, at + 0.001)).renew(lease, (at + 0.002, at + 0.003))
        if last:
            builder.live(token, (at + 0.003, at + 0.004)).look(token, (at + 0.003, at + 0.004))
        builder.read(token, (at + 0.004, at + 0.005)).append(f"e{turn}", token, (at + 0.006, at + 0.007))
        builder.release(lease, (at + 0.008, at + 0.009))
    return [replace(call, resource="background") for call in builder.operations]


def verdict_of(tell: Callable[[HistoryBuilder], object]) -> Verdict:
    """Return the verdict of a builder."""
    builder = HistoryBuilder()
    tell(builder)
    return check(builder.history())


def letters(verdict: Verdict) -> set[str]:
    """Return which promises were found broken."""
    return {str(violation.invariant) for violation in verdict.violations}


Cases = Mapping[str, Callable[[HistoryBuilder], object]]
