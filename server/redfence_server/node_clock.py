"""Whether the wall clock of a node steps. Pure: told by samples, without a clock of its own.

Nodes end holds by their wall clock. One that steps forward ends them early, and the node gives the lock to the next while the holder
still counts on its lease. Tokens stay ordered all the same; what is lost is exclusion. So whoever counts votes has to know of a step
before it counts the vote that the step made possible, and for as long as a lease that was granted before the step can live.

**What a sample tells.** The node read its clock at an instant t of ours, between sending and receipt: `sent <= t <= received`. So the
offset of its clock from ours, o(t), lies between `node - received` and `node - sent`. A slow answer makes the bounds wide, never wrong.

**What a clock may do.** Between any two instants it may gain or lose DRIFT_RATIO of the time between and DRIFT_FIXED_MS, which is what leases
allow for (quorum.py), and no more. Put differently: `o(t) - ratio * t` never rises by more than the fixed part, and `o(t) + ratio * t` never
falls by more. So two numbers remember all of the past: the least upper bound of the first that any sample gave, and the greatest lower bound of the
second. A sample whose *lower* bound is above the first has proved a step forward, one whose *upper* bound is below the second a step backward.

Three simpler ways fail. Comparing a sample with the one before lets many steps pass that are each within the allowance of one interval. Comparing
with the first one allows for all the time since, and soon for anything. Comparing the middles of the bounds takes a slow answer for a
step. Here a slow answer proves nothing and replaces nothing, and the allowance is that of the time since the sample which is hardest to explain.

**After a step** the bound that it broke is forgotten, for the clock goes on from where it is; the other one stays true. Of a command's reply only
the receipt is known. It can prove a step forward but gives no new bound, so until the next full sample a second step would not be seen. What that sample finds is
therefore taken for a second step: the distrust counts from it (test_a_step_hidden_behind_another_is_distrusted_as_well).

**Sleep.** Our clock must be one that goes on while this machine sleeps, or every sleep looks like a step of all nodes. If a hypervisor stops it
together with the machine, it does look so; that errs in the safe direction.

**What is not seen:** a step smaller than what the two round trips leave unsure and drift may explain; a step that is taken back before the next
sample; and a step before the first sample, so take one before the node's first vote is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from redfence_server.quorum import DRIFT_FIXED_MS, DRIFT_RATIO

# Nodes tell the time in whole µs (Valkey looks at it once in a ms and counts on in between, which is for the fixed part to bear), and our sums of instants since 1970 are good to a fraction of that.
_ROUNDING_MS: Final = 0.01
_ALLOWED_MS: Final = DRIFT_FIXED_MS + _ROUNDING_MS


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is certain.

    Attributes:
        by_ms: forward if above 0, else backward. At least by so much: neither what drift may explain nor what the round trip leaves
            unsure is counted.
    """

    by_ms: float


class NodeClock:
    """The wall clock of one node, as this server sees it: over all connections to the node, and through its restarts.

    Samples are given in the order in which the node took them; on one connection that is the order of the replies. All instants are
    in ms of this server's steady clock, but for `node_ms`, which is in ms of the node's: pass its TIME with all its digits.
    """

    __slots__ = (
        "_distrust_ms",
        "_distrusted_until_ms",
        "_hidden",
        "_lower_ms",
        "_upper_ms",
        "offset_ms",
        "steps",
    )

    def __init__(self, *, distrust_ms: float) -> None:
        """Begin without a sample, and trusting.

        Args:
            distrust_ms: for how long after a step the node's votes do not count: the greatest ttl of the cluster and its drift. Less: a
                lease that the step ended early may still be counted on when the node votes again.
        """
        assert distrust_ms > 0, distrust_ms
        self._distrust_ms = distrust_ms
        self._distrusted_until_ms = -math.inf
        self._upper_ms = math.inf  # least upper bound of o(t) - ratio * t
        self._lower_ms = -math.inf  # greatest lower bound of o(t) + ratio * t
        self._hidden = False  # a step was seen, and no full sample since
        self.offset_ms: float | None = None
        """By how much the node's clock is ahead of this server's steady clock, as near as is known; None without a sample."""
        self.steps = 0
        """How many steps were seen."""

    def note(self, *, sent_ms: float, received_ms: float, node_ms: float) -> Step | None:
        """Judge a full sample, and judge later ones by it.

        Args:
            sent_ms: no later than the sending of the request.
            received_ms: no earlier than the receipt of the answer.
            node_ms: what the node's clock showed in between.
        """
        assert sent_ms <= received_ms, (sent_ms, received_ms)
        step = self._forward(received_ms, node_ms) or self._backward(sent_ms, node_ms)
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
        """Judge a sample of which only the receipt is known. It can prove a step forward alone, and later ones are not judged by it."""
        step = self._forward(received_ms, node_ms)
        if step is not None:
            self._stepped(step, received_ms)
            self._hidden = True
        return step

    def trusted(self, now_ms: float) -> bool:
        """Tell whether the node's votes count."""
        return now_ms >= self._distrusted_until_ms

    def distrusted_for_ms(self, now_ms: float) -> float:
        """Return for how long its votes do not count from now on; 0 if they do."""
        return max(0.0, self._distrusted_until_ms - now_ms)

    def distrust_until(self, until_ms: float) -> None:
        """Let its votes not count before that instant, whatever was told earlier: it is never brought forward."""
        self._distrusted_until_ms = max(self._distrusted_until_ms, until_ms)

    def _forward(self, received_ms: float, node_ms: float) -> Step | None:
        by_ms = node_ms - received_ms - DRIFT_RATIO * received_ms - self._upper_ms - _ALLOWED_MS
        return Step(by_ms) if by_ms > 0 else None

    def _backward(self, sent_ms: float, node_ms: float) -> Step | None:
        by_ms = node_ms - sent_ms + DRIFT_RATIO * sent_ms - self._lower_ms + _ALLOWED_MS
        return Step(by_ms) if by_ms < 0 else None

    def _stepped(self, step: Step, now_ms: float) -> None:
        """Distrust the node, and forget the bound that its clock has broken."""
        self.steps += 1
        self.distrust_until(now_ms + self._distrust_ms)
        if step.by_ms > 0:
            self._upper_ms = math.inf
        else:
            self._lower_ms = -math.inf

    def _estimate_ms(self, sent_ms: float, received_ms: float, node_ms: float) -> float:
        """Return the middle of what is possible: by this sample and, should it be a slow one, by those before."""
        upper_ms = min(node_ms - sent_ms, self._upper_ms + DRIFT_RATIO * received_ms + _ALLOWED_MS)
        lower_ms = max(node_ms - received_ms, self._lower_ms - DRIFT_RATIO * received_ms - _ALLOWED_MS)
        return (upper_ms + lower_ms) / 2
