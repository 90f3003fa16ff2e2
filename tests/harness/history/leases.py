"""L and D: leases exclude each other, and each lease lasts exactly as long as its holder was told.

A holder counts on its lease from the answer to its Acquire to the latest end that it was told. A repeated
Acquire or a renewal moves that end if its answer came in time. The holder stops earlier when it sends a
release or is told that the lease is lost. The end itself is outside of the validity. After a release with
unknown outcome no lease of the same id counts, because the release may arrive late and end it.

D judges every validity in an answer. It is positive. It ends no later than a lease can that was granted at
the answer, or for a renewal at the call. It is as long as the ttl without the drift that the contract allows.
No renewal and no first release may report a lease as lost while its holder may count on it. No renewal
may succeed after the lease ended for good: by a release, by a loss, or by a later grant to another lease.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from harness.history.calls import Excuses, ResourceCalls, answered_s, greater, over_s
from harness.history.records import Kind, Operation, Outcome
from harness.history.verdict import Invariant, Violation

# The contract takes these from a validity: a share of the ttl, a constant, and a share of the wait.
_DRIFT_RATIO = 0.01
_DRIFT_FIXED_S = 0.002
_WAIT_DRIFT_RATIO = 0.0005
_WAIT_DRIFT_OF_TTL_MAX = 0.5
# Answers carry the validity in whole milliseconds.
_ROUNDING_S = 0.001
# Sums of floating point numbers are inexact.
_INEXACT_S = 1e-6


@dataclass(slots=True)
class Window:
    """An unbroken time in which a holder counts on its lease, from `start_s` up to but without `end_s`.

    Attributes:
        acquire: the Acquire whose answer began it.
        last: the call whose answer set `end_s`, or the call that ended the window.
        called_s: when the first Acquire of this lease was called.
    """

    acquire: Operation
    last: Operation
    called_s: float
    start_s: float
    end_s: float


def windows(calls: Sequence[Operation]) -> list[Window]:
    """Return the windows of one lease; `calls` has its calls in the order of invocation."""
    return _follow(calls)[0]


def judge_leases(resource: ResourceCalls, excuses: Excuses) -> Iterator[Violation]:
    """Yield what breaks L or D in the calls for one resource."""
    every: list[Window] = []
    for calls in resource.leases.values():
        found, lost = _follow(calls)
        every += found
        for window, call in lost:
            if not excuses.early_end(window.called_s, answered_s(call)):
                left_ms = (window.end_s - answered_s(call)) * 1000
                yield _deadline(
                    f"a lease was reported lost {left_ms:.3f} ms before its end", window.last, call
                )
        yield from _judge_validities(calls)
        yield from _judge_ended(calls)
    yield from _judge_exclusion(every, excuses)
    yield from _judge_superseded(resource)


def _judge_exclusion(every: list[Window], excuses: Excuses) -> Iterator[Violation]:
    latest: Window | None = None
    for window in sorted(every, key=lambda each: each.start_s):
        # The windows of one lease do not overlap. So a window that overlaps the latest is of another lease.
        if latest is not None and window.start_s < latest.end_s:
            # A clock that moved since the earlier request may have made the two leases overlap.
            called_s = min(latest.called_s, window.called_s)
            if not excuses.overlap(called_s, window.start_s):
                both_ms = (min(latest.end_s, window.end_s) - window.start_s) * 1000
                calls = tuple(dict.fromkeys((latest.acquire, latest.last, window.acquire, window.last)))
                yield Violation(
                    Invariant.EXCLUSION,
                    window.acquire.resource,
                    f"two leases were valid for {both_ms:.3f} ms",
                    calls,
                    shown_s=window.start_s,
                )
        if latest is None or window.end_s > latest.end_s:
            latest = window


def _follow(calls: Sequence[Operation]) -> tuple[list[Window], list[tuple[Window, Operation]]]:
    """Return a lease's windows, and each call that reported the lease lost, with the window at that time."""
    found: list[Window] = []
    lost: list[tuple[Window, Operation]] = []
    current: Window | None = None
    released_over_s = -inf
    called_s = min((call.invoked_s for call in calls if call.kind is Kind.ACQUIRE), default=inf)
    for at_s, _, call in sorted(_events(calls), key=lambda event: event[:2]):
        inside = current if current is not None and at_s < current.end_s else None
        first_release = released_over_s == -inf
        if call.kind is Kind.RELEASE:
            released_over_s = max(released_over_s, over_s(call))
        if call.kind is Kind.RELEASE or call.lost:
            if inside is not None:
                # A call that was sent before the answer to the Acquire may have been judged before the grant.
                in_time = call.lost and call.invoked_s > inside.start_s and answered_s(call) < inside.end_s
                if in_time and (call.kind is Kind.RENEW or first_release):
                    lost.append((replace(inside), call))
                inside.end_s, inside.last = at_s, call
        elif inside is not None:
            if call.until_s > inside.end_s:
                inside.end_s, inside.last = call.until_s, call
        elif call.kind is Kind.ACQUIRE and call.until_s > at_s and released_over_s < call.invoked_s:
            current = Window(call, call, called_s, at_s, call.until_s)
            found.append(current)
    return [window for window in found if window.start_s < window.end_s], lost


def _events(calls: Sequence[Operation]) -> Iterator[tuple[float, int, Operation]]:
    """Yield the instants at which a window may change; at equal instants what ends a window comes first."""
    for call in calls:
        if call.kind is Kind.RELEASE:
            yield call.invoked_s, 0, call
        elif call.lost and call.completed_s is not None:
            yield call.completed_s, 1, call
        elif call.outcome is Outcome.OK:
            yield answered_s(call), 2, call


def _judge_validities(calls: Sequence[Operation]) -> Iterator[Violation]:
    """Yield answers with a validity that is not positive, too long or too short."""
    every_ttl_s = [call.ttl_s for call in calls if call.kind is Kind.ACQUIRE and call.ttl_s > 0]
    for call in calls:
        if call.outcome is not Outcome.OK or call.kind is Kind.RELEASE or call.lost:
            continue
        if call.until_s <= call.invoked_s:
            yield _deadline("the validity is not positive", call)
            continue
        # A renewal uses the ttl of the Acquire that was granted last, and that may be any of them.
        ttls_s = every_ttl_s if call.kind is Kind.RENEW or call.ttl_s <= 0 else [call.ttl_s]
        if not ttls_s:
            continue
        longest_s = max(ttls_s) * (1 - _DRIFT_RATIO) - _DRIFT_FIXED_S
        # A server may grant an Acquire as late as its answer.
        counted_from_s = answered_s(call) if call.kind is Kind.ACQUIRE else call.invoked_s
        late_s = call.until_s - counted_from_s - longest_s
        if late_s > _INEXACT_S:
            yield _deadline(f"the validity ends {late_s * 1000:.3f} ms after the lease can", call)
            continue
        ttl_s = min(ttls_s)
        waited_s = answered_s(call) - call.invoked_s if call.kind is Kind.ACQUIRE else 0.0
        wait_drift_s = min(waited_s * _WAIT_DRIFT_RATIO, ttl_s * _WAIT_DRIFT_OF_TTL_MAX)
        least_s = ttl_s * (1 - _DRIFT_RATIO) - _DRIFT_FIXED_S - wait_drift_s - _ROUNDING_S
        short_s = call.invoked_s + least_s - call.until_s
        if short_s > _INEXACT_S:
            says = f"the validity is {short_s * 1000:.3f} ms too short for a ttl of {ttl_s:g} s"
            yield _deadline(says, call)


def _judge_ended(calls: Sequence[Operation]) -> Iterator[Violation]:
    """Yield renewals that succeeded after a release or a loss; only an Acquire creates the lease again."""
    acquired_over_s = max((over_s(call) for call in calls if call.kind is Kind.ACQUIRE), default=inf)
    endings = [
        call
        for call in calls
        if (call.lost or (call.kind is Kind.RELEASE and call.outcome is Outcome.OK))
        and call.completed_s is not None
        and acquired_over_s < call.invoked_s
    ]
    if not endings:
        return
    ending = min(endings, key=answered_s)
    for call in calls:
        if call.kind is Kind.RENEW and call.outcome is Outcome.OK and call.invoked_s > answered_s(ending):
            yield _deadline("a lease was renewed after its end", ending, call)


def _judge_superseded(resource: ResourceCalls) -> Iterator[Violation]:
    """Yield renewals that succeeded after a later lease was granted.

    The quorums of the later grant and of the renewal share a node, and the earlier hold had ended there.
    """
    grants = resource.grants()
    instants = [answered_s(grant) for grant in grants]
    greatest = list(accumulate(grants, greater))
    for calls in resource.leases.values():
        acquires = [call for call in calls if call.kind is Kind.ACQUIRE]
        for renewal in calls:
            if renewal.kind is not Kind.RENEW or renewal.outcome is not Outcome.OK:
                continue
            before = bisect_left(instants, renewal.invoked_s)
            # The renewed hold may be that of an Acquire whose outcome is unknown.
            if not before or any(not _is_known(acquire, renewal) for acquire in acquires):
                continue
            last = greatest[before - 1]
            if last.lease != renewal.lease:
                yield _deadline("a lease was renewed after a later lease was granted", last, renewal)


def _is_known(acquire: Operation, renewal: Operation) -> bool:
    """Tell whether the outcome of an Acquire was known when a renewal was called."""
    return acquire.outcome is Outcome.FAILED or over_s(acquire) < renewal.invoked_s


def _deadline(says: str, *calls: Operation) -> Violation:
    return Violation(Invariant.DEADLINE, calls[-1].resource, says, calls)
