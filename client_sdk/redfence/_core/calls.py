"""Defines the commands that a client sends, each with all that is needed to send it again. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from redfence._core.lease import LeaseCore
from redfence._messages import requests
from redfence._messages.requests import AcquireOrder
from redfence_proto.v1 import lock_pb2

# The contract cannot express an endless wait. After this time the client sends the acquire again, and
# it queues at the end of the server's queue. Meanwhile `Probe` checks that the server is alive.
WAIT_MS_MAX = 24 * 3600 * 1000


class Waiter(Protocol):
    """Receives the result of a call; a future of asyncio or of concurrent.futures fits."""

    def done(self) -> bool:
        """Return whether a result was set or the caller has stopped waiting."""
        ...

    def set_result(self, result: Any, /) -> Any:
        """Give the caller the result of the call."""
        ...

    def set_exception(self, exception: BaseException, /) -> Any:
        """Give the caller the error of the call."""
        ...


def resolve(waiter: Waiter, result: Any) -> None:
    """Set the waiter's result, unless it is done."""
    if not waiter.done():
        waiter.set_result(result)


def fail(waiter: Waiter, error: BaseException) -> None:
    """Set the waiter's error, unless it is done."""
    if not waiter.done():
        waiter.set_exception(error)


@dataclass(slots=True, eq=False)
class AcquireCall:
    """Holds one acquire from the caller's request to the grant, the refusal or the give-up.

    Attributes:
        order: the caller's arguments.
        lease_id: the secret; every attempt of this acquire uses the same one.
        waiter: receives the lease or the error.
        started_at_ms: when the caller asked.
        number: counts the acquires of this client in the order in which the callers asked.
        sent_at_ms: the instant just before the last request was sent.
        requested_wait_ms: the wait that the last request asked for.
        times_sent: how often the acquire was sent.
        refusals: how often the client moved to another server because one refused it.
        command_id: its id on the present stream; 0 while it is queued.
        single_try: the next request does not wait, although the caller's wait is not over.
        abandoned: the caller is gone, so any grant must be released.
        settled: the acquire has ended; queues skip it.
        lease: the granted lease.
    """

    order: AcquireOrder
    lease_id: str = field(repr=False)  # a secret
    waiter: Waiter
    started_at_ms: float
    number: int
    sent_at_ms: float = 0.0
    requested_wait_ms: int = 0
    times_sent: int = 0
    refusals: int = 0
    command_id: int = 0
    single_try: bool = False
    abandoned: bool = False
    settled: bool = False
    lease: LeaseCore | None = None

    def wait_ms_left(self, now_ms: float) -> float:
        """Return the rest of the caller's wait in milliseconds; infinite for an endless wait."""
        if self.order.wait_ms is None:
            return float("inf")
        return max(0.0, self.started_at_ms + self.order.wait_ms - now_ms)

    def write(self, command: lock_pb2.SessionCommand, *, now_ms: float) -> None:
        """Fill in the command with the rest of the wait, and record the instant before it is sent."""
        self.sent_at_ms = now_ms
        self.times_sent += 1
        self.requested_wait_ms = 0 if self.single_try else int(min(self.wait_ms_left(now_ms), WAIT_MS_MAX))
        requests.write_acquire(command, self.order, lease_id=self.lease_id, wait_ms=self.requested_wait_ms)


@dataclass(slots=True, eq=False)
class ReleaseCall:
    """Holds one release; the client sends it again on the next stream if this one breaks.

    Attributes:
        resource: the locked name.
        lease_id: the secret of the lease.
        waiter: receives the outcome; None if no caller waits for it.
        traceparent: the caller's span; empty without one.
        settled: the release has ended.
    """

    resource: str
    lease_id: str = field(repr=False)  # a secret
    waiter: Waiter | None = None
    traceparent: str = ""
    settled: bool = False

    def write(self, command: lock_pb2.SessionCommand, *, now_ms: float) -> None:  # noqa: ARG002
        """Write the release into the command."""
        requests.write_release(
            command, resource=self.resource, lease_id=self.lease_id, traceparent=self.traceparent
        )


@dataclass(slots=True, eq=False)
class RenewCall:
    """Holds one renewal; the client never sends it again, because the lease schedules its own next renewal.

    Attributes:
        lease: the lease.
        sent_at_ms: the instant just before the request was sent.
        settled: the renewal has ended.
    """

    lease: LeaseCore
    sent_at_ms: float = 0.0
    settled: bool = False

    def write(self, command: lock_pb2.SessionCommand, *, now_ms: float) -> None:
        """Fill in the command, and record the instant before it is sent."""
        self.sent_at_ms = now_ms
        requests.write_renew(command, resource=self.lease.resource, lease_id=self.lease.lease_id)


@dataclass(slots=True, eq=False)
class CancelCall:
    """Asks the server to give up an acquire of the same stream.

    Attributes:
        command_id: the id of the acquire.
        settled: the cancel has ended.
    """

    command_id: int
    settled: bool = False

    def write(self, command: lock_pb2.SessionCommand, *, now_ms: float) -> None:  # noqa: ARG002
        """Write the cancel into the command."""
        command.cancel.id = self.command_id


@dataclass(slots=True, eq=False)
class ProbeCall:
    """Asks the server for any answer, to prove that it is alive.

    Attributes:
        settled: the probe has ended.
    """

    settled: bool = False

    def write(self, command: lock_pb2.SessionCommand, *, now_ms: float) -> None:  # noqa: ARG002
        """Fill in a cancel that names itself; it is not an acquire, so the server finds nothing to cancel."""
        command.cancel.id = command.id


@dataclass(slots=True, eq=False)
class LinkCall:
    """Waits until a server is reachable, for a call outside the session.

    Attributes:
        waiter: is resolved when the link is up.
    """

    waiter: Waiter


UrgentCall: TypeAlias = ReleaseCall | RenewCall | CancelCall | ProbeCall
"""The calls that end or renew leases, or check the link; they never queue behind acquires."""

StreamCall: TypeAlias = AcquireCall | UrgentCall

Timed: TypeAlias = LeaseCore | AcquireCall | ReleaseCall | LinkCall
"""The items that have alarms."""
