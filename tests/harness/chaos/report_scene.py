"""What a report draws of a run: a bounded number of bars and marks, whatever the run held.

Up to a bound every grant, every Acquire that is unknown and every refused write is drawn. Beyond it, time is cut into even slices, for each
of which a row tells how much of it was held and how often what happened; only around violations everything is drawn still.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.chaos.checker_calls import ResourceCalls, by_resource, is_possible
from harness.chaos.checker_leases import windows
from harness.chaos.checker_verdict import Verdict, Violation
from harness.chaos.records import History, Kind, Operation, Outcome

# About 35 bytes each in the page.
MARKS_MAX = 80_000
ROWS_MAX = 100
_SLICES_MAX = 2_000
# For all rows together: about 15 bytes each.
_SLICES_OF_ALL_ROWS_MAX = 120_000
# So much around a violation is drawn in full, for so many violations.
_NEAR_S = 5.0
_NEAR_VIOLATIONS_MAX = 200
# Of each violation so many calls are drawn.
_CALLS_MAX = 8
# An unknown Acquire without an end is drawn for so long.
_UNANSWERED_S = 2.0

GRANT, UNKNOWN, STALE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that is drawn in a row; instants are seconds since the run's beginning.

    Attributes:
        sort: GRANT, UNKNOWN or STALE.
        lane: 1 if it is drawn below another one of that time.
    """

    sort: int
    began_s: float
    ended_s: float
    token: int
    client: str
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One resource.

    Attributes:
        marks: what is drawn one by one, by its beginning.
        slices: number of the slice: for how many seconds of it somebody held the lock, and how many marks of each sort began in it;
            empty if every mark is drawn.
    """

    name: str
    marks: tuple[Mark, ...]
    slices: Mapping[int, tuple[float, int, int, int]]


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that is drawn.

    Attributes:
        slice_s: how long a slice is; 0 if there are none.
        rows_left_out: how many resources are not drawn.
    """

    lasted_s: float
    rows: tuple[Row, ...]
    slice_s: float
    rows_left_out: int


def scene(history: History, verdict: Verdict) -> Scene:
    """Return what to draw."""
    resources = by_resource(call for call in history.operations if is_possible(call))
    lasted_s = max(history.ended_s - history.began_s, 1e-3)
    broken = Counter(violation.resource for violation in verdict.violations)
    drawn = sorted(
        sorted(resources, key=lambda name: (-broken[name], -len(resources[name].leases)))[:ROWS_MAX]
    )
    marks = {name: tuple(_marks(resources[name], history)) for name in drawn}
    slice_s = 0.0
    slices: dict[str, dict[int, tuple[float, int, int, int]]] = {name: {} for name in drawn}
    if sum(map(len, marks.values())) > MARKS_MAX:
        slice_s = lasted_s / min(_SLICES_MAX, max(1, _SLICES_OF_ALL_ROWS_MAX // len(drawn)))
        slices = {name: _slices(of_row, slice_s, lasted_s) for name, of_row in marks.items()}
        marks = _near(marks, verdict.violations, history.began_s)
    return Scene(
        lasted_s=lasted_s,
        rows=tuple(Row(name, marks[name], slices[name]) for name in drawn),
        slice_s=slice_s,
        rows_left_out=len(resources) - len(drawn),
    )


def calls_drawn(violation: Violation) -> tuple[Operation, ...]:
    """Return the calls of a violation that are drawn with it."""
    return violation.operations[:_CALLS_MAX]


def span_s(call: Operation, history: History) -> tuple[float, float]:
    """Return from when to when a call is drawn, in seconds since the beginning."""
    completed_s = (
        min(call.invoked_s + _UNANSWERED_S, history.ended_s) if call.completed_s is None else call.completed_s
    )
    return call.invoked_s - history.began_s, max(completed_s, call.invoked_s) - history.began_s


def _marks(resource: ResourceCalls, history: History) -> Iterator[Mark]:
    """Yield what there is to draw of a resource, by its beginning."""
    found: list[Mark] = []
    for calls in resource.leases.values():
        for window in windows(calls):
            began_s, ended_s = window.start_s - history.began_s, window.end_s - history.began_s
            found.append(Mark(GRANT, began_s, ended_s, window.acquire.token, window.acquire.client))
        found += (
            _mark(UNKNOWN, call, history)
            for call in calls
            if call.kind is Kind.ACQUIRE and call.outcome is Outcome.UNKNOWN
        )
    found += (_mark(STALE, call, history) for call in resource.storage if call.stale)
    found.sort(key=lambda mark: mark.began_s)
    free_s = 0.0
    for mark in found:
        if mark.sort != GRANT:
            yield mark
        elif mark.began_s < free_s:
            yield Mark(mark.sort, mark.began_s, mark.ended_s, mark.token, mark.client, lane=1)
        else:
            free_s = mark.ended_s
            yield mark


def _mark(sort: int, call: Operation, history: History) -> Mark:
    return Mark(sort, *span_s(call, history), call.token, call.client)


def _slices(marks: Iterable[Mark], slice_s: float, lasted_s: float) -> dict[int, tuple[float, int, int, int]]:
    held_s: defaultdict[int, float] = defaultdict(float)
    begun: Counter[tuple[int, int]] = Counter()
    last = int(lasted_s / slice_s)
    for mark in marks:
        first = min(max(int(mark.began_s / slice_s), 0), last)
        begun[first, mark.sort] += 1
        if mark.sort == GRANT:
            for number in range(first, min(int(mark.ended_s / slice_s), last) + 1):
                within_s = min(mark.ended_s, (number + 1) * slice_s) - max(mark.began_s, number * slice_s)
                held_s[number] += max(within_s, 0.0)
    numbers = sorted({*held_s, *(number for number, _ in begun)})
    return {
        number: (
            min(held_s[number], slice_s),
            begun[number, GRANT],
            begun[number, UNKNOWN],
            begun[number, STALE],
        )
        for number in numbers
    }


def _near(
    marks: Mapping[str, tuple[Mark, ...]], violations: Sequence[Violation], began_s: float
) -> dict[str, tuple[Mark, ...]]:
    """Return the marks that are near a violation, up to the bound; those of the first violations first."""
    kept: dict[str, set[int]] = {name: set() for name in marks}
    begins_s = {name: [mark.began_s for mark in of_row] for name, of_row in marks.items()}
    left = MARKS_MAX
    for violation in violations[:_NEAR_VIOLATIONS_MAX]:
        if violation.resource not in marks:
            continue
        instants_s = [call.invoked_s for call in violation.operations]
        for at_s in dict.fromkeys((violation.at_s, *instants_s[:_CALLS_MAX])):
            of_row = begins_s[violation.resource]
            first = bisect_left(of_row, at_s - began_s - _NEAR_S)
            end = bisect_right(of_row, at_s - began_s + _NEAR_S)
            new = [place for place in range(first, end) if place not in kept[violation.resource]][:left]
            kept[violation.resource].update(new)
            left -= len(new)
    return {name: tuple(marks[name][place] for place in sorted(places)) for name, places in kept.items()}
