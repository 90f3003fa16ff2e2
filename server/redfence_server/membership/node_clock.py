"""Decide whether the wall clock of a node stepped, from samples. Pure.

Nodes end holds by their wall clock. If it steps forward, the node ends holds early and gives the lock to the
next lease while the holder still counts on its own. Tokens stay ordered; exclusion is lost. So a server must
know of a step before it counts the vote that the step made possible, and while an earlier lease can live.

**What a sample tells.** The node read its clock between sending and receipt. So o(t), the offset of its clock
from the server's, lies between `node - received` and `node - sent`. Slow answers widen these bounds.

**What a clock may do.** It may gain or lose DRIFT_RATIO of the time and DRIFT_FIXED_MS, as leases allow for
(locking/quorum.py). So `o(t) - ratio * t` never rises, and `o(t) + ratio * t` never falls, by more than the
fixed part. Two numbers remember all of the past: the least upper bound of the first and the greatest lower
bound of the second. A sample whose *lower* bound is above the first proves a step forward. One whose *upper*
bound is below the second proves a step backward. The last sample alone would let many small steps pass.

**After a step** the server forgets the bound that it broke; the other one stays true. A command's reply shows
only its receipt: it can prove a step forward, but gives no new bound. So the server treats a step in the
next full sample as a second one (test_a_step_hidden_behind_another_is_distrusted_as_well).

**Not seen** are a step smaller than drift and round trips may explain, one that is taken back before the next
sample, and one before the first. The server's clock must go on while its machine sleeps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from redfence_server.locking.quorum import DRIFT_FIXED_MS, DRIFT_RATIO

# Nodes tell the time in whole µs, and sums of instants since 1970 are good to a fraction of that.
_ROUNDING_MS: Final = 0.01
_ALLOWED_MS: Final = DRIFT_FIXED_MS + _ROUNDING_MS


@dataclass(frozen=True, slots=True)
class Step:
    """A certain step: forward if `by_ms` is above 0, else backward.

    The clock moved by at least so much, after drift and the uncertainty of the round trip.

    Attributes:
        at_ms: the instant of this server's clock that `offset_ms` refers to.
        offset_ms: the bound of the present offset that proves the step: a lower bound if it was forward.
    """

    by_ms: float
    at_ms: float
    offset_ms: float


class NodeClock:
    """Tracks the wall clock of one node, over all connections to the node and through its restarts.

    Give samples in the order in which the node took them; on one connection that is the order of the replies.
    Instants are in ms of this server's steady clock. Only `node_ms` is the node's TIME, with all its digits.
    """

    def __init__(self, *, distrust_ms: float) -> None:
        """Begin without a sample, and trusting.

        For `distrust_ms` after a step the node's votes do not count: the greatest ttl of the cluster and its
        drift. With less, the node might vote while a holder still counts on a lease that the step ended.
        """
        assert distrust_ms > 0, distrust_ms
        self._distrust_ms = distrust_ms
        self._distrusted_until_ms = -math.inf
        self._upper_ms = math.inf  # least upper bound of o(t) - ratio * t
        self._lower_ms = -math.inf  # greatest lower bound of o(t) + ratio * t
        self._hidden = False  # a step was seen, and no full sample since
        self.offset_ms: float | None = None
        """How far the node's clock is ahead of this server's steady clock, about; None without a sample."""
        self.steps = 0
        """The number of steps that were seen."""
        self.offset_bounds_ms = (-math.inf, math.inf)
        """The bounds of the offset at the last full sample."""

    def note(self, *, sent_ms: float, received_ms: float, node_ms: float) -> Step | None:
        """Judge a full sample, and judge later ones by it.

        The request left at `sent_ms` or later, the answer came at `received_ms` or earlier, and the node's
        clock showed `node_ms` in between.
        """
        assert sent_ms <= received_ms, (sent_ms, received_ms)
        step = self._forward(received_ms, node_ms) or self._backward(sent_ms, node_ms)
        self.offset_bounds_ms = (node_ms - received_ms, node_ms - sent_ms)
        if step is not None:
            self._stepped(step, received_ms)
        elif self._hidden:
            self.distrust_until(received_ms + self._distrust_ms)
        self._hidden = False
        self._upper_ms = min(self._upper_ms, node_ms - sent_ms - DRIFT_RATIO * sent_ms)
        self._lower_ms = max(self._lower_ms, node_ms - received_ms + DRIFT_RATIO * received_ms)
        self.offset_ms = self._estimate_ms(sent_ms, received_ms, node_ms)
        return step

    def check(self, *, received_ms: float, node_ms: float) -> Step | None:
        """Judge a sample without its sending time, and distrust the node if it proves a step forward."""
        step = self._forward(received_ms, node_ms)
        if step is not None:
            self._stepped(step, received_ms)
            self._hidden = True
        return step

    def trusted(self, now_ms: float) -> bool:
        """Tell whether the node's votes count."""
        return now_ms >= self._distrusted_until_ms

    def distrusted_for_ms(self, now_ms: float) -> float:
        """Return the time until its votes count; 0 if they do now."""
        return max(0.0, self._distrusted_until_ms - now_ms)

    def distrust_until(self, until_ms: float) -> None:
        """Ignore its votes until that instant, or until a later one that an earlier call set."""
        self._distrusted_until_ms = max(self._distrusted_until_ms, until_ms)

    def _forward(self, received_ms: float, node_ms: float) -> Step | None:
        by_ms = node_ms - received_ms - DRIFT_RATIO * received_ms - self._upper_ms - _ALLOWED_MS
        return Step(by_ms, received_ms, node_ms - received_ms) if by_ms > 0 else None

    def _backward(self, sent_ms: float, node_ms: float) -> Step | None:
        by_ms = node_ms - sent_ms + DRIFT_RATIO * sent_ms - self._lower_ms + _ALLOWED_MS
        return Step(by_ms, sent_ms, node_ms - sent_ms) if by_ms < 0 else None

    def _stepped(self, step: Step, now_ms: float) -> None:
        """Distrust the node, and forget the bound that its clock has broken."""
        self.steps += 1
        self.distrust_until(now_ms + self._distrust_ms)
        if step.by_ms > 0:
            self._upper_ms = math.inf
        else:
            self._lower_ms = -math.inf

    def _estimate_ms(self, sent_ms: float, received_ms: float, node_ms: float) -> float:
        """Return the middle of the possible offsets, by this sample and those before it."""
        upper_ms = min(node_ms - sent_ms, self._upper_ms + DRIFT_RATIO * received_ms + _ALLOWED_MS)
        lower_ms = max(node_ms - received_ms, self._lower_ms - DRIFT_RATIO * received_ms - _ALLOWED_MS)
        return (upper_ms + lower_ms) / 2


# If the server's own clock runs a little wrong, all nodes seem to step, one after the other. Steps within
# this time may have that one cause.
_TOGETHER_MS: Final = 10_000


class _Sample(NamedTuple):
    """The times of a full sample's request and answer, and the bounds of the offset."""

    sent_ms: float
    received_ms: float
    lower_ms: float
    upper_ms: float


@dataclass(slots=True)
class _Suspicion:
    """A step that may be the node's own.

    Attributes:
        by_ms: it moved the clock by at least so much after `since_ms`; below 0 if backward.
        since_ms: it happened after this instant.
        seen_at_ms: it had happened by this instant.
        asked: the nodes whose clocks were compared with it.
        contradicted_by: those whose clocks contradict it.
    """

    by_ms: float
    since_ms: float
    seen_at_ms: float
    asked: set[int] = field(default_factory=set)
    contradicted_by: set[int] = field(default_factory=set)


def _suspicion(step: Step, samples: Sequence[_Sample], seen_at_ms: float) -> _Suspicion:
    """Return how far the clock moved since the last sample that proves the step."""
    direction = math.copysign(1.0, step.by_ms)
    for sample in reversed(samples):
        moved_ms = step.offset_ms - (sample.upper_ms if direction > 0 else sample.lower_ms)
        hidden_ms = DRIFT_RATIO * abs(step.at_ms - sample.sent_ms) + _ALLOWED_MS
        if direction * moved_ms > hidden_ms:
            return _Suspicion(moved_ms - direction * hidden_ms, sample.sent_ms, seen_at_ms)
    return _Suspicion(step.by_ms, -math.inf, seen_at_ms)


# The server keeps so many full samples of each node; the next one shows a step.
_SAMPLES_MAX: Final = 100


class ClockWitnesses:
    """Decides whether the node's clock or the server's own clock caused a step that this server sees.

    A server compares each node's clock with its own. If its own clock stands still or runs wrong, all nodes
    seem to step, one after the other as they are sampled. So every step costs the node its votes at this
    server. But other servers hear only of a step that other nodes' clocks contradict: as many as may fail, f,
    and at least one.

    The step happened after the last sample of the node that shows less: a slow answer may have hidden it. A
    clock contradicts the step by its first full sample that was requested after the step was seen. Against
    its last sample from before the step, it must have moved less far, whatever drift may hide.
    """

    def __init__(self, node_count: int) -> None:
        self._needed = max(1, (node_count - 1) // 2)
        self._samples = tuple(deque[_Sample](maxlen=_SAMPLES_MAX) for _ in range(node_count))
        self._suspicions: dict[int, _Suspicion] = {}
        self.on_step: Callable[[], None] = lambda: None
        """Called when a node seems to have stepped, so that the server samples the other clocks now."""
        self.on_confirmed: Callable[[int], None] = lambda _: None
        """Called with the index of a node whose step `confirm` would confirm now."""

    def note_step(self, index: int, step: Step, *, seen_at_ms: float) -> None:
        """Record a step of one node's clock in place of an earlier one; call it before `note_sample`."""
        self._suspicions[index] = _suspicion(step, self._samples[index], seen_at_ms)
        self.on_step()

    def note_sample(self, index: int, clock: NodeClock, *, sent_ms: float, received_ms: float) -> None:
        """Record a full sample of one node's clock, after `NodeClock.note`.

        A sample sent at the very instant of the step counts as earlier: the server's clock may stand still.
        """
        self._samples[index].append(_Sample(sent_ms, received_ms, *clock.offset_bounds_ms))
        for other, suspicion in self._suspicions.items():
            if other == index or sent_ms <= suspicion.seen_at_ms or index in suspicion.asked:
                continue
            suspicion.asked.add(index)
            if self._moved_ms_max(index, suspicion) < abs(suspicion.by_ms):
                suspicion.contradicted_by.add(index)
                if len(suspicion.contradicted_by) == self._needed:
                    self.on_confirmed(other)

    def _moved_ms_max(self, index: int, suspicion: _Suspicion) -> float:
        """Return how far a clock moved at most in the direction of a step, since its possible beginning."""
        # Strictly before: while the server's clock stands still, everything happens at one instant.
        earlier = (each for each in reversed(self._samples[index]) if each.received_ms < suspicion.since_ms)
        before, now = next(earlier, None), self._samples[index][-1]
        if before is None:
            return math.inf
        moved_ms = now.upper_ms - before.lower_ms if suspicion.by_ms > 0 else before.upper_ms - now.lower_ms
        return moved_ms + DRIFT_RATIO * (now.received_ms - before.received_ms) + DRIFT_FIXED_MS

    def confirm(self, index: int) -> bool:
        """Tell, once for each step, whether enough other clocks contradict the last step of a node."""
        suspicion = self._suspicions.get(index)
        if suspicion is None or len(suspicion.contradicted_by) < self._needed:
            return False
        del self._suspicions[index]
        return True

    def stepped_together(self, *, now_ms: float) -> int:
        """Count the nodes that seem to have stepped lately; if many, this server's clock may be the cause."""
        return sum(now_ms - each.seen_at_ms < _TOGETHER_MS for each in self._suspicions.values())
