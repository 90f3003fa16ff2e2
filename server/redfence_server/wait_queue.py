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
as its call and not longer. The price is that the order holds within one server. Between servers there is a turn: after
`HAND_OVERS_MAX` hand-overs in a row the lock is released openly if another server waits, and this one holds back for a moment.

One case is not for the head to decide: a waiter whose own lease holds the lock. Its Acquire was granted before and is repeated, because
the answer was lost. It tries at once, wherever it stands, or everybody would wait for it to expire. What is known of the holder may be out
of date, so soon after an arrival the head tries in any case, unless the lock was granted here meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Final

from redfence_server.backoff import pauses
from redfence_server.clock import Clock
from redfence_server.errors import DrainingError, RedfenceServerError, TooManyWaitersError
from redfence_server.hold_watch import HoldWatch
from redfence_server.lock_node import Notice
from redfence_server.model import AcquireCall, CurrentHold
from redfence_server.quorum import Failure, Refusal
from redfence_server.randomness import Randomness
from redfence_server.redlock import Attempt, AttemptGranted
from redfence_server.stall_watch import StallWatch

HAND_OVERS_MAX: Final = 16
"""How often a resource is handed over in a row while another server waits for it. Higher: fewer turns, which cost some round
trips each; lower: the others wait less."""

# After its turn is over a server leaves the lock to the others for as long as a notice, a mint and a busy loop take.
_HOLD_BACK_MS: Final = (20.0, 30.0)
# Servers that wait for the same expiry part a little, or each would take a part of the nodes.
_SPREAD_MS: Final = 10.0
# How soon after an arrival the holder is looked at. Lower: arrivals cost more mints, one for this time at most.
_LOOK_MS: Final = 100.0
# A view shows so many of the waiters; each takes up to 300 bytes of a message of 64 KiB.
_SHOWN_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class WaiterLimits:
    """How many acquires may wait.

    Attributes:
        server: at this server.
        resource: for one resource.
        connection: on one connection.
    """

    server: int
    resource: int
    connection: int


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
    """An Acquire's place in a queue. It is there within `WaitQueues.enter` and not longer."""

    __slots__ = ("_future", "_pauses", "_queue", "call", "counted", "is_again")

    def __init__(self, call: AcquireCall, queue: WaitQueue) -> None:
        self.call = call
        self.counted = False
        self.is_again = False  # its own lease was seen to hold the lock
        self._queue = queue
        self._future: asyncio.Future[Turn | Attempt] | None = None
        self._pauses: Iterator[float] | None = None

    @property
    def idle(self) -> bool:
        """Tell whether it waits to be told something."""
        return self._future is not None and not self._future.done()

    @property
    def position(self) -> int:
        """Return its place; 1 is the head's."""
        return self._queue.position(self)

    @property
    def has_followers(self) -> bool:
        """Tell whether others wait for the same resource."""
        return len(self._queue) > 1

    async def turn(self, give_up_at_ms: float) -> Turn | Attempt:
        """Return what to do, once it is time: try, go on with an attempt that a hand-over has begun, or give up.

        Raises:
            TooManyWaitersError: it would have to wait, and too many do.
            RedfenceServerError: what was told to everybody who waits.

        Cancellation: an attempt that was begun for it is given up.
        """
        if self._queue.begin_try(self):
            return Turn.TRY
        queues = self._queue.queues
        delay_s = (give_up_at_ms - queues.clock.now_ms()) / 1000
        if delay_s <= 0:
            return Turn.GIVE_UP
        if queues.draining:
            raise DrainingError
        queues.count(self, self._queue)
        loop = asyncio.get_running_loop()
        future = self._future = loop.create_future()
        timer = loop.call_later(delay_s, self.tell, Turn.GIVE_UP)
        try:
            turn: Turn | Attempt = await future
            if (quiet_ms := queues.stall_watch.quiet_ms()) > 0:
                await asyncio.sleep(quiet_ms / 1000)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                told = future.result()
                if isinstance(told, Attempt):
                    told.give_up()
            raise
        finally:
            timer.cancel()
            self._future = None
        return turn

    def tell(self, turn: Turn | Attempt) -> None:
        """Tell it what to do, unless it was told something already."""
        if self._future is not None and not self._future.done():
            self._future.set_result(turn)

    def fail(self, error: RedfenceServerError) -> None:
        """End its wait with an error."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)

    def granted(self, grant: AttemptGranted) -> None:
        """Note that its attempt was granted."""
        self._queue.granted(self, grant)

    @property
    def current(self) -> CurrentHold | None:
        """Return who holds the lock, as last seen here."""
        return self._queue.current()

    def fail_all(self, error: Callable[[], RedfenceServerError]) -> None:
        """End the wait of everybody who waits for the same resource."""
        self._queue.fail(error)

    def refused(self, refusal: Refusal) -> None:
        """Note that its attempt was refused because the lock is held."""
        self._queue.refused(self, refusal)

    def failed(self) -> None:
        """Note that nothing is known of the hold after its attempt; it is tried again soon."""
        self._queue.failed(self)

    def pause_ms(self) -> float:
        """Return for how long it lets rivals pass that have split the nodes with it, longer every time."""
        if self._pauses is None:
            self._pauses = pauses(self._queue.queues.randomness)
        return next(self._pauses)


class WaitQueue:
    """The waiters of one resource."""

    def __init__(self, resource: str, queues: WaitQueues) -> None:
        self.queues = queues
        self.counted = 0
        self._resource = resource
        # In order of arrival. A dict, because any of them may leave at any time.
        self._waiters: dict[Waiter, None] = {}
        self._by_digest: dict[str, Waiter] = {}
        self._watch = HoldWatch(queues.node_count)
        self._ready = True  # a try is worth its while
        self._trying: Waiter | None = None
        self._told_of_end = False  # if granted, this server hears of the end of the hold
        self._handing = False  # it goes on with an attempt that a hand-over has begun
        self._hand_overs = 0  # in a row, while another server waited
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiters)

    # --- coming and going -----------------------------------------------------------------------------------------

    def enter(self, waiter: Waiter) -> None:
        """Take the last place."""
        digest = waiter.call.lease_id.digest
        self._waiters[waiter] = None
        self._by_digest[digest] = waiter
        waiter.is_again = self._watch.digest == digest
        if (
            self._timer is not None
            and self._timer.when() > asyncio.get_running_loop().time() + _LOOK_MS / 1000
        ):
            self._arm(_LOOK_MS)

    def leave(self, waiter: Waiter) -> None:
        """Give the place up."""
        del self._waiters[waiter]
        if self._by_digest.get(waiter.call.lease_id.digest) is waiter:
            del self._by_digest[waiter.call.lease_id.digest]
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
        now_ms = self.queues.clock.now_ms()
        first = islice(self._waiters, _SHOWN_MAX)
        waiter = self._by_digest.get(digest)
        return QueueView(
            len(self._waiters),
            tuple((each.call.holder, now_ms - each.call.arrived_at_ms) for each in first),
            0 if waiter is None else self.position(waiter),
        )

    def current(self) -> CurrentHold | None:
        """Return the holder, as last seen."""
        return self._watch.current(self.queues.clock.now_ms())

    def fail(self, error: Callable[[], RedfenceServerError]) -> None:
        """End every wait with an error."""
        for waiter in self._waiters:
            waiter.fail(error())

    # --- trying ---------------------------------------------------------------------------------------------------

    def begin_try(self, waiter: Waiter) -> bool:
        """Tell whether this waiter may try now; if so it has to tell what came of it."""
        if waiter.is_again:
            waiter.is_again = False
            return True
        if not self._ready or self._trying is not None or next(iter(self._waiters)) is not waiter:
            return False
        self._ready = False
        self._trying = waiter
        self._told_of_end = waiter.has_followers
        return True

    def granted(self, waiter: Waiter, grant: AttemptGranted) -> None:
        """Note a grant: the next one waits for its end."""
        self._hand_overs = self._hand_overs + 1 if self._handing and grant.contended else 0
        self._end_try(waiter)
        call = waiter.call
        self._watch.granted(
            digest=call.lease_id.digest,
            holder=call.holder,
            token=grant.token,
            ends_at_ms=grant.minted_at_ms + call.ttl_ms,
        )
        self._await_end()
        self._see_again(waiter)
        if not self._told_of_end:
            # Whoever came while it was tried asks for a notice by being refused.
            self._ready = True

    def refused(self, waiter: Waiter, refusal: Refusal) -> None:
        """Note a refusal: wait for the end of what is in the way."""
        self._end_try(waiter)
        self._watch.refused(refusal, self.queues.clock.now_ms())
        if refusal.failure is Failure.SPLIT or self._watch.may_be_free:
            self._arm(waiter.pause_ms())
        else:
            self._await_end()
        self._see_again(waiter)

    def renewed(self, digest: str, ends_at_ms: float) -> None:
        """Note that a lease was renewed: if it is the one that holds the lock, its end is later."""
        self._watch.renewed(digest, ends_at_ms)

    def failed(self, waiter: Waiter) -> None:
        """Note that nothing was learnt."""
        self._end_try(waiter)
        self._arm(waiter.pause_ms())

    def noticed(self, notice: Notice) -> None:
        """Note that a node's hold has ended. In the middle of a try that is only kept in mind."""
        self._watch.noticed(notice)
        if self._trying is None and self._watch.may_be_free:
            self._make_ready()

    # --- handing over ---------------------------------------------------------------------------------------------

    def successor(self, digest: str) -> Waiter | None:
        """Return to whom to hand over when the lease with this digest is released; None: release it openly.

        Only the lease that is known to hold the lock: a release of any other would give the head a try for nothing.
        """
        head = next(iter(self._waiters), None)
        if head is None or not head.idle or self._trying is not None or self._watch.digest != digest:
            return None
        if self._hand_overs >= HAND_OVERS_MAX or self.queues.stall_watch.quiet_ms() > 0:
            return None
        # Not to itself: a waiter whose own lease holds the lock does not stay idle.
        return head

    def hand_over(self, waiter: Waiter, attempt: Attempt) -> None:
        """Give the successor the attempt that was begun for it."""
        self._ready = False
        self._trying = waiter
        self._handing = True
        self._told_of_end = waiter.has_followers
        waiter.tell(attempt)

    def yields(self, digest: str) -> bool:
        """Tell whether the release of this lease is to leave the lock to other servers; if so, hold back for a moment."""
        if self._hand_overs < HAND_OVERS_MAX or self._watch.digest != digest or self._trying is not None:
            return False
        self._hand_overs = 0
        self._arm(self.queues.randomness.uniform(*_HOLD_BACK_MS))
        return True

    # --- inside ---------------------------------------------------------------------------------------------------

    def _end_try(self, waiter: Waiter) -> None:
        if self._trying is waiter:
            self._trying = None
            self._handing = False

    def _see_again(self, waiter: Waiter) -> None:
        """Let a waiter try whose own lease holds the lock."""
        again = self._by_digest.get(self._watch.digest)
        if again is None or again is waiter or again is self._trying:
            return
        if again.idle:
            again.tell(Turn.TRY)
        else:
            again.is_again = True

    def _make_ready(self) -> None:
        self._ready = True
        self._wake_head()

    def _wake_head(self) -> None:
        head = next(iter(self._waiters), None)
        if head is not None and head.idle and self.begin_try(head):
            head.tell(Turn.TRY)

    def _await_end(self) -> None:
        left_ms = self._watch.try_at_ms - self.queues.clock.now_ms()
        self._arm(max(0.0, left_ms) + self.queues.randomness.uniform(0, _SPREAD_MS), self._hold_is_over)

    def _hold_is_over(self) -> None:
        if self._watch.try_at_ms > self.queues.clock.now_ms():
            self._await_end()  # it was renewed
        else:
            self._time_is_up()

    def _arm(self, delay_ms: float, ring: Callable[[], None] | None = None) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, ring or self._time_is_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        self._timer = None
        if self._waiters:
            self._make_ready()
        else:
            self.queues.drop(self._resource)

    def _rest(self) -> None:
        """Go, now that nobody waits; but while a turn is being counted, only with the lease that was granted last."""
        if self._hand_overs and self._timer is not None:
            return
        self._disarm()
        self.queues.drop(self._resource)


class WaitQueues:
    """Every queue of this server, and what they share."""

    def __init__(
        self, *, node_count: int, clock: Clock, randomness: Randomness, limits: WaiterLimits
    ) -> None:
        self.node_count = node_count
        self.clock = clock
        self.randomness = randomness
        self.stall_watch = StallWatch(clock)
        self.draining = False
        self._limits = limits
        self._queues: dict[str, WaitQueue] = {}
        self._counted = 0
        self._by_connection: dict[str, int] = {}

    @contextmanager
    def enter(self, call: AcquireCall) -> Iterator[Waiter]:
        """Give an acquire the last place in the queue of its resource, for as long as the context lasts."""
        queue = self._queues.get(call.resource)
        if queue is None:
            queue = self._queues[call.resource] = WaitQueue(call.resource, self)
        waiter = Waiter(call, queue)
        queue.enter(waiter)
        try:
            yield waiter
        finally:
            self._uncount(waiter, queue)
            queue.leave(waiter)

    def find(self, resource: str) -> WaitQueue | None:
        """Return the queue of a resource, if anybody waits for it."""
        return self._queues.get(resource)

    def drop(self, resource: str) -> None:
        """Forget a queue that is empty."""
        del self._queues[resource]

    def on_notice(self, notice: Notice) -> None:
        """Pass a notice on. Who waited for it may have gone."""
        if (queue := self._queues.get(notice.resource)) is not None:
            queue.noticed(notice)

    def drain(self) -> None:
        """Send everybody away, now and from now on."""
        self.draining = True
        for queue in self._queues.values():
            queue.fail(DrainingError)

    def count(self, waiter: Waiter, queue: WaitQueue) -> None:
        """Count a waiter that has to wait, once.

        Raises:
            TooManyWaitersError: a limit is reached.
        """
        if waiter.counted:
            return
        connection = waiter.call.connection
        on_connection = self._by_connection.get(connection, 0)
        limits = self._limits
        if queue.counted >= limits.resource:
            raise TooManyWaitersError(limits.resource, "resource")
        if self._counted >= limits.server:
            raise TooManyWaitersError(limits.server, "server")
        if on_connection >= limits.connection:
            raise TooManyWaitersError(limits.connection, "connection")
        waiter.counted = True
        queue.counted += 1
        self._counted += 1
        self._by_connection[connection] = on_connection + 1
        self.stall_watch.start()

    def _uncount(self, waiter: Waiter, queue: WaitQueue) -> None:
        if not waiter.counted:
            return
        connection = waiter.call.connection
        queue.counted -= 1
        self._counted -= 1
        self._by_connection[connection] -= 1
        if not self._by_connection[connection]:
            del self._by_connection[connection]
        if not self._counted:
            self.stall_watch.stop()
