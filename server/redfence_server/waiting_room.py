"""How many acquires wait at this server, and whether one more may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from redfence_server.clock import Clock
from redfence_server.errors import DrainingError, TooManyWaitersError
from redfence_server.model import AcquireCall
from redfence_server.stall_watch import StallWatch


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


class WaitingRoom:
    """Counts those who wait, and while there are any, watches whether the process is stopped."""

    def __init__(self, limits: WaiterLimits, *, clock: Clock, on_stall: Callable[[], None]) -> None:
        self.stall_watch = StallWatch(clock, on_stall=on_stall)
        self._limits = limits
        self._closed = False
        self._count = 0
        self._by_resource: Counter[str] = Counter()
        self._by_connection: Counter[str] = Counter()

    @property
    def closed(self) -> bool:
        """Tell whether nobody may wait any more."""
        return self._closed

    @property
    def empty(self) -> bool:
        """Tell whether nothing is kept of anybody."""
        return not (self._count or self._by_resource or self._by_connection)

    def close(self) -> None:
        """Take nobody any more."""
        self._closed = True

    def enter(self, call: AcquireCall) -> None:
        """Count one more.

        Raises:
            DrainingError: the room is closed.
            TooManyWaitersError: a limit is reached.
        """
        if self._closed:
            raise DrainingError
        limits = self._limits
        for count, limit, scope in (
            (self._by_resource[call.resource], limits.resource, "resource"),
            (self._count, limits.server, "server"),
            (self._by_connection[call.connection], limits.connection, "connection"),
        ):
            if count >= limit:
                raise TooManyWaitersError(limit, scope)
        self._count += 1
        self._by_resource[call.resource] += 1
        self._by_connection[call.connection] += 1
        self.stall_watch.start()

    def leave(self, call: AcquireCall) -> None:
        """Count one less."""
        self._count -= 1
        for counts, key in ((self._by_resource, call.resource), (self._by_connection, call.connection)):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
        if not self._count:
            self.stall_watch.stop()
