"""What an answer to an acquire means for its caller. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from redfence._core.calls import AcquireCall
from redfence._errors import (
    AcquireTimeoutError,
    InvalidArgumentError,
    LockHeldError,
    NotAcquiredError,
    RedfenceError,
    from_wire,
)
from redfence._messages import requests
from redfence_proto.v1 import lock_pb2

# What is left of a wait when a server says that it is over is asked for only if it is more than a round trip, and more than
# two clocks may part meanwhile: it would be waited at the end of the queue.
WAIT_REST_MS = 20
WAIT_REST_RATIO = 0.001

_UNAVAILABLE_CODE = 14
# A server that ends a stream, because it stops or because more was asked than it allows, cancels the acquires on it first.
_LINK_ENDS = frozenset({lock_pb2.ERROR_REASON_DRAINING, lock_pb2.ERROR_REASON_CANCELLED})


class Retry(enum.Enum):
    """The acquisition goes on: send it again."""

    SAME_SERVER = enum.auto()
    """To the same server: the wait is not over."""
    OTHER_SERVER = enum.auto()
    """To another server: this one has no quorum, and perhaps only this one."""
    AFTER_ANOTHER_WAIT = enum.auto()
    """To the same server, once another acquire of this client does not wait there any more."""
    NEXT_LINK = enum.auto()
    """On the next link: this server is stopping, or it is ending this stream."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease is the caller's.

    Attributes:
        token: its fencing token.
        validity_ms: how long it may be counted on from the instant before the sending.
    """

    token: int
    validity_ms: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The acquisition is over.

    Attributes:
        error: for the caller.
        release: whether a node may keep a hold that only a Release removes.
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
    """Judge a result of `call`; `others_wait` tells whether other acquires of this client wait at the same server."""
    answer = result.acquire
    if answer.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED:
        return Granted(answer.lease.fencing_token, requests.duration_ms(answer.lease.validity))
    if result.WhichOneof("result") != "acquire":
        return _read_error(call, result.error, address_count=address_count, others_wait=others_wait)
    if call.wait_ms_left(now_ms) > WAIT_REST_MS + call.requested_wait_ms * WAIT_REST_RATIO:
        return Retry.SAME_SERVER
    # An earlier sending may have left a hold that counts as shared, which the server's undo spares.
    return Refused(_not_acquired(call, answer), release=call.times_sent > 1)


def _read_error(
    call: AcquireCall, error: lock_pb2.Error, *, address_count: int, others_wait: bool
) -> AcquireAnswer:
    if error.reason in _LINK_ENDS:
        return Retry.NEXT_LINK
    full = error.reason == lock_pb2.ERROR_REASON_TOO_MANY_WAITERS
    if full and others_wait and error.metadata.get("scope") == "connection":
        return Retry.AFTER_ANOTHER_WAIT
    # Leaving a server costs the others that wait there their places.
    server_failed = error.code == _UNAVAILABLE_CODE or (full and not others_wait)
    if server_failed and call.refusals + 1 < address_count:
        return Retry.OTHER_SERVER
    refusal = from_wire(error)
    if full:
        # It was not begun. An earlier sending may have been.
        return Refused(refusal, release=call.times_sent > 1)
    return Refused(refusal, release=not isinstance(refusal, InvalidArgumentError))


def _not_acquired(call: AcquireCall, answer: lock_pb2.AcquireResponse) -> NotAcquiredError:
    seen = answer.HasField("current")
    current = answer.current
    by = f" by {current.holder!r}" if current.holder else ""
    name = call.order.resource
    if call.order.wait_ms == 0:
        kind: type[NotAcquiredError] = LockHeldError
        message = f"{name!r} is held{by}"
    else:
        kind = AcquireTimeoutError
        message = f"{name!r} was still held{by} after {(call.order.wait_ms or 0) / 1000:g} s"
        if answer.position:
            message += f"; still {_ordinal(answer.position)} in line"
    return kind(
        message,
        resource=name,
        holder=current.holder,
        token=current.fencing_token if seen else None,
        remaining=requests.duration_ms(current.remaining) / 1000 if seen else None,
        position=answer.position,
    )


def _ordinal(number: int) -> str:
    teens = number % 100 in {11, 12, 13}
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
