"""Puts the messages of a watch together into the changes that the caller gets. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime

from redfence._errors import RedfenceError, UnavailableError
from redfence._messages.requests import duration_ms
from redfence._messages.server_errors import from_wire
from redfence_proto.v1 import lock_pb2


class LockEventKind(enum.Enum):
    """What happened to a lock."""

    UNKNOWN = lock_pb2.LOCK_EVENT_KIND_UNSPECIFIED
    """The server sent a value that this version does not know."""
    HELD = lock_pb2.LOCK_EVENT_KIND_HELD
    """The lease holds the resource when the watch begins."""
    ACQUIRED = lock_pb2.LOCK_EVENT_KIND_ACQUIRED
    """The lease has got the resource; it comes again if the nodes show another token for it."""
    RELEASED = lock_pb2.LOCK_EVENT_KIND_RELEASED
    """The lease ended while it had time left: its holder released it."""
    EXPIRED = lock_pb2.LOCK_EVENT_KIND_EXPIRED
    """The ttl of the lease ended; its lock delay may keep the lock closed.

    A release looks the same if the ttl is under twice the interval.
    """
    LOST = lock_pb2.LOCK_EVENT_KIND_LOST
    """The lease has time left on some node, but no quorum any more."""
    FORCED = lock_pb2.LOCK_EVENT_KIND_FORCED
    """An operator ended the lease by force; its lock delay may keep the lock closed."""


@dataclass(frozen=True, slots=True)
class LockEvent:
    """A change of one lock.

    Attributes:
        kind: what happened.
        resource: the name of the resource.
        token: the fencing token of the lease.
        holder: the holder's label; may be "".
        remaining: seconds until the lease ends unless it is renewed, without the lock delay; None if it has
            ended.
    """

    kind: LockEventKind
    resource: str
    token: int
    holder: str
    remaining: float | None


@dataclass(frozen=True, slots=True)
class LockChanges:
    """How the watched locks have changed since the last picture.

    Attributes:
        events: the changes, in no order, but the end of a lease comes before the next lease of the resource.
        taken_at: when the picture was complete, by the wall clock of the server; None if there is a problem.
        is_first: whether the events are all locks that are held, so that earlier events count no more. True
            for the first picture of a watch, and for the first picture after a broken connection.
        problem: why there is no picture; the next picture has the changes since the last one.
    """

    events: tuple[LockEvent, ...]
    taken_at: datetime | None
    is_first: bool
    problem: RedfenceError | None = None


class PictureReader:
    """Collects the messages of a watch until a picture is complete."""

    def __init__(self) -> None:
        self._events: list[LockEvent] = []
        self._is_first = True

    def read(self, message: lock_pb2.WatchLocksResponse | None) -> LockChanges | None:
        """Take a message, or None where a new watch begins; return the changes if the picture is complete."""
        if message is None:
            self._events, self._is_first = [], True
            return None
        if message.HasField("error"):
            return LockChanges((), None, is_first=False, problem=from_wire(message.error))
        self._events += map(_event, message.events)
        if not message.HasField("taken_at"):
            return None
        taken_at = message.taken_at.ToDatetime(tzinfo=UTC)
        changes = LockChanges(tuple(self._events), taken_at, is_first=self._is_first)
        self._events, self._is_first = [], False
        return changes


def can_resume(error: UnavailableError) -> bool:
    """Return whether another server can go on with a watch that ended with this error."""
    return error.error_reason in {"", "DRAINING"}


def _event(event: lock_pb2.LockEvent) -> LockEvent:
    is_known = event.kind in lock_pb2.LockEventKind.values()
    lease = event.lease
    return LockEvent(
        kind=LockEventKind(event.kind) if is_known else LockEventKind.UNKNOWN,
        resource=event.resource,
        token=lease.fencing_token,
        holder=lease.holder,
        remaining=duration_ms(lease.remaining) / 1000 if lease.HasField("remaining") else None,
    )
