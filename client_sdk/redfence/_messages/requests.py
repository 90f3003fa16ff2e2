"""Checks callers' arguments and writes them into the contract's messages. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from google.protobuf.duration_pb2 import Duration

from redfence._errors import InvalidArgumentError
from redfence._seconds import Seconds, milliseconds
from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2


@dataclass(frozen=True, slots=True)
class AcquireOrder:
    """Holds the checked arguments of one acquire.

    Attributes:
        resource: the name to lock.
        ttl_ms: how long the lease lasts unless it is renewed.
        wait_ms: how long to wait; 0 tries once, None waits for ever.
        holder: a label for humans; None stands for the process that acquires.
        max_hold_ms: how long the client renews the lease; None renews it until it is released.
        lock_delay_ms: how long the lock stays closed if the lease is lost.
        traceparent: the caller's span; empty without one.
    """

    resource: str
    ttl_ms: int
    wait_ms: int | None
    holder: str | None
    max_hold_ms: int | None
    lock_delay_ms: int = 0
    traceparent: str = ""


def acquire_order(
    resource: str,
    *,
    ttl: Seconds,
    wait: Seconds | None,
    holder: str | None,
    max_hold: Seconds | None,
    lock_delay: Seconds = 0,
) -> AcquireOrder:
    """Check the arguments of an acquire. The server also checks the cluster's greatest ttl.

    Raises:
        InvalidArgumentError: an argument has the wrong type or breaks the contract's bounds.
    """
    check_resource(resource)
    if holder is not None:
        check_holder(holder)
    order = AcquireOrder(
        resource,
        milliseconds("ttl", ttl),
        None if wait is None else milliseconds("wait", wait),
        holder,
        None if max_hold is None else milliseconds("max_hold", max_hold),
        milliseconds("lock_delay", lock_delay),
    )
    if order.ttl_ms < bounds.TTL_MS_MIN:
        raise _invalid("ttl", f"must be at least {bounds.TTL_MS_MIN / 1000} seconds, not {ttl!r}")
    return order


def check_resource(resource: str) -> None:
    """Raise InvalidArgumentError for an invalid resource name.

    The client checks it because the transport would end the whole session for a name that is too long.
    """
    _check_text("resource", resource, bounds.resource_problem)


def check_prefix(prefix: str) -> None:
    """Raise InvalidArgumentError for an invalid start of resource names; empty stands for all."""
    _check_text("prefix", prefix, lambda text: bounds.resource_problem(text) if text else None)


def watch_request(prefix: str, interval: Seconds) -> lock_pb2.WatchLocksRequest:
    """Return the request of a watch, or raise InvalidArgumentError."""
    check_prefix(prefix)
    request = lock_pb2.WatchLocksRequest(prefix=prefix)
    _write_duration(request.interval, milliseconds("interval", interval))
    return request


def check_holder(holder: str) -> None:
    """Raise InvalidArgumentError for an invalid label of a holder."""
    _check_text("holder", holder, partial(bounds.text_problem, bytes_max=bounds.HOLDER_BYTES_MAX))


def _check_text(name: str, text: str, problem_of: Callable[[str], str | None]) -> None:
    if not isinstance(text, str):
        raise _invalid(name, f"must be a str, not {type(text).__name__}")
    try:
        problem = problem_of(text)
    except UnicodeEncodeError as exc:
        raise _invalid(name, f"cannot be encoded as UTF-8: {text!r}") from exc
    if problem:
        raise _invalid(name, problem)


def check_token(token: int) -> None:
    """Raise InvalidArgumentError for an invalid fencing token."""
    if type(token) is not int:
        raise _invalid("token", f"must be an int, not {type(token).__name__}")
    if problem := bounds.fencing_token_problem(token):
        raise _invalid("token", problem)


def _invalid(name: str, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} {problem}", metadata={"field": name})


def write_acquire(
    command: lock_pb2.SessionCommand, order: AcquireOrder, *, lease_id: str, wait_ms: int
) -> None:
    """Fill in an acquire command that asks for a wait of `wait_ms`."""
    if order.traceparent:
        command.traceparent = order.traceparent
    acquire = command.acquire
    acquire.resource = order.resource
    acquire.lease_id = lease_id
    if order.holder:
        acquire.holder = order.holder
    _write_duration(acquire.ttl, order.ttl_ms)
    if wait_ms:
        _write_duration(acquire.wait_timeout, wait_ms)
    if order.lock_delay_ms:
        _write_duration(acquire.lock_delay, order.lock_delay_ms)


def write_release(
    command: lock_pb2.SessionCommand, *, resource: str, lease_id: str, traceparent: str
) -> None:
    """Fill in a release command."""
    if traceparent:
        command.traceparent = traceparent
    release = command.release
    release.resource = resource
    release.lease_id = lease_id


def write_renew(command: lock_pb2.SessionCommand, *, resource: str, lease_id: str) -> None:
    """Fill in a renew command."""
    renew = command.renew
    renew.resource = resource
    renew.lease_id = lease_id


def duration_ms(duration: Duration) -> float:
    """Return a duration in milliseconds without rounding; `ToMilliseconds` is slower and rounds."""
    return duration.seconds * 1e3 + duration.nanos / 1e6


def _write_duration(duration: Duration, length_ms: int) -> None:
    duration.seconds, rest_ms = divmod(length_ms, 1000)
    duration.nanos = rest_ms * 1_000_000
