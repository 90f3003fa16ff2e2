"""Decide when the head of a queue tries. Pure: events and the present instant in, the next try's instant out.

The head tries at `due_at_ms`: when an event calls for a try, or at the end of the known hold, but never while
this server holds back for another server. `NEXT_TRY` says what the end of a try calls for. Other events are:

- an arrival: try within 100 ms, in case this server's knowledge of the hold is out of date;
- a notice, but not of a try's undo: try at once if a quorum of nodes may be free, otherwise within 100 ms;
- a renewal through this server: the hold ends later;
- a release through this server: the lock is handed over without a try. After `HAND_OVERS_MAX` in a row while
  another server waits, the release is open instead, and the head holds back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from redfence_server.locking.attempt import AttemptGranted
from redfence_server.locking.node import Notice
from redfence_server.locking.tally import Failure, Refusal
from redfence_server.randomness import Randomness
from redfence_server.waiting.hold_watch import HoldWatch
from redfence_server.waiting.line import Waiter

HAND_OVERS_MAX: Final = 16
"""How many handovers a server makes in a row while another server waits. Higher: the lock changes servers
less often, which costs some round trips each time. Lower: the other server waits less."""

# How long a server then holds back: a fixed part for the event loop of the other server, and measured round
# trips for a notice and a mint. With the fixed part alone, servers far from their nodes would never win.
_HOLD_BACK_MS: Final = (8.0, 12.0)
_HOLD_BACK_ROUND_TRIPS: Final = 3
# How long after the end of a hold the head tries. Nodes end a hold some milliseconds apart; a try in between
# costs a node timeout if a silent node has to decide it. The spread keeps waiting servers apart.
_AFTER_END_MS: Final = (20.0, 40.0)
# How soon after an arrival the head tries. Lower: arrivals cost more mints, up to one in this time.
_RECHECK_MS: Final = 100.0


class TryEnd(Enum):
    """How a try ended."""

    GRANTED = auto()
    HELD = auto()
    """Another lease holds the lock."""
    SPLIT = auto()
    """No lease has a quorum, because several tried at once."""
    FAILED = auto()
    """The try was too late or reached no quorum, and showed nothing about the lock."""
    LEFT = auto()
    """The waiter left during the try."""


class NextTry(Enum):
    """When the head tries next."""

    AT_ONCE = auto()
    AT_END = auto()
    """When the hold ends; at once if no notice of its end will come."""
    AFTER_PAUSE = auto()
    """After the waiter's next, longer pause, so that other servers come first."""


NEXT_TRY: Final[Mapping[TryEnd, NextTry]] = MappingProxyType(
    {
        TryEnd.GRANTED: NextTry.AT_END,
        TryEnd.HELD: NextTry.AT_END,
        TryEnd.SPLIT: NextTry.AFTER_PAUSE,
        TryEnd.FAILED: NextTry.AFTER_PAUSE,
        TryEnd.LEFT: NextTry.AT_ONCE,
    }
)


class TrySchedule:
    """Schedules the tries of one queue from what this server knows of the lock.

    At first it knows nothing, and a try is due. At most one try runs at a time.

    Attributes:
        watch: what this server knows of the hold.
        trying: the waiter that is trying; None if there is none.
    """

    def __init__(self, node_count: int, randomness: Randomness) -> None:
        self.watch = HoldWatch(node_count)
        self.trying: Waiter | None = None
        self._randomness = randomness
        self._try_at_ms = -math.inf
        self._not_before_ms = -math.inf
        self._after_end_ms = randomness.uniform(*_AFTER_END_MS)
        self._handing_over = False  # the try is a handover
        self._handovers = 0  # in a row, while another server waited
        self._round_trip_ms = 0.0  # of the last mint that was granted

    @property
    def due_at_ms(self) -> float:
        """When the head tries; no try starts during another one."""
        end_ms = self.watch.try_at_ms + self._after_end_ms
        return max(self._not_before_ms, min(self._try_at_ms, end_ms))

    @property
    def forget_at_ms(self) -> float:
        """When an empty queue may be dropped: it holds back no more, and counts no handovers."""
        counted_until_ms = self.watch.try_at_ms if self._handovers else -math.inf
        return max(self._not_before_ms, counted_until_ms)

    def arrived(self, now_ms: float) -> None:
        """Note that a waiter came."""
        self._try_within(_RECHECK_MS, now_ms)

    def begin(self, waiter: Waiter, *, by_hand_over: bool = False) -> None:
        """Let a waiter try; later events may call for another try after this one."""
        self.trying = waiter
        self._handing_over = by_hand_over
        self._try_at_ms = math.inf

    def granted(self, waiter: Waiter, grant: AttemptGranted, now_ms: float) -> None:
        """Note a grant to the waiter that was trying, or to one that repeated its Acquire."""
        in_turn = self.trying is waiter
        if in_turn:
            self._handovers = self._handovers + 1 if self._handing_over and grant.contended else 0
            self._round_trip_ms = now_ms - grant.minted_at_ms
        self.watch.granted(
            digest=waiter.digest,
            holder=waiter.call.holder,
            token=grant.token,
            ends_at_ms=grant.minted_at_ms + waiter.call.ttl_ms,
            lock_delay_ms=waiter.call.lock_delay_ms,
        )
        # An earlier reason to try does not outlive this grant.
        self._try_at_ms = math.inf
        # If no notice will come, the next waiter tries, and so asks for one. The lease may even have ended
        # already: another server released it, and the notices came with the grant.
        self._end(waiter, TryEnd.GRANTED, now_ms, notice_to_come=in_turn and waiter.asked_for_notice)

    def refused(self, waiter: Waiter, refusal: Refusal, now_ms: float) -> None:
        """End the waiter's try, and schedule the next one by what the refusal shows of the hold."""
        self.watch.refused(refusal, now_ms)
        self._end(waiter, TryEnd.SPLIT if refusal.failure is Failure.SPLIT else TryEnd.HELD, now_ms)

    def failed(self, waiter: Waiter, now_ms: float) -> None:
        """End a try that was too late or reached no quorum; the head pauses before its next try."""
        self._end(waiter, TryEnd.FAILED, now_ms)

    def left(self, waiter: Waiter, now_ms: float) -> None:
        """Note that a waiter left; the undo of its mint is sent before the next mint."""
        if self.trying is waiter:
            self._end(waiter, TryEnd.LEFT, now_ms)

    def noticed(self, notice: Notice, now_ms: float) -> None:
        """Note that a hold has ended on a node."""
        self.watch.ended(notice)
        if self.trying is None and not self.watch.is_news(notice):
            # A try for each such notice would make the waiters poll, if a node has lost the hold.
            return
        # Other nodes may send no notice, because their holds may list other servers.
        is_free = self.trying is None and self.watch.may_be_free
        self._try_within(0 if is_free else _RECHECK_MS, now_ms)

    def may_hand_over(self, digest: str, now_ms: float) -> bool:
        """Tell whether the release of a lease may be a handover, and hold back if too many came in a row.

        Only the known holder's lease counts: the release of another lease would cost the head a useless try.
        """
        if self.trying is not None or self.watch.digest != digest:
            return False
        if self._handovers < HAND_OVERS_MAX:
            return True
        self._handovers = 0
        fixed_ms = self._randomness.uniform(*_HOLD_BACK_MS)
        self._hold_back(fixed_ms + _HOLD_BACK_ROUND_TRIPS * self._round_trip_ms, now_ms)
        return False

    def _end(self, waiter: Waiter, how: TryEnd, now_ms: float, *, notice_to_come: bool = True) -> None:
        if self.trying is waiter:
            self.trying = None
        match NEXT_TRY[how]:
            case NextTry.AFTER_PAUSE:
                self._hold_back(waiter.next_pause_ms(self._randomness), now_ms)
                return
            case NextTry.AT_ONCE:
                self._try_at_ms = -math.inf
            case NextTry.AT_END if self.watch.may_be_free or not notice_to_come:
                self._try_within(0, now_ms)
        waiter.reset_pauses()

    def _try_within(self, delay_ms: float, now_ms: float) -> None:
        """Make the head try after this time at the latest."""
        self._try_at_ms = min(self._try_at_ms, now_ms + delay_ms)

    def _hold_back(self, pause_ms: float, now_ms: float) -> None:
        """Make the head try after a pause, and not before."""
        self._not_before_ms = now_ms + pause_ms
        self._try_within(0, now_ms)
