"""Who waits for a resource at this server, in which order, and when the first of them tries.

First come, first granted: only the head of a queue ever tries, so a lock that becomes free costs one mint and not a herd of them, and
waiting costs memory alone. The head tries

- when it comes to be the head and nothing is known of a hold, or the head before it left in the middle of a try;
- when notices say that the hold has ended: the node publishes them in the step that ends it, to those servers that were
  refused by that very hold, so a server that does not wait for the resource hears nothing of it;
- when the time of the hold is up, as the node told it with the refusal. This bounds what a lost notice costs;
- without trying: when the holder's release comes to this server, it is sent as a hand-over (redlock.py) that mints for the head.

Others do it otherwise. Polling costs each waiter half a period and the nodes a mint per waiter and period. A queue kept in the
nodes is stalled by a waiter that died in it until somebody cleans it up; here a waiter is a place in this process, which exists as long
as its call and not longer. The price is that the order holds within one server; how servers share a lock is in hand_over_run.py.

One case is not for the head to decide: a waiter whose own lease holds the lock. Its Acquire was granted before and is repeated, because
the answer was lost. It tries at once, wherever it stands, or everybody would wait for it to expire. What is known of the holder may be out
of date, so soon after an arrival the head tries in any case, unless the lock was granted here meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Final

from redfence_server.backoff import pauses
from redfence_server.clock import Clock
from redfence_server.errors import DrainingError, RedfenceServerError, TooManyWaitersError
from redfence_server.hand_over_run import HandOverRun
from redfence_server.hold_watch import HoldWatch
from redfence_server.lock_node import News, Notice
from redfence_server.model import AcquireCall, CurrentHold
from redfence_server.quorum import Failure, Refusal
from redfence_server.randomness import Randomness
from redfence_server.redlock import Attempt, AttemptGranted
from redfence_server.waiting_room import WaitingRoom

# How long after its end an expired hold is tried. The nodes end it some milliseconds apart, and a try in between that a silent node
# has to decide costs a node timeout. Servers that wait for the same end part, or each would take a part of the nodes.
_AFTER_END_MS: Final = (20.0, 40.0)
# How soon after an arrival the holder is looked at. Lower: arrivals cost more mints, one for this time at most.
_LOOK_MS: Final = 100.0
# A view shows so many of the waiters; each takes up to 300 bytes of a message of 64 KiB.
_SHOWN_MAX: Final = 100


class Turn(Enum):
    """What a waiter is to do."""

    TRY = auto()
    """Attempt it, and tell the queue what came of it."""
    GIVE_UP = auto()
    """The wait is over."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """Who waits for a resource, the head first: label, and how long already in ms. Cut at 100; `count` is not."""

    count: int
    first: tuple[tuple[str, float], ...]
    position: int


class Waiter:
    """An Acquire in a queue."""

    __slots__ = ("asked", "call", "counted", "future", "give_up_at_ms", "is_again", "pauses", "twin")

    def __init__(self, call: AcquireCall) -> None:
        self.call = call
        self.counted = False  # has a place in the waiting room
        self.asked = False  # its last mint asked for a notice of the end of the hold, if it was granted
        self.is_again = False  # its own lease was seen to hold the lock
        self.future: asyncio.Future[Turn | Attempt] | None = (
            None  # tells it what to do, while it waits for that
        )
        self.give_up_at_ms = math.inf
        self.pauses: Iterator[float] | None = None
        self.twin: Waiter | None = (
            None  # the one before it with the same lease id: the same Acquire, repeated
        )

    @property
    def digest(self) -> str:
        """Of its lease id."""
        return self.call.lease_id.digest

    @property
    def idle(self) -> bool:
        """Tell whether it waits to be told something."""
        return self.future is not None and not self.future.done()

    def tell(self, turn: Turn | Attempt) -> None:
        """Tell it what to do, unless it was told something already."""
        if self.future is not None and not self.future.done():
            self.future.set_result(turn)

    def fail(self, error: RedfenceServerError) -> None:
        """End its wait with an error, unless it was told something already."""
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)


class WaitQueue:
    """The waiters of one resource.

    Args:
        at_rest: is told when nobody waits and nothing is left to be remembered.
    """

    def __init__(
        self,
        *,
        node_count: int,
        room: WaitingRoom,
        clock: Clock,
        randomness: Randomness,
        at_rest: Callable[[], object],
    ) -> None:
        self._room = room
        self._clock = clock
        self._randomness = randomness
        self._at_rest = at_rest
        # In order of arrival. A dict, because any of them may leave at any time.
        self._waiters: dict[Waiter, None] = {}
        self._by_digest: dict[str, Waiter] = {}
        self._watch = HoldWatch(node_count)
        self._run = HandOverRun(randomness)
        self._ready = True  # a try is worth its while
        self._trying: Waiter | None = None
        self._handing = False  # it goes on with an attempt that a hand-over has begun
        # When the head tries without being told to: after a pause, or at the end of the hold; sooner if there is a reason to look.
        self._paused_until_ms: float | None = None
        self._after_end_ms = 0.0
        self._look_at_ms = math.inf
        self._timer: asyncio.TimerHandle | None = None

    # --- coming and going -----------------------------------------------------------------------------------------

    def enter(self, waiter: Waiter) -> None:
        """Take the last place."""
        with suppress(TooManyWaitersError):
            # Taken now, or those who come while it is tried would take it. Without one it may still be granted at once.
            self._room.enter(waiter.call)
            waiter.counted = True
        self._waiters[waiter] = None
        waiter.twin = self._by_digest.get(waiter.digest)
        self._by_digest[waiter.digest] = waiter
        waiter.is_again = self._watch.digest == waiter.digest
        self._look_soon()

    def leave(self, waiter: Waiter) -> None:
        """Give the place up."""
        del self._waiters[waiter]
        if waiter.counted:
            self._room.leave(waiter.call)
        self._forget_twin(waiter)
        if self._trying is waiter:
            # It left in the middle: what it minted is being undone, ahead of whatever is sent now.
            self._end_try(waiter)
            self._ready = True
        self._wake_head()
        if not self._waiters:
            self._rest()

    def position(self, waiter: Waiter) -> int:
        """Return the place of a waiter; 1 is the head's."""
        return next(place for place, each in enumerate(self._waiters, 1) if each is waiter)

    def view(self, digest: str) -> QueueView:
        """Show who waits, and the place of the waiter whose lease id has this digest; 0 if there is none."""
        now_ms = self._clock.now_ms()
        first = islice(self._waiters, _SHOWN_MAX)
        oldest = next(reversed(list(self._twins(digest))), None)
        return QueueView(
            len(self._waiters),
            tuple((each.call.holder, now_ms - each.call.arrived_at_ms) for each in first),
            0 if oldest is None else self.position(oldest),
        )

    def current(self) -> CurrentHold | None:
        """Return the holder, as last seen."""
        return self._watch.current(self._clock.now_ms())

    def fail(self, error: Callable[[], RedfenceServerError]) -> None:
        """End every wait with an error."""
        for waiter in self._waiters:
            waiter.fail(error())

    async def turn(self, waiter: Waiter, give_up_at_ms: float) -> Turn | Attempt:
        """Return what a waiter is to do, once it is time: try, go on with an attempt that a hand-over has begun, or give up.

        Raises:
            TooManyWaitersError: it would have to wait, and too many do.
            RedfenceServerError: what was told to everybody who waits.

        Cancellation: an attempt that was begun for it is given up.
        """
        if self._begin_try(waiter):
            return Turn.TRY
        delay_s = (give_up_at_ms - self._clock.now_ms()) / 1000
        if self._room.closed:
            raise DrainingError
        if delay_s <= 0:
            return Turn.GIVE_UP
        if not waiter.counted:
            self._room.enter(waiter.call)
            waiter.counted = True
        waiter.give_up_at_ms = give_up_at_ms
        loop = asyncio.get_running_loop()
        future = waiter.future = loop.create_future()
        timer = loop.call_later(delay_s, waiter.tell, Turn.GIVE_UP)
        try:
            turn: Turn | Attempt = await future
            if (quiet_ms := self._room.stall_watch.quiet_ms()) > 0:
                await asyncio.sleep(quiet_ms / 1000)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                told = future.result()
                if isinstance(told, Attempt):
                    told.give_up()
            raise
        finally:
            timer.cancel()
            waiter.future = None
        return turn

    # --- trying ---------------------------------------------------------------------------------------------------

    def _begin_try(self, waiter: Waiter) -> bool:
        """Tell whether this waiter may try now; if so it has to tell what came of it."""
        if waiter.is_again:
            waiter.is_again = False
            return True
        if not self._ready or self._trying is not None or next(iter(self._waiters)) is not waiter:
            return False
        self._begin(waiter)
        return True

    def wants_notice(self, waiter: Waiter) -> bool:
        """Tell whether the mint that is sent now is to ask for a notice of the end of its hold: others wait."""
        waiter.asked = len(self._waiters) > 1
        return waiter.asked

    def granted(self, waiter: Waiter, grant: AttemptGranted) -> None:
        """Note a grant: the next one waits for its end."""
        in_turn = self._trying is waiter
        if in_turn:
            self._run.granted(grant, handed_over=self._handing, now_ms=self._clock.now_ms())
        self._end_try(waiter)
        call = waiter.call
        self._watch.granted(
            digest=waiter.digest,
            holder=call.holder,
            token=grant.token,
            ends_at_ms=grant.minted_at_ms + call.ttl_ms,
        )
        self._look_at_ms = math.inf
        self._await_end()
        self._see_again(waiter)
        if not (in_turn and waiter.asked):
            # Nobody asked for a notice: the next one does, by being refused.
            self._make_ready()

    def refused(self, waiter: Waiter, refusal: Refusal) -> None:
        """Note a refusal: wait for the end of what is in the way."""
        self._end_try(waiter)
        self._watch.refused(refusal, self._clock.now_ms())
        if refusal.failure is Failure.SPLIT or self._watch.may_be_free:
            self._pause(self._pause_ms(waiter))
        else:
            waiter.pauses = None
            self._await_end()
        self._see_again(waiter)

    def renewed(self, digest: str, ends_at_ms: float) -> None:
        """Note that a lease was renewed: if it is the one that holds the lock, its end is later."""
        self._watch.renewed(digest, ends_at_ms)

    def failed(self, waiter: Waiter) -> None:
        """Note that nothing was learnt."""
        self._end_try(waiter)
        self._pause(self._pause_ms(waiter))

    def noticed(self, notice: Notice) -> None:
        """Note the news of a node's hold. In the middle of a try it is only kept in mind."""
        if notice.news is News.SOONER:
            self._look_soon()
            return
        if notice.news is News.YIELDED:
            self._run.expect_rival(self._clock.now_ms())
        self._watch.ended(notice)
        if self._trying is None and self._watch.may_be_free:
            self._make_ready()
        else:
            # The other nodes may have told others, or nobody: their lists need not be the same.
            self._look_soon()

    def recheck(self) -> None:
        """Look at the clock again: the machine has slept, and timers with it."""
        now_ms = self._clock.now_ms()
        for waiter in self._waiters:
            if waiter.give_up_at_ms <= now_ms:
                waiter.tell(Turn.GIVE_UP)
        if self._timer is not None:
            self._set_timer()

    # --- handing over ---------------------------------------------------------------------------------------------

    def successor(self, digest: str) -> Waiter | None:
        """Return to whom to hand over when the lease with this digest is released; None: release it openly.

        Only the lease that is known to hold the lock: a release of any other would give the head a try for nothing.
        """
        head = next(iter(self._waiters), None)
        if head is None or not head.idle or self._trying is not None or self._watch.digest != digest:
            return None
        if self._run.is_over or self._room.stall_watch.quiet_ms() > 0 or head.digest == digest:
            return None
        return head

    def hand_over(self, waiter: Waiter, attempt: Attempt) -> None:
        """Give the successor the attempt that was begun for it."""
        self._begin(waiter)
        self._handing = True
        waiter.tell(attempt)

    def yields(self, digest: str) -> bool:
        """Tell whether the release of this lease is to leave the lock to other servers; if so, hold back for a moment."""
        if not self._run.is_over or self._watch.digest != digest or self._trying is not None:
            return False
        self._pause(self._run.end())
        return True

    # --- inside ---------------------------------------------------------------------------------------------------

    def _begin(self, waiter: Waiter) -> None:
        """Let the head try; what is heard from now on is for afterwards."""
        self._ready = False
        self._trying = waiter
        self._look_at_ms = math.inf
        self._stop_timer()

    def _end_try(self, waiter: Waiter) -> None:
        if self._trying is waiter:
            self._trying = None
            self._handing = False

    def _pause_ms(self, waiter: Waiter) -> float:
        """Return for how long it lets rivals pass that have split the nodes with it, longer every time."""
        if waiter.pauses is None:
            waiter.pauses = pauses(self._randomness)
        return next(waiter.pauses)

    def _see_again(self, waiter: Waiter) -> None:
        """Let those try whose own lease holds the lock."""
        for again in self._twins(self._watch.digest):
            if again is waiter or again is self._trying:
                continue
            if again.idle:
                again.tell(Turn.TRY)
            else:
                again.is_again = True

    def _twins(self, digest: str) -> Iterator[Waiter]:
        """Yield the waiters with this lease id, the last one first."""
        each = self._by_digest.get(digest)
        while each is not None:
            yield each
            each = each.twin

    def _forget_twin(self, waiter: Waiter) -> None:
        later = next((each for each in self._twins(waiter.digest) if each.twin is waiter), None)
        if later is not None:
            later.twin = waiter.twin
        elif waiter.twin is not None:
            self._by_digest[waiter.digest] = waiter.twin
        else:
            del self._by_digest[waiter.digest]

    def _make_ready(self) -> None:
        self._ready = True
        self._wake_head()

    def _wake_head(self) -> None:
        head = next(iter(self._waiters), None)
        if head is not None and head.idle and self._begin_try(head):
            head.tell(Turn.TRY)

    def _await_end(self) -> None:
        """Have the head try when the time of the hold is up."""
        self._paused_until_ms = None
        self._after_end_ms = self._randomness.uniform(*_AFTER_END_MS)
        self._set_timer()

    def _pause(self, pause_ms: float) -> None:
        """Have the head try after a pause, whatever is known of the hold."""
        self._paused_until_ms = self._clock.now_ms() + pause_ms
        self._set_timer()

    def _look_soon(self) -> None:
        """Have the head try soon in any case. While it tries, that is for afterwards, unless it is granted."""
        self._look_at_ms = min(self._look_at_ms, self._clock.now_ms() + _LOOK_MS)
        if self._timer is not None:
            self._set_timer()

    @property
    def _wake_at_ms(self) -> float:
        end_ms = self._watch.try_at_ms + self._after_end_ms
        return min(end_ms if self._paused_until_ms is None else self._paused_until_ms, self._look_at_ms)

    def _set_timer(self) -> None:
        self._stop_timer()
        delay_ms = max(0.0, self._wake_at_ms - self._clock.now_ms())
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._ring)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self._wake_at_ms > self._clock.now_ms():
            self._set_timer()  # the hold was renewed
        elif self._waiters:
            self._make_ready()
        else:
            self._at_rest()

    def _rest(self) -> None:
        """Go, now that nobody waits; but while a run of hand-overs is counted, only with the lease that was granted last."""
        if self._run.under_way and self._timer is not None:
            return
        self._stop_timer()
        self._at_rest()
