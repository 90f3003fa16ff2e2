"""Give the waiters for one resource at one server their turns.

First come, first granted. Only the head of the queue tries, so a free lock costs one mint, and a waiter costs
only memory. waiting/schedule.py decides when the head tries. If the holder releases through this server, no
try is needed: the release is a handover (locking/redlock.py), which mints for the head in the same step.

A retry tries at any position: its own lease holds the lock, and the caller lost the answer to the grant. In
its turn it would wait for the end of its own lease.

The order holds within one server. While another server waits too, this server makes a limited number of
handovers in a row. Then it releases the lock openly, and holds back so that the other server can take it.

Two other designs are worse. Polling costs a waiter half a period, and the nodes one mint for each waiter and
period. A queue on the nodes stops at a dead waiter until a server removes it. Here it ends with its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from redfence_server.clock import Clock
from redfence_server.errors import DrainingError
from redfence_server.locking.attempt import Attempt, AttemptGranted
from redfence_server.locking.node import Held, Notice
from redfence_server.locking.tally import Refusal
from redfence_server.randomness import Randomness
from redfence_server.waiting.line import Turn, Waiter, WaitingLine
from redfence_server.waiting.schedule import TrySchedule
from redfence_server.waiting.waiter_limiter import WaiterLimiter


class WaitQueue:
    """Queues the waiters for one resource; calls `on_idle` once it is empty and has nothing to remember."""

    def __init__(
        self,
        *,
        node_count: int,
        limiter: WaiterLimiter,
        clock: Clock,
        randomness: Randomness,
        on_idle: Callable[[], object],
    ) -> None:
        self.line = WaitingLine()
        self._limiter = limiter
        self._clock = clock
        self._on_idle = on_idle
        self._schedule = TrySchedule(node_count, randomness)
        self._timer: asyncio.TimerHandle | None = None

    def begin_with(self, waiter: Waiter) -> None:
        """Add the first waiter, which is trying already."""
        self.line.add(waiter)
        self._schedule.begin(waiter)

    def enter(self, waiter: Waiter) -> None:
        """Add a waiter at the end."""
        self.line.add(waiter)
        waiter.is_retry = self._schedule.watch.digest == waiter.digest
        self._schedule.arrived(self._clock.now_ms())
        self._arm()

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter."""
        self.line.remove(waiter)
        self._schedule.left(waiter, self._clock.now_ms())
        self._arm()

    def current(self) -> Held | None:
        """Return the hold as last seen."""
        return self._schedule.watch.current(self._clock.now_ms())

    def turn(self, waiter: Waiter, give_up_at_ms: float) -> Turn | None:
        """Return a waiter's turn: to try or to give up. None: it comes later, perhaps with a handover.

        Raises:
            DrainingError, TooManyWaitersError: it would have to wait, and it must not.
        """
        now_ms = self._clock.now_ms()
        if waiter.is_retry:
            waiter.is_retry = False
            return Turn.TRY
        schedule = self._schedule
        if schedule.trying is None and self.line.head is waiter and schedule.due_at_ms <= now_ms:
            schedule.begin(waiter)
            return Turn.TRY
        if self._limiter.closed:
            raise DrainingError
        if give_up_at_ms <= now_ms:
            return Turn.GIVE_UP
        if not waiter.counted:
            self._limiter.enter(waiter.call)
            waiter.counted = True
        waiter.wait(give_up_in_ms=give_up_at_ms - now_ms)
        return None

    def wants_notice(self, waiter: Waiter) -> bool:
        """Tell whether the waiter's mint must ask for a notice of its hold's end, because others wait."""
        waiter.asked_for_notice = len(self.line) > 1
        return waiter.asked_for_notice

    def granted(self, waiter: Waiter, grant: AttemptGranted) -> None:
        """Note a grant; the next waiter waits for its end."""
        self._schedule.granted(waiter, grant, self._clock.now_ms())
        self._wake_retries()
        self._arm()

    def refused(self, waiter: Waiter, refusal: Refusal) -> None:
        """Note a refusal; the head waits for the end of the hold."""
        self._schedule.refused(waiter, refusal, self._clock.now_ms())
        self._wake_retries()
        self._arm()

    def answered_late(self, node: int, *, granted: bool) -> None:
        """Note the answer of a node to a try that was refused before."""
        self._schedule.watch.answered_late(node, granted=granted)

    def failed(self, waiter: Waiter) -> None:
        """End a try that was too late or reached no quorum; the head pauses before its next try."""
        self._schedule.failed(waiter, self._clock.now_ms())
        self._arm()

    def renewed(self, digest: str, ends_at_ms: float) -> None:
        """Note that a lease was renewed; if it holds the lock, the hold ends later."""
        self._schedule.watch.renewed(digest, ends_at_ms)

    def noticed(self, notice: Notice) -> None:
        """Note that a hold has ended on a node."""
        self._schedule.noticed(notice, self._clock.now_ms())
        self._arm()

    def released(self, digest: str) -> Waiter | None:
        """Return the waiter to hand the released lock over to; None means release it openly."""
        if not self._schedule.may_hand_over(digest, self._clock.now_ms()):
            self._arm()
            return None
        head = self.line.head
        return head if head is not None and head.idle and head.digest != digest else None

    def hand_over(self, waiter: Waiter, attempt: Attempt) -> None:
        """Give the head the attempt that a handover started for it."""
        self._schedule.begin(waiter, by_hand_over=True)
        waiter.wake(attempt)

    def _wake_retries(self) -> None:
        """Let each waiter try whose own lease holds the lock."""
        for waiter in list(self.line.of_lease(self._schedule.watch.digest)):
            waiter.wake(Turn.TRY)

    def _arm(self) -> None:
        """Let the head try if its try is due; otherwise set a timer that calls this again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        schedule, head = self._schedule, self.line.head
        if schedule.trying is not None:
            return
        due_at_ms = schedule.forget_at_ms if head is None else schedule.due_at_ms
        delay_ms = due_at_ms - self._clock.now_ms()
        if delay_ms > 0:
            self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._arm)
        elif head is None:
            self._on_idle()
        elif head.idle:
            schedule.begin(head)
            head.wake(Turn.TRY)
