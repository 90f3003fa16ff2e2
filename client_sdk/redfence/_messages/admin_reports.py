"""Converts the answers of the admin service into frozen values. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from redfence._messages.reports import Hold, read_hold
from redfence._messages.requests import duration_ms
from redfence_proto.v1 import lock_pb2


@dataclass(frozen=True, slots=True)
class ListedLock:
    """One held lock.

    Attributes:
        resource: the name of the resource.
        current: the lease that holds it on a quorum of nodes.
        waiters: how many acquires wait for it at the server that answered.
    """

    resource: str
    current: Hold
    waiters: int


class ForceOutcome(enum.Enum):
    """Whether a forced release ended the lease."""

    UNKNOWN = lock_pb2.FORCE_RELEASE_OUTCOME_UNSPECIFIED
    """The server sent a value that this version does not know."""
    RELEASED = lock_pb2.FORCE_RELEASE_OUTCOME_RELEASED
    """The lease with this token held the resource until this call."""
    NOT_HELD = lock_pb2.FORCE_RELEASE_OUTCOME_NOT_HELD
    """No lease holds the resource."""
    OTHER_TOKEN = lock_pb2.FORCE_RELEASE_OUTCOME_OTHER_TOKEN
    """A lease with another token holds the resource; nothing was changed."""


@dataclass(frozen=True, slots=True)
class ForceReport:
    """The outcome of a forced release.

    Attributes:
        outcome: whether it ended the lease.
        current: the present lease, if another token holds the resource.
    """

    outcome: ForceOutcome
    current: Hold | None


class SessionKind(enum.Enum):
    """The kind of an open stream."""

    UNKNOWN = lock_pb2.SESSION_KIND_UNSPECIFIED
    """The server sent a value that this version does not know."""
    SESSION = lock_pb2.SESSION_KIND_SESSION
    """The session of a client."""
    KEEP_ALIVE = lock_pb2.SESSION_KIND_KEEP_ALIVE
    """A stream of renewals."""
    WATCH = lock_pb2.SESSION_KIND_WATCH
    """A watch of locks."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """One open stream of a server process.

    Attributes:
        number: counts the streams of the process, from 1.
        kind: what kind of stream it is.
        peer: the address of the client, as the server sees it.
        age: for how many seconds it has been open.
        unanswered: how many of its commands have no written result.
        waiting: how many of them are acquires.
    """

    number: int
    kind: SessionKind
    peer: str
    age: float
    unanswered: int
    waiting: int


def read_sessions(response: lock_pb2.ListSessionsResponse) -> list[OpenSession]:
    """Return one page of streams."""
    return [
        OpenSession(
            number=each.number,
            kind=SessionKind(each.kind)
            if each.kind in lock_pb2.SessionKind.values()
            else SessionKind.UNKNOWN,
            peer=each.peer,
            age=duration_ms(each.age) / 1000,
            unanswered=each.unanswered,
            waiting=each.waiting,
        )
        for each in response.sessions
    ]


def read_listed(response: lock_pb2.ListLocksResponse) -> list[ListedLock]:
    """Return one page of locks."""
    return [ListedLock(lock.resource, read_hold(lock.current), lock.waiters) for lock in response.locks]


def read_forced(response: lock_pb2.ForceReleaseResponse) -> ForceReport:
    """Return the answer of ForceRelease as a report."""
    is_known = response.outcome in lock_pb2.ForceReleaseOutcome.values()
    current = read_hold(response.current) if response.HasField("current") else None
    return ForceReport(ForceOutcome(response.outcome) if is_known else ForceOutcome.UNKNOWN, current)
