"""Hold the queue of each resource that has waiters at this server.

The first acquire of a resource tries at once, and most often is granted. It needs no queue until a second
acquire comes, or anything else concerns the resource. Then `find` makes a queue with this waiter at its head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from redfence_server.clock import Clock
from redfence_server.errors import DrainingError, RedfenceServerError, TooManyWaitersError
from redfence_server.locking.attempt import Attempt, AttemptGranted
from redfence_server.locking.node import Notice
from redfence_server.model import AcquireCall
from redfence_server.randomness import Randomness
from redfence_server.waiting.line import Turn, Waiter
from redfence_server.waiting.queue import WaitQueue
from redfence_server.waiting.waiter_limiter import WaiterLimiter, WaiterLimits


@dataclass(frozen=True, slots=True)
class WaitingView:
    """How many acquires wait at this server, at most, for how many resources, and most for one.

    `handovers` counts the releases since the start that handed the lock to a waiter.
    """

    count: int
    limit: int
    resources: int
    longest: int
    handovers: int


class WaitQueues:
    """Makes a queue for the second waiter of a resource, and drops it when it is idle.

    Attributes:
        handovers: the releases that handed the lock to a waiter.
    """

    def __init__(
        self, *, node_count: int, clock: Clock, randomness: Randomness, limits: WaiterLimits
    ) -> None:
        self.limiter = WaiterLimiter(limits)
        self.handovers = 0
        self._node_count = node_count
        self._clock = clock
        self._randomness = randomness
        # By resource: its queue, or the only waiter, which tries for the first time.
        self._queues: dict[str, WaitQueue | Waiter] = {}

    def enter(self, call: AcquireCall, on_turn: Callable[[Turn | Attempt | Exception], None]) -> Waiter:
        """Queue an acquire at the end of its resource's queue; the caller must `leave`. See `Waiter`.

        Raises:
            DrainingError: the server takes no more waiters.
        """
        waiter = Waiter(call, on_turn)
        with suppress(TooManyWaitersError):
            # Count it before its first try, or later waiters would take its place. Uncounted, it can only be
            # granted at once.
            self.limiter.enter(call)
            waiter.counted = True
        if (queue := self.find(call.resource)) is None:
            self._queues[call.resource] = waiter
        else:
            queue.enter(waiter)
        return waiter

    def tries_alone(self, waiter: Waiter) -> bool:
        """Tell whether a waiter is the only one of its resource, and must try now."""
        return self._queues[waiter.call.resource] is waiter

    def wants_notice(self, waiter: Waiter) -> bool:
        """Tell whether the waiter's mint must ask for a notice of its hold's end, because others wait."""
        queue = self._queues[waiter.call.resource]
        return isinstance(queue, WaitQueue) and queue.wants_notice(waiter)

    def granted(self, waiter: Waiter, grant: AttemptGranted) -> None:
        """Note the grant to a waiter; a lone waiter has no queue that must know of it."""
        queue = self._queues[waiter.call.resource]
        if isinstance(queue, WaitQueue):
            queue.granted(waiter, grant)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter; it gets no turn any more."""
        waiter.stop()
        if waiter.counted:
            self.limiter.leave(waiter.call)
        resource = waiter.call.resource
        queue = self._queues[resource]
        if queue is waiter:
            del self._queues[resource]
        else:
            assert isinstance(queue, WaitQueue)
            queue.leave(waiter)

    def of(self, waiter: Waiter) -> WaitQueue:
        """Return the queue of a waiter."""
        queue = self.find(waiter.call.resource)
        assert queue is not None, "it has not left"
        return queue

    def find(self, resource: str) -> WaitQueue | None:
        """Return the queue of a resource, None without waiters; make it for a lone waiter."""
        queue = self._queues.get(resource)
        if isinstance(queue, Waiter):
            waiter, queue = queue, self._new_queue(resource)
            self._queues[resource] = queue
            queue.begin_with(waiter)
        return queue

    def view(self) -> WaitingView:
        """Return how many acquires wait, for metrics."""
        limiter = self.limiter
        by_resource = limiter.by_resource
        return WaitingView(
            count=limiter.count,
            limit=limiter.limits.server,
            resources=len(by_resource),
            longest=max(by_resource.values(), default=0),
            handovers=self.handovers,
        )

    def on_notice(self, notice: Notice) -> None:
        """Pass a notice to the queue of its resource, if there is one."""
        if (queue := self.find(notice.resource)) is not None:
            queue.noticed(notice)

    def drain(self) -> None:
        """End every wait with `DrainingError`, and refuse every later one."""
        self.limiter.closed = True
        self.fail(DrainingError)

    def fail(self, error: Callable[[], RedfenceServerError]) -> None:
        """End every wait with an error of its own. A waiter that already has its turn goes on."""
        for queue in list(self._queues.values()):
            if isinstance(queue, WaitQueue):
                queue.line.fail(error)

    def _new_queue(self, resource: str) -> WaitQueue:
        return WaitQueue(
            node_count=self._node_count,
            limiter=self.limiter,
            clock=self._clock,
            randomness=self._randomness,
            on_idle=lambda: self._queues.pop(resource),
        )
