"""F: the storage lets no lower token in after a higher one, and keeps each append that it has acknowledged, once.

What it keeps is judged as a list that grows at its end: each append puts the list that its caller had read with one more entry, so an entry
stands before another one only if it was accepted before. Two appends of one token that are under way at once may undo each other, for the
storage promises no order of them; an entry that another one of its token may have undone is not missed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from harness.history.calls import answered_s, over_s
from harness.history.records import Kind, Operation, Outcome
from harness.history.verdict import Invariant, Violation, Words, shown_at_s


@dataclass(slots=True)
class _Entry:
    """What is known of one entry by the calls that may have appended it; one call, unless it was repeated.

    Attributes:
        call: the one that was OK, else any that is unknown, else one that failed.
        possible: those that have had their effect, or may have.
        invoked_s: before then it cannot have been there.
        acknowledged_s: from then on it is there.
        least_token: at most with which it was accepted.
        greatest_token: at least with which.
    """

    call: Operation
    possible: list[Operation]
    invoked_s: float = inf
    acknowledged_s: float = inf
    least_token: int = 0
    greatest_token: int = 0


_RANKS = {Outcome.OK: 0, Outcome.UNKNOWN: 1, Outcome.FAILED: 2}


def judge_storage(
    resource: str, calls: Sequence[Operation], kept: Sequence[str], ended_s: float, words: Words
) -> Iterator[Violation]:
    """Yield what breaks F for one resource.

    Args:
        resource: its name.
        calls: reads and appends, in the order of invocation.
        kept: the entries in the end.
        ended_s: when that was looked at.
        words: to say it.
    """
    yield from _judge_fence(calls, words)
    entries = _entries(calls)
    yield from _judge_presence(resource, entries, kept, ended_s, words)
    yield from _judge_positions(resource, entries, kept, ended_s, words)


def _judge_fence(calls: Sequence[Operation], words: Words) -> Iterator[Violation]:
    accepted = [call for call in calls if call.outcome is Outcome.OK]
    answered = sorted(accepted, key=answered_s)
    highest: Operation | None = None
    position = 0
    for call in accepted:
        while position < len(answered) and answered_s(answered[position]) < call.invoked_s:
            if highest is None or answered[position].token > highest.token:
                highest = answered[position]
            position += 1
        if highest is not None and highest.token > call.token:
            said = f"a stale token was let in: {words.call(call)} after {words.call(highest)}"
            yield Violation(Invariant.FENCED, call.resource, said, shown_at_s(highest, call), (highest, call))


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
    resource: str, entries: Mapping[str, _Entry], kept: Sequence[str], ended_s: float, words: Words
) -> Iterator[Violation]:
    times = Counter(kept)
    tokens = _Overlaps(call for entry in entries.values() for call in entry.possible)
    for name, entry in entries.items():
        outcome, count = entry.call.outcome, times.pop(name, 0)
        if count == 1 and outcome is not Outcome.FAILED:
            continue
        if count > 1:
            said = f"an entry is there {count} times: {words.call(entry.call)}"
        elif count and outcome is Outcome.FAILED:
            said = f"an entry is there although its append failed: {words.call(entry.call)}"
        elif outcome is Outcome.OK:
            if tokens.may_undo(entry):
                continue
            said = f"an acknowledged append is lost: {words.call(entry.call)}"
        else:
            continue
        yield Violation(Invariant.FENCED, resource, said, shown_at_s(entry.call), (entry.call,))
    for name in times:
        said = f"an entry is there that nobody appended: {name!r}"
        yield Violation(Invariant.FENCED, resource, said, ended_s)


class _Overlaps:
    """Tells whether appends of one token were, or may have been, under way at the same time.

    Args:
        appends: those that have had their effect, or may have.
    """

    def __init__(self, appends: Iterable[Operation]) -> None:
        self._begins_s: defaultdict[int, list[float]] = defaultdict(list)
        self._ends_s: defaultdict[int, list[float]] = defaultdict(list)
        for append in appends:
            self._begins_s[append.token].append(append.invoked_s)
            self._ends_s[append.token].append(over_s(append))
        for instants in (*self._begins_s.values(), *self._ends_s.values()):
            instants.sort()

    def may_undo(self, entry: _Entry) -> bool:
        """Tell whether an append of another entry was under way together with this one's."""
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
    resource: str, entries: Mapping[str, _Entry], kept: Sequence[str], ended_s: float, words: Words
) -> Iterator[Violation]:
    known = [entry for name in kept if (entry := entries.get(name)) is not None and entry.invoked_s < inf]
    first: _Entry | None = None
    for entry in reversed(known):
        if first is not None and first.acknowledged_s < entry.invoked_s:
            said = (
                f"an entry stands before one that was acknowledged before it was sent: {words.call(entry.call)} "
                f"before {words.call(first.call)}"
            )
            calls = (first.call, entry.call)
            yield Violation(Invariant.FENCED, resource, said, shown_at_s(*calls), calls)
        if first is None or entry.acknowledged_s < first.acknowledged_s:
            first = entry
    highest: _Entry | None = None
    for entry in known:
        if highest is not None and highest.least_token > entry.greatest_token:
            said = (
                f"an entry of a smaller token stands after one of a greater: {words.call(entry.call)} after "
                f"{words.call(highest.call)}"
            )
            calls = (highest.call, entry.call)
            yield Violation(Invariant.FENCED, resource, said, shown_at_s(*calls), calls)
        if highest is None or entry.least_token > highest.least_token:
            highest = entry
