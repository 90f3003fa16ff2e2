"""L and D: leases exclude each other while their holders count on them, and last as long as was told.

A holder counts on its lease from the answer to its Acquire until the latest instant that it was told: by that answer, or by an answer to a
repeat or a renewal that came while it still counted on the lease. It stops earlier when it sends a release, or is told that the lease is lost.
The instant at which a validity ends is outside of it. After a release whose end is not known a lease of the same id is never counted on: the
release might come late and end it.

What D promises of the validity that is told: it is positive; it ends no later than a lease can that was taken when the answer came (an Acquire
that waits is told one that contains its wait) or, of a renewal, when it was called; and it is not shorter than the ttl, less the allowance
for drift that the contract names. Neither a renewal nor a first release tells that a lease is lost which its holder may count on, and no
renewal that one is kept which has ended for good: because it was released or told lost, or because another lease was granted after it, which
no clock can undo.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from harness.history.calls import Excuses, ResourceCalls, answered_s, greater, over_s
from harness.history.records import Kind, Operation, Outcome
from harness.history.verdict import Invariant, Violation, Words, shown_at_s

# What the contract takes from a validity: of the ttl, and of the time that was waited.
_DRIFT_RATIO = 0.01
_DRIFT_FIXED_S = 0.002
_WAIT_DRIFT_RATIO = 0.0005
_WAIT_DRIFT_OF_TTL_MAX = 0.5
# A validity is told in whole milliseconds.
_ROUNDING_S = 0.001
# Sums of floating point numbers.
_INEXACT_S = 1e-6


@dataclass(slots=True)
class Window:
    """An unbroken time within which a holder counts on its lease: from `start_s` on, up to but without `end_s`.

    Attributes:
        acquire: whose answer began it.
        last: the call whose answer told `end_s`, or the one that ended it.
        called_s: when the first Acquire of this lease was called.
    """

    lease: str
    acquire: Operation
    last: Operation
    called_s: float
    start_s: float
    end_s: float


def windows(calls: Sequence[Operation]) -> list[Window]:
    """Return the windows of one lease, in their order.

    Args:
        calls: acquires, renewals and releases, in the order of invocation.
    """
    return _follow(calls)[0]


def judge_leases(resource: ResourceCalls, excuses: Excuses, words: Words) -> Iterator[Violation]:
    """Yield what breaks L or D in the calls for one resource."""
    every: list[Window] = []
    for calls in resource.leases.values():
        found, lost = _follow(calls)
        every += found
        for window, call in lost:
            if not excuses.early_end(window.called_s, answered_s(call)):
                said = (
                    f"a lease was told lost {(window.end_s - answered_s(call)) * 1000:.3f} ms before its end: "
                    f"{words.call(call)}, after {words.call(window.last)}"
                )
                yield _late(call, said, window.last)
        yield from _judge_told(calls, words)
        yield from _judge_ended(calls, words)
    yield from _judge_exclusion(every, excuses, words)
    yield from _judge_followed(resource, words)


def _judge_exclusion(every: list[Window], excuses: Excuses, words: Words) -> Iterator[Violation]:
    latest: Window | None = None
    for window in sorted(every, key=lambda each: each.start_s):
        # The windows of one lease do not overlap, so whoever overlaps the one that ends last is another lease's.
        overlaps = latest is not None and window.start_s < latest.end_s
        if latest is not None and overlaps and not excuses.overlap(_called_s(latest, window), window.start_s):
            both_s = min(latest.end_s, window.end_s) - window.start_s
            calls = tuple(dict.fromkeys((latest.acquire, latest.last, window.acquire, window.last)))
            said = f"two leases were valid for {both_s * 1000:.3f} ms: {' and '.join(map(words.call, calls))}"
            yield Violation(Invariant.EXCLUSION, window.acquire.resource, said, window.start_s, calls)
        if latest is None or window.end_s > latest.end_s:
            latest = window


def _follow(calls: Sequence[Operation]) -> tuple[list[Window], list[tuple[Window, Operation]]]:
    """Return a lease's windows, and each that a renewal or a first release told lost, as it was then, with that call."""
    found: list[Window] = []
    lost: list[tuple[Window, Operation]] = []
    current: Window | None = None
    first_called_s = inf
    released_over_s = -inf
    for at_s, _, call in sorted(_events(calls), key=lambda event: event[:2]):
        inside = current if current is not None and at_s < current.end_s else None
        first_release = released_over_s == -inf
        if call.kind is Kind.RELEASE:
            released_over_s = max(released_over_s, over_s(call))
        if call.kind is Kind.RELEASE or call.lost:
            if inside is not None:
                # One that was sent before the grant was known may have been answered before it as well.
                told = call.lost and call.invoked_s > inside.start_s and answered_s(call) < inside.end_s
                if told and (call.kind is Kind.RENEW or first_release):
                    lost.append((replace(inside), call))
                inside.end_s, inside.last = at_s, call
        elif inside is not None:
            if call.until_s > inside.end_s:
                inside.end_s, inside.last = call.until_s, call
        elif call.kind is Kind.ACQUIRE and call.until_s > at_s and released_over_s < call.invoked_s:
            if first_called_s == inf:
                first_called_s = min(each.invoked_s for each in calls if each.kind is Kind.ACQUIRE)
            current = Window(call.lease, call, call, first_called_s, at_s, call.until_s)
            found.append(current)
    return [window for window in found if window.start_s < window.end_s], lost


def _events(calls: Sequence[Operation]) -> Iterator[tuple[float, int, Operation]]:
    """Yield what changes whether the holder counts on its lease, and when; of one instant, what ends a window first."""
    for call in calls:
        if call.kind is Kind.RELEASE:
            yield call.invoked_s, 0, call
        elif call.lost and call.completed_s is not None:
            yield call.completed_s, 1, call
        elif call.outcome is Outcome.OK:
            yield answered_s(call), 2, call


def _called_s(one: Window, other: Window) -> float:
    """Return from when on a clock that was moved may have made two leases overlap: one of them may have been there already."""
    return min(one.called_s, other.called_s)


def _judge_told(calls: Sequence[Operation], words: Words) -> Iterator[Violation]:
    ttls_s = [call.ttl_s for call in calls if call.kind is Kind.ACQUIRE and call.ttl_s > 0]
    for call in calls:
        if call.outcome is not Outcome.OK or call.kind is Kind.RELEASE or call.lost:
            continue
        if call.until_s <= call.invoked_s:
            yield _late(call, f"a validity was told that is none: {words.call(call)}")
            continue
        # A renewal goes on with the ttl of whichever Acquire was the last to be granted.
        of_call_s = ttls_s if call.kind is Kind.RENEW or call.ttl_s <= 0 else [call.ttl_s]
        if not of_call_s:
            continue
        longest_s = max(of_call_s) * (1 - _DRIFT_RATIO) - _DRIFT_FIXED_S
        # An Acquire may have been granted as late as when it was answered.
        latest_s = (answered_s(call) if call.kind is Kind.ACQUIRE else call.invoked_s) + longest_s
        if call.until_s > latest_s + _INEXACT_S:
            said = f"a validity was told that ends {(call.until_s - latest_s) * 1000:.3f} ms after the lease can: "
            yield _late(call, said + words.call(call))
            continue
        ttl_s = min(of_call_s)
        waited_s = answered_s(call) - call.invoked_s if call.kind is Kind.ACQUIRE else 0.0
        wait_drift_s = min(waited_s * _WAIT_DRIFT_RATIO, ttl_s * _WAIT_DRIFT_OF_TTL_MAX)
        least_s = ttl_s * (1 - _DRIFT_RATIO) - _DRIFT_FIXED_S - wait_drift_s - _ROUNDING_S
        short_s = call.invoked_s + least_s - call.until_s
        if short_s > _INEXACT_S:
            said = f"a validity was told that is {short_s * 1000:.3f} ms too short for a ttl of {ttl_s:g} s: "
            yield _late(call, said + words.call(call))


def _judge_ended(calls: Sequence[Operation], words: Words) -> Iterator[Violation]:
    """Yield renewals that kept a lease which was released or told lost before they were called: only an Acquire makes it anew."""
    if all(call.kind is not Kind.RENEW for call in calls):
        return
    granted_over_s = max((over_s(call) for call in calls if call.kind is Kind.ACQUIRE), default=inf)
    ending: Operation | None = None
    for call in calls:
        if not call.lost and (call.kind is not Kind.RELEASE or call.outcome is not Outcome.OK):
            continue
        if call.completed_s is None or granted_over_s >= call.invoked_s:
            continue
        if ending is None or call.completed_s < answered_s(ending):
            ending = call
    if ending is None:
        return
    for call in calls:
        if call.kind is Kind.RENEW and call.outcome is Outcome.OK and call.invoked_s > answered_s(ending):
            yield _late(
                call,
                f"a lease that had ended was renewed: {words.call(call)} after {words.call(ending)}",
                ending,
            )


def _judge_followed(resource: ResourceCalls, words: Words) -> Iterator[Violation]:
    """Yield renewals that kept a lease after a later one was granted.

    The quorum of the later grant and that of the renewal share a node, and there the earlier hold had ended before.
    """
    grants = sorted(
        (call for calls in resource.leases.values() for call in calls if _is_grant(call)), key=answered_s
    )
    instants = [answered_s(grant) for grant in grants]
    greatest = list(accumulate(grants, greater))
    for calls in resource.leases.values():
        acquires = [call for call in calls if call.kind is Kind.ACQUIRE]
        for renewal in calls:
            if renewal.kind is not Kind.RENEW or renewal.outcome is not Outcome.OK:
                continue
            before = bisect_left(instants, renewal.invoked_s)
            # It may be the hold of an Acquire whose token nobody knows.
            if not before or any(not _is_told(acquire, renewal) for acquire in acquires):
                continue
            last = greatest[before - 1]
            if last.lease != renewal.lease:
                said = f"a lease was renewed after a later one was granted: {words.call(renewal)} after {words.call(last)}"
                yield _late(renewal, said, last)


def _is_grant(call: Operation) -> bool:
    return call.kind is Kind.ACQUIRE and call.outcome is Outcome.OK


def _is_told(acquire: Operation, renewal: Operation) -> bool:
    """Tell whether it is known what came of an Acquire before a renewal was called, if it was called before that at all."""
    return acquire.outcome is Outcome.FAILED or over_s(acquire) < renewal.invoked_s


def _late(call: Operation, said: str, *others: Operation) -> Violation:
    return Violation(Invariant.DEADLINE, call.resource, said, shown_at_s(call), (*others, call))
