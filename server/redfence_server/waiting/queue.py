"""When the first waiter for a resource tries to take its lock.

First come, first granted. Only the head of the queue tries, so a lock that becomes free costs one mint and not one from
every waiter, and waiting costs memory alone. The head tries

- when it becomes the head and this server knows of no hold, or the head before it left in the middle of a try;
- when notices tell that the hold has ended. A node publishes a notice in the step that ends a hold, to the servers that
  this very hold refused. A server without waiters for the resource hears nothing;
- when the ttl of the hold is over, as the nodes told it with the refusal. A lost notice delays the head until then;
- 100 ms after a waiter came, in case what this server knows of the holder is out of date.

The head need not try when the holder releases through this server: the release is a hand-over (locking/redlock.py), which mints
for the head in the same step.

One waiter is tried wherever it stands: one whose own lease holds the lock. Its Acquire was granted before, and the caller
repeats it because it lost the answer. In its place in the queue it would wait for the end of its own lease.

The order holds within one server. While another server waits too, a server hands the lock over `HAND_OVERS_MAX` times in a
row at most. Then it releases the lock openly and holds back until the other one has had the time to take it.

Two other designs are worse. Polling costs each waiter half a period, and the nodes one mint for each waiter and period. A
queue in the nodes stops at a waiter that died, until some server removes it. Here a waiter exists exactly as long as its call.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from redfence_server.clock import Clock
from redfence_server.errors import DrainingError, TooManyWaitersError
from redfence_server.locking.attempt import Attempt, AttemptGranted
from redfence_server.locking.node import Held, Notice
from redfence_server.locking.tally import Failure, Refusal
from redfence_server.randomness import Randomness
from redfence_server.waiting.hold_watch import HoldWatch
from redfence_server.waiting.line import Turn, Waiter, WaitingLine
from redfence_server.waiting.waiter_limiter import WaiterLimiter

HAND_OVERS_MAX: Final = 16
"""How often a server hands a lock over in a row while another server waits for it. Higher: fewer changes of the server, each of
which costs some round trips. Lower: the other server waits less."""

# How long a server holds back after that: a fixed part for the event loop of the other server, and round trips as measured
# here for a notice and a mint. With the fixed part alone, servers far from their nodes would always be too late.
_HOLD_BACK_MS: Final = (8.0, 12.0)
_HOLD_BACK_ROUND_TRIPS: Final = 3
# How long after the end of a hold the head tries. The nodes end it some milliseconds apart, and a try in between that a
# silent node has to decide costs a node timeout. The spread keeps servers apart that wait for the same end.
_AFTER_END_MS: Final = (20.0, 40.0)
# How soon after an arrival the head tries. Lower: arrivals cost more mints, at most one in this time.
_LOOK_MS: Final = 100.0


class WaitQueue:
    """The waiters for one resource, and when they try. `at_rest` is called once: the queue is empty and remembers nothing."""

    def __init__(
        self,
        *,
        node_count: int,
        room: WaiterLimiter,
        clock: Clock,
        randomness: Randomness,
        at_rest: Callable[[], object],
    ) -> None:
        self.line = WaitingLine()
        self._room = room
        self._clock = clock
        self._randomness = randomness
        self._at_rest = at_rest
        self._watch = HoldWatch(node_count)
        self._trying: Waiter | None = None
        # When the head tries: at this instant or at the end of the hold, and not before that one.
        self._try_at_ms = -math.inf
        self._not_before_ms = -math.inf
        self._after_end_ms = randomness.uniform(*_AFTER_END_MS)
        self._timer: asyncio.TimerHandle | None = None
        self._handing_over = False  # the try is a hand-over
        self._hand_overs = 0  # in a row, while another server waited
        self._round_trip_ms = 0.0  # of the last mint that was granted

    def enter(self, waiter: Waiter) -> None:
        """Add a waiter at the end."""
        with suppress(TooManyWaitersError):
            # It takes its place before its first try, or later waiters would. Without a place it may still be granted at once.
            self._room.enter(waiter.call)
            waiter.counted = True
        self.line.add(waiter)
        waiter.is_retry = self._watch.digest == waiter.digest
        self._try_within(_LOOK_MS)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter."""
        self.line.remove(waiter)
        if waiter.counted:
            self._room.leave(waiter.call)
        if self._trying is waiter:
            # It left in the middle of its try. The undo of what it minted goes out before the next mint.
            self._end_try(waiter)
            self._try_at_ms = -math.inf
        self._arm()

    def current(self) -> Held | None:
        """Return the hold, as last seen."""
        return self._watch.current(self._clock.now_ms())

    async def turn(self, waiter: Waiter, give_up_at_ms: float) -> Turn | Attempt:
        """Wait until there is something to do for a waiter: try, finish the attempt that a hand-over began, or give up.

        Raises:
            TooManyWaitersError: it would have to wait, and a limit is reached.
            RedfenceServerError: the error with which every wait was ended.

        Cancellation: an attempt that was begun for it is given up.
        """
        now_ms = self._clock.now_ms()
        if waiter.is_retry:
            waiter.is_retry = False
            return Turn.TRY
        if self._trying is None and self.line.head is waiter and self._due_at_ms <= now_ms:
            self._begin(waiter)
            return Turn.TRY
        if self._room.closed:
            raise DrainingError
        if give_up_at_ms <= now_ms:
            return Turn.GIVE_UP
        if not waiter.counted:
            self._room.enter(waiter.call)
            waiter.counted = True
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Turn | Attempt] = loop.create_future()
        waiter.future = future
        timer = loop.call_later((give_up_at_ms - now_ms) / 1000, waiter.tell, Turn.GIVE_UP)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                told = future.result()
                if isinstance(told, Attempt):
                    told.give_up()
            raise
        finally:
            timer.cancel()
            waiter.future = None

    def wants_notice(self, waiter: Waiter) -> bool:
        """Tell whether the next mint is to ask for a notice of the end of its hold, because others wait."""
        waiter.asked = len(self.line) > 1
        return waiter.asked

    def granted(self, waiter: Waiter, grant: AttemptGranted) -> None:
        """Note a grant: the next waiter waits for its end."""
        now_ms = self._clock.now_ms()
        in_turn = self._trying is waiter
        if in_turn:
            self._hand_overs = self._hand_overs + 1 if self._handing_over and grant.contended else 0
            self._round_trip_ms = now_ms - grant.minted_at_ms
        self._end_try(waiter)
        self._watch.granted(
            digest=waiter.digest,
            holder=waiter.call.holder,
            token=grant.token,
            ends_at_ms=grant.minted_at_ms + waiter.call.ttl_ms,
        )
        # Without a notice to come, the next waiter tries and so asks for one. The lease may even have ended already:
        # another server released it, and the notices came together with the grant.
        told_of_end = in_turn and waiter.asked and not self._watch.may_be_free
        self._try_at_ms = math.inf if told_of_end else now_ms
        self._tell_retries()
        self._arm()

    def refused(self, waiter: Waiter, refusal: Refusal) -> None:
        """Note a refusal: the head waits for the end of the hold."""
        self._end_try(waiter)
        self._watch.refused(refusal, self._clock.now_ms())
        self._tell_retries()
        if refusal.failure is Failure.SPLIT:
            self._hold_back(waiter.next_pause_ms(self._randomness))
            return
        waiter.forget_pauses()
        # Notices that came during the try may have told of the end already.
        self._try_within(0 if self._watch.may_be_free else math.inf)

    def failed(self, waiter: Waiter) -> None:
        """Note a try that was too late and told nothing of the lock."""
        self._end_try(waiter)
        self._hold_back(waiter.next_pause_ms(self._randomness))

    def renewed(self, digest: str, ends_at_ms: float) -> None:
        """Note that a lease was renewed. If it holds the lock, its end is later."""
        self._watch.renewed(digest, ends_at_ms)

    def noticed(self, notice: Notice) -> None:
        """Note that a hold has ended on a node."""
        self._watch.ended(notice)
        # The other nodes may tell nothing: they need not have the same list of servers to tell.
        is_free = self._trying is None and self._watch.may_be_free
        self._try_within(0 if is_free else _LOOK_MS)

    def released(self, digest: str) -> Waiter | None:
        """Note that a lease is being released; return the waiter to hand the lock over to. None: release it openly.

        Only the lease that is known to hold the lock counts. The release of another one would cost the head a try for nothing.
        """
        if self._trying is not None or self._watch.digest != digest:
            return None
        if self._hand_overs >= HAND_OVERS_MAX:
            self._hand_overs = 0
            fixed_ms = self._randomness.uniform(*_HOLD_BACK_MS)
            self._hold_back(fixed_ms + _HOLD_BACK_ROUND_TRIPS * self._round_trip_ms)
            return None
        head = self.line.head
        return head if head is not None and head.idle and head.digest != digest else None

    def hand_over(self, waiter: Waiter, attempt: Attempt) -> None:
        """Give the head the attempt that a hand-over began for it."""
        self._begin(waiter)
        self._handing_over = True
        waiter.tell(attempt)

    def _begin(self, waiter: Waiter) -> None:
        """Let the head try. News that comes from now on may call for another try after this one."""
        self._trying = waiter
        self._try_at_ms = math.inf

    def _end_try(self, waiter: Waiter) -> None:
        if self._trying is waiter:
            self._trying = None
            self._handing_over = False

    def _tell_retries(self) -> None:
        """Let the waiters try whose own lease holds the lock."""
        for waiter in self.line.of_lease(self._watch.digest):
            waiter.tell(Turn.TRY)

    def _try_within(self, delay_ms: float) -> None:
        """Have the head try no later than after this time."""
        self._try_at_ms = min(self._try_at_ms, self._clock.now_ms() + delay_ms)
        self._arm()

    def _hold_back(self, pause_ms: float) -> None:
        """Have the head try after a pause, and not before, so that other servers come first."""
        self._not_before_ms = self._clock.now_ms() + pause_ms
        self._try_within(0)

    @property
    def _due_at_ms(self) -> float:
        """When the head tries."""
        end_ms = self._watch.try_at_ms + self._after_end_ms
        return max(self._not_before_ms, min(self._try_at_ms, end_ms))

    def _arm(self) -> None:
        """Let the head try if its try is due; otherwise set the timer, which comes back here."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._trying is not None:
            return
        head = self.line.head
        if head is not None:
            due_at_ms = self._due_at_ms
        else:
            # An empty queue stays while it holds back, and while hand-overs are counted: its waiters may come back.
            counted_until_ms = self._watch.try_at_ms if self._hand_overs else -math.inf
            due_at_ms = max(self._not_before_ms, counted_until_ms)
        delay_ms = due_at_ms - self._clock.now_ms()
        if delay_ms > 0:
            self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._arm)
        elif head is None:
            self._at_rest()
        elif head.idle:
            self._begin(head)
            head.tell(Turn.TRY)
