"""F: the storage accepts no lower token after a higher one, and keeps every acknowledged append once.

The entries form a list that grows at its end. Each append writes the list that its caller had read, with
one entry more. So an entry stands before another one only if it was accepted earlier. Two appends with one
token that are under way at once may undo each other, because the storage promises no order of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from harness.history.calls import answered_s, greater, over_s
from harness.history.records import Kind, Operation, Outcome
from harness.history.verdict import Invariant, Violation

_RANKS = {Outcome.OK: 0, Outcome.UNKNOWN: 1, Outcome.FAILED: 2}


@dataclass(slots=True)
class _Entry:
    """The calls that may have appended one entry, and their proof; one call unless it was repeated.

    Attributes:
        call: the successful call, else one with unknown outcome, else one that failed.
        possible: the calls that took effect or may have.
        invoked_s: the entry cannot be there before.
        acknowledged_s: the entry is there from then on.
        least_token, greatest_token: the bounds of the token with which it was accepted.
    """

    call: Operation
    possible: list[Operation]
    invoked_s: float = inf
    acknowledged_s: float = inf
    least_token: int = 0
    greatest_token: int = 0


def judge_storage(
    resource: str, calls: Sequence[Operation], kept: Sequence[str], ended_s: float
) -> Iterator[Violation]:
    """Yield what breaks F for one resource."""
    yield from _judge_fence(calls)
    entries = _entries(calls)
    yield from _judge_presence(resource, entries, kept, ended_s)
    yield from _judge_positions(resource, entries, kept)


def _judge_fence(calls: Sequence[Operation]) -> Iterator[Violation]:
    accepted = [call for call in calls if call.outcome is Outcome.OK]
    answered = sorted(accepted, key=answered_s)
    highest: Operation | None = None
    position = 0
    for call in accepted:
        while position < len(answered) and answered_s(answered[position]) < call.invoked_s:
            highest = answered[position] if highest is None else greater(highest, answered[position])
            position += 1
        if highest is not None and highest.token > call.token:
            says = "a stale token was accepted after a greater one"
            yield Violation(Invariant.FENCED, call.resource, says, (highest, call))


def _entries(calls: Sequence[Operation]) -> dict[str, _Entry]:
    tries: defaultdict[str, list[Operation]] = defaultdict(list)
    for call in calls:
        if call.kind is Kind.APPEND:
            tries[call.entry].append(call)
    entries = {}
    for name, of_entry in tries.items():
        possible = [call for call in of_entry if call.outcome is not Outcome.FAILED]
        entry = _Entry(min(of_entry, key=lambda call: _RANKS[call.outcome]), possible)
        entries[name] = entry
        if possible:
            entry.invoked_s = min(call.invoked_s for call in possible)
            entry.acknowledged_s = min(map(over_s, possible))
            entry.least_token = min(call.token for call in possible)
            entry.greatest_token = max(call.token for call in possible)
    return entries


def _judge_presence(
    resource: str, entries: Mapping[str, _Entry], kept: Sequence[str], ended_s: float
) -> Iterator[Violation]:
    counts = Counter(kept)
    overlapping = _Overlaps(call for entry in entries.values() for call in entry.possible)
    for name, entry in entries.items():
        outcome, count = entry.call.outcome, counts.pop(name, 0)
        if count > 1:
            says = f"an entry is there {count} times"
        elif count and outcome is Outcome.FAILED:
            says = "an entry is there although its append failed"
        elif not count and outcome is Outcome.OK and not overlapping.may_undo(entry):
            says = "an acknowledged append is lost"
        else:
            continue
        yield Violation(Invariant.FENCED, resource, says, (entry.call,))
    for name in counts:
        yield Violation(
            Invariant.FENCED,
            resource,
            f"an entry is there that no client appended: {name!r}",
            shown_s=ended_s,
        )


class _Overlaps:
    """Tells whether appends with one token were under way, or may have been, at the same time."""

    def __init__(self, appends: Iterable[Operation]) -> None:
        self._begins_s: defaultdict[int, list[float]] = defaultdict(list)
        self._ends_s: defaultdict[int, list[float]] = defaultdict(list)
        for append in appends:
            self._begins_s[append.token].append(append.invoked_s)
            self._ends_s[append.token].append(over_s(append))
        for instants in (*self._begins_s.values(), *self._ends_s.values()):
            instants.sort()

    def may_undo(self, entry: _Entry) -> bool:
        """Tell whether an append of another entry overlaps this entry's append."""
        append = entry.call
        own = sum(
            call.token == append.token
            and call.invoked_s <= over_s(append)
            and over_s(call) >= append.invoked_s
            for call in entry.possible
        )
        begun = bisect_right(self._begins_s[append.token], over_s(append))
        over = bisect_left(self._ends_s[append.token], append.invoked_s)
        return begun - over > own


def _judge_positions(
    resource: str, entries: Mapping[str, _Entry], kept: Sequence[str]
) -> Iterator[Violation]:
    known = [entry for name in kept if (entry := entries.get(name)) is not None and entry.invoked_s < inf]
    first: _Entry | None = None
    for entry in reversed(known):
        if first is not None and first.acknowledged_s < entry.invoked_s:
            says = "an entry stands before one that was acknowledged before it was sent"
            yield Violation(Invariant.FENCED, resource, says, (first.call, entry.call))
        if first is None or entry.acknowledged_s < first.acknowledged_s:
            first = entry
    highest: _Entry | None = None
    for entry in known:
        if highest is not None and highest.least_token > entry.greatest_token:
            says = "an entry with a smaller token stands after one with a greater token"
            yield Violation(Invariant.FENCED, resource, says, (highest.call, entry.call))
        if highest is None or entry.least_token > highest.least_token:
            highest = entry
