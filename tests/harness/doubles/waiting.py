"""Tell whether a server keeps any state of waiters that have gone."""

from __future__ import annotations

from redfence_server.waiting.queues import WaitQueues
from redfence_server.waiting.waiter_limiter import WaiterLimiter


def counts_no_waiter(room: WaiterLimiter) -> bool:
    return not (room.count or room.by_resource or room._by_connection)


def keeps_no_waiter(queues: WaitQueues) -> bool:
    return not queues._queues and counts_no_waiter(queues.limiter)
