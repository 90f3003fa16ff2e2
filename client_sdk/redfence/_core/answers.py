"""Interprets the server's answer to an acquire: grant, retry or refusal. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeAlias

from redfence._core.calls import AcquireCall
from redfence._errors import (
    AccessDeniedError,
    AcquireTimeoutError,
    InvalidArgumentError,
    LockHeldError,
    NotAcquiredError,
    RedfenceError,
)
from redfence._messages import requests
from redfence._messages.server_errors import from_wire
from redfence_proto.v1 import lock_pb2

# A server may end a wait a little early. The client asks for the rest only if the rest is longer than a
# round trip and longer than two clocks may drift apart, because it would wait at the end of the queue.
WAIT_REST_MS = 20
WAIT_REST_RATIO = 0.001

_UNAVAILABLE_CODE = 14
# A server ends a stream when it stops or when the stream has too many commands. It cancels the acquires
# first.
_LINK_ENDS = frozenset({lock_pb2.ERROR_REASON_DRAINING, lock_pb2.ERROR_REASON_CANCELLED})


class Retry(enum.Enum):
    """How the client sends a refused acquire again."""

    SAME_SERVER = enum.auto()
    """To the same server, because the wait is not over."""
    OTHER_SERVER = enum.auto()
    """To another server, because this one was unavailable, or full without another wait of this client."""
    AFTER_ANOTHER_WAIT = enum.auto()
    """To the same server, once another acquire of this client stops waiting: it admits no more waits."""
    NEXT_LINK = enum.auto()
    """On the next link, because this server is stopping or is ending this stream."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The server granted the lease.

    Attributes:
        token: the fencing token.
        validity_ms: the validity, counted from just before the request was sent.
    """

    token: int
    validity_ms: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The acquire failed for good.

    Attributes:
        error: the error that the caller gets.
        release: whether a node may still have a hold that only a Release removes.
    """

    error: RedfenceError
    release: bool


AcquireAnswer: TypeAlias = Granted | Retry | Refused


def read_acquire(
    call: AcquireCall,
    result: lock_pb2.SessionResult,
    *,
    now_ms: float,
    address_count: int,
    others_wait: bool,
) -> AcquireAnswer:
    """Return what the answer to `call` means.

    Args:
        call: the acquire.
        result: the server's answer.
        now_ms: the present instant.
        address_count: how many servers the client can choose from.
        others_wait: whether other acquires of this client wait at the same server.
    """
    answer = result.acquire
    if answer.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED:
        return Granted(answer.lease.fencing_token, requests.duration_ms(answer.lease.validity))
    if result.WhichOneof("result") != "acquire":
        return _read_error(call, result.error, address_count=address_count, others_wait=others_wait)
    if call.wait_ms_left(now_ms) > WAIT_REST_MS + call.requested_wait_ms * WAIT_REST_RATIO:
        return Retry.SAME_SERVER
    # An earlier attempt with this lease id may have left a hold, and the server's undo does not end a
    # shared hold.
    return Refused(_not_acquired(call, answer), release=call.times_sent > 1)


def _read_error(
    call: AcquireCall, error: lock_pb2.CommandError, *, address_count: int, others_wait: bool
) -> AcquireAnswer:
    if error.reason in _LINK_ENDS:
        return Retry.NEXT_LINK
    full = error.reason == lock_pb2.ERROR_REASON_TOO_MANY_WAITERS
    if full and others_wait and error.metadata.get("scope") == "connection":
        return Retry.AFTER_ANOTHER_WAIT
    # If the client leaves this server, its other waiting acquires lose their places in the queue.
    server_failed = error.code == _UNAVAILABLE_CODE or (full and not others_wait)
    if server_failed and call.refusals + 1 < address_count:
        return Retry.OTHER_SERVER
    refusal = from_wire(error)
    if full:
        # The server did not begin this attempt, but it may have begun an earlier one.
        return Refused(refusal, release=call.times_sent > 1)
    if isinstance(refusal, AccessDeniedError):
        # The server begins nothing that it denies.
        return Refused(refusal, release=call.times_sent > 1)
    return Refused(refusal, release=not isinstance(refusal, InvalidArgumentError))


def _not_acquired(call: AcquireCall, answer: lock_pb2.AcquireResponse) -> NotAcquiredError:
    seen = answer.HasField("current")
    current = answer.current
    present: dict[str, Any] = {
        "resource": call.order.resource,
        "holder": current.holder,
        "token": current.fencing_token if seen else None,
        "remaining": requests.duration_ms(current.remaining) / 1000 if seen else None,
        "closed": current.closed,
    }
    if call.order.wait_ms == 0:
        return LockHeldError(**present)
    wait = (call.order.wait_ms or 0) / 1000
    return AcquireTimeoutError(wait=wait, position=answer.position, **present)
