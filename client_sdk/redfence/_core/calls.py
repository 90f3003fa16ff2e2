"""The commands a client has under way, each with what is needed to send it again. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from redfence._core.lease import LeaseCore
from redfence._messages import requests
from redfence._messages.requests import AcquireOrder
from redfence_proto.v1 import lock_pb2

# The contract has no word for ever. Whoever still waits after this is asked for again, at the end of the server's queue. That
# the server is there all the while is for `_probe` to find out.
WAIT_MS_MAX = 24 * 3600 * 1000


class Waiter(Protocol):
    """Whoever waits for a call: a future of asyncio or of concurrent.futures fits."""

    def done(self) -> bool:
        """Tell whether a result was set or nobody waits any more."""
        ...

    def set_result(self, result: Any, /) -> Any:
        """Hand over what came of the call."""
        ...

    def set_exception(self, exception: BaseException, /) -> Any:
        """Hand over why the call failed."""
        ...


def resolve(waiter: Waiter, result: Any) -> None:
    """Hand over what came of a call, unless nobody waits any more."""
    if not waiter.done():
        waiter.set_result(result)


def fail(waiter: Waiter, error: BaseException) -> None:
    """Hand over why a call failed, unless nobody waits any more."""
    if not waiter.done():
        waiter.set_exception(error)


@dataclass(slots=True, eq=False)
class AcquireCall:
    """One acquisition, from the caller's first word to its grant, refusal or abandonment.

    Attributes:
        order: what was asked for.
        lease_id: the secret, the same in every sending of this acquisition.
        waiter: the caller.
        started_at_ms: when the caller asked.
        number: its place among all acquisitions of this client, in the order in which callers came.
        sent_at_ms: just before the last sending.
        requested_wait_ms: how long the last sending asked the server to wait.
        times_sent: how often it was sent.
        refusals: how often a server had no quorum for it.
        command_id: its id on the present stream; 0 while it waits to be sent.
        single_try: the next sending asks for a try only, whatever is left of the wait.
        abandoned: nobody waits for it; what is granted has to be released.
        settled: it has ended and is to be skipped wherever it still lies.
        lease: the grant.
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
        """Return how long the caller is still willing to wait; infinite if for ever."""
        if self.order.wait_ms is None:
            return float("inf")
        return max(0.0, self.started_at_ms + self.order.wait_ms - now_ms)

    def write(self, command: lock_pb2.SessionCommand, *, now_ms: float) -> None:
        """Fill in the command, with the wait that is left, and note the instant before its sending."""
        self.sent_at_ms = now_ms
        self.times_sent += 1
        self.requested_wait_ms = 0 if self.single_try else int(min(self.wait_ms_left(now_ms), WAIT_MS_MAX))
        requests.write_acquire(command, self.order, lease_id=self.lease_id, wait_ms=self.requested_wait_ms)


@dataclass(slots=True, eq=False)
class ReleaseCall:
    """One release; sent again on the next stream if this one breaks.

    Attributes:
        resource: the locked name.
        lease_id: its secret.
        waiter: who wants to know, or None.
        settled: it has ended.
    """

    resource: str
    lease_id: str = field(repr=False)  # a secret
    waiter: Waiter | None = None
    settled: bool = False

    def write(self, command: lock_pb2.SessionCommand, *, now_ms: float) -> None:  # noqa: ARG002
        """Fill in the command."""
        requests.write_release(command, resource=self.resource, lease_id=self.lease_id)


@dataclass(slots=True, eq=False)
class RenewCall:
    """One renewal; never sent again: the lease's own schedule decides on the next one.

    Attributes:
        lease: the lease.
        sent_at_ms: just before its sending.
        settled: it has ended.
    """

    lease: LeaseCore
    sent_at_ms: float = 0.0
    settled: bool = False

    def write(self, command: lock_pb2.SessionCommand, *, now_ms: float) -> None:
        """Fill in the command and note the instant before its sending."""
        self.sent_at_ms = now_ms
        requests.write_renew(command, resource=self.lease.resource, lease_id=self.lease.lease_id)


@dataclass(slots=True, eq=False)
class CancelCall:
    """Asks the server to give up an acquire of the same stream.

    Attributes:
        command_id: the acquire's id.
        settled: it has ended.
    """

    command_id: int
    settled: bool = False

    def write(self, command: lock_pb2.SessionCommand, *, now_ms: float) -> None:  # noqa: ARG002
        """Fill in the command."""
        command.cancel.id = self.command_id


@dataclass(slots=True, eq=False)
class ProbeCall:
    """Asks the server for an answer, whatever it is, and for nothing else.

    Attributes:
        settled: it has ended.
    """

    settled: bool = False

    def write(self, command: lock_pb2.SessionCommand, *, now_ms: float) -> None:  # noqa: ARG002
        """Fill in the command: a cancel of itself, which is no acquire, so that it never finds one."""
        command.cancel.id = command.id


@dataclass(slots=True, eq=False)
class LinkCall:
    """Waits until a server is reachable, for calls outside the session.

    Attributes:
        waiter: the caller.
    """

    waiter: Waiter


UrgentCall: TypeAlias = ReleaseCall | RenewCall | CancelCall | ProbeCall
"""Calls that end or save leases, or the link: they never queue behind acquires."""

StreamCall: TypeAlias = AcquireCall | UrgentCall

Timed: TypeAlias = LeaseCore | AcquireCall | ReleaseCall | LinkCall
"""What is seen to when its time has come."""
