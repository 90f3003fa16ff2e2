"""Limit how many acquires wait at this server, for one resource, on one connection, and of one peer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from redfence_server.errors import DrainingError, TooManyWaitersError
from redfence_server.model import AcquireCall


@dataclass(frozen=True, slots=True)
class WaiterLimits:
    """The most acquires that may wait at this server, for one resource, and on one connection."""

    server: int
    resource: int
    connection: int


class WaiterLimiter:
    """Counts the acquires that wait; refuses every acquire while it is `closed`.

    A peer may take at most half of the places that other peers do not use, rounded up. So a peer leaves
    places for others, unless there is only one. A `Budget` rounds down, and would leave the last place
    unused.

    Attributes:
        count: the acquires that wait at this server.
        by_resource: how many of them wait for each resource.
    """

    def __init__(self, limits: WaiterLimits) -> None:
        self.limits = limits
        self.closed = False
        self.count = 0
        self.by_resource: Counter[str] = Counter()
        self._by_connection: Counter[str] = Counter()
        self._by_peer: Counter[str] = Counter()

    def enter(self, call: AcquireCall) -> None:
        """Count one more waiting acquire.

        Raises:
            DrainingError: the limiter is closed.
            TooManyWaitersError: a limit is reached.
        """
        if self.closed:
            raise DrainingError
        limits = self.limits
        its = self._by_peer[call.peer] if call.peer else 0
        left_by_others = limits.server - self.count + its
        for count, limit, scope in (
            (self.by_resource[call.resource], limits.resource, "resource"),
            (self.count, limits.server, "server"),
            (self._by_connection[call.connection], limits.connection, "connection"),
            (its, (left_by_others + 1) // 2, "peer"),
        ):
            if count >= limit:
                raise TooManyWaitersError(limit, scope)
        self.count += 1
        self.by_resource[call.resource] += 1
        self._by_connection[call.connection] += 1
        self._by_peer[call.peer] += 1

    def leave(self, call: AcquireCall) -> None:
        """Count one waiting acquire less."""
        self.count -= 1
        for counts, key in (
            (self.by_resource, call.resource),
            (self._by_connection, call.connection),
            (self._by_peer, call.peer),
        ):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
