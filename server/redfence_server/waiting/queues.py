"""Hold the queue of each resource that has waiters at this server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from redfence_server.clock import Clock
from redfence_server.errors import DrainingError, RedfenceServerError
from redfence_server.locking.node import Notice
from redfence_server.model import AcquireCall
from redfence_server.randomness import Randomness
from redfence_server.waiting.line import Waiter
from redfence_server.waiting.queue import WaitQueue
from redfence_server.waiting.waiter_limiter import WaiterLimiter, WaiterLimits


class WaitQueues:
    """Makes a queue for the first waiter of a resource, and drops it when it is idle."""

    def __init__(
        self, *, node_count: int, clock: Clock, randomness: Randomness, limits: WaiterLimits
    ) -> None:
        self.limiter = WaiterLimiter(limits)
        self._node_count = node_count
        self._clock = clock
        self._randomness = randomness
        self._queues: dict[str, WaitQueue] = {}

    @contextmanager
    def enter(self, call: AcquireCall) -> Iterator[tuple[WaitQueue, Waiter]]:
        """Queue an acquire at the end of its resource's queue until the context exits."""
        queue = self._queues.get(call.resource) or self._add(call.resource)
        waiter = Waiter(call)
        queue.enter(waiter)
        try:
            yield queue, waiter
        finally:
            queue.leave(waiter)

    def find(self, resource: str) -> WaitQueue | None:
        """Return the queue of a resource, if there is one."""
        return self._queues.get(resource)

    def on_notice(self, notice: Notice) -> None:
        """Pass a notice to the queue of its resource, if there is one."""
        if (queue := self._queues.get(notice.resource)) is not None:
            queue.noticed(notice)

    def drain(self) -> None:
        """End every wait with `DrainingError`, and refuse every later one."""
        self.limiter.closed = True
        self.fail(DrainingError)

    def fail(self, error: Callable[[], RedfenceServerError]) -> None:
        """End every wait with an error of its own. A waiter that already has its turn goes on."""
        for queue in self._queues.values():
            queue.line.fail(error)

    def _add(self, resource: str) -> WaitQueue:
        queue = self._queues[resource] = WaitQueue(
            node_count=self._node_count,
            limiter=self.limiter,
            clock=self._clock,
            randomness=self._randomness,
            on_idle=lambda: self._queues.pop(resource),
        )
        return queue
