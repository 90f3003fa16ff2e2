"""Define the values of calls and answers; each is frozen, and checked when it is made.

The bounds are the contract's (redfence_proto.bounds); errors name the field as the proto spells it.
"""

from __future__ import annotations

import hashlib
from dataclasses import field

from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2
from redfence_server.errors import InvalidFieldError
from redfence_server.values import value


def check_resource(resource: str) -> str:
    """Return the resource name if it is valid.

    Raises:
        InvalidFieldError: the name is not valid.
    """
    if problem := bounds.resource_problem(resource):
        raise InvalidFieldError("resource", problem, lock_pb2.ERROR_REASON_INVALID_RESOURCE)
    return resource


def check_holder(holder: str) -> str:
    """Return the holder label if it is valid.

    Raises:
        InvalidFieldError: the label is not valid.
    """
    if problem := bounds.text_problem(holder, bytes_max=bounds.HOLDER_BYTES_MAX):
        raise InvalidFieldError("holder", problem, lock_pb2.ERROR_REASON_INVALID_HOLDER)
    return holder


def check_reason(reason: str) -> str:
    """Return the reason of an operator if it is valid.

    Raises:
        InvalidFieldError: the reason is not valid.
    """
    if problem := bounds.text_problem(reason, bytes_max=bounds.REASON_BYTES_MAX):
        raise InvalidFieldError("reason", problem, lock_pb2.ERROR_REASON_INVALID_REASON)
    return reason


def check_ttl_ms(ttl_ms: int | None, *, ttl_ms_max: int) -> int:
    """Return the ttl if it is valid; None stands for a missing one.

    Raises:
        InvalidFieldError: the ttl is missing or out of bounds.
    """
    if ttl_ms is None:
        raise invalid_ttl("is missing", ttl_ms_max=ttl_ms_max)
    if not bounds.TTL_MS_MIN <= ttl_ms <= ttl_ms_max:
        raise invalid_ttl(f"is {ttl_ms / 1000:.10g} s", ttl_ms_max=ttl_ms_max)
    return ttl_ms


def invalid_ttl(problem: str, *, ttl_ms_max: int) -> InvalidFieldError:
    """Return the error for a ttl; its message and its metadata have the bounds."""
    limits = f"at least {bounds.TTL_MS_MIN / 1000:g} s and at most {ttl_ms_max / 1000:.10g} s are allowed"
    metadata = {"min": f"{bounds.TTL_MS_MIN}ms", "max": f"{ttl_ms_max}ms"}
    return InvalidFieldError("ttl", f"{problem}; {limits}", lock_pb2.ERROR_REASON_INVALID_TTL, metadata)


def check_lock_delay_ms(lock_delay_ms: int, *, ttl_ms: int, ttl_ms_max: int, setter: str = "") -> int:
    """Return the lock delay if it is valid: with the ttl, no longer than the greatest ttl.

    The message names the `setter` of the delay, if that is not the caller.

    Raises:
        InvalidFieldError: it is negative or too long.
    """
    if 0 <= lock_delay_ms <= ttl_ms_max - ttl_ms:
        return lock_delay_ms
    most_ms = ttl_ms_max - ttl_ms
    problem = (
        f"is {lock_delay_ms / 1000:.10g} s{setter}; with this ttl, at least 0 s and at most "
        f"{most_ms / 1000:.10g} s are allowed, because no node keeps a hold longer than the greatest ttl"
    )
    metadata = {"max": f"{most_ms}ms"}
    raise InvalidFieldError("lock_delay", problem, lock_pb2.ERROR_REASON_INVALID_LOCK_DELAY, metadata)


def check_token(token: int) -> int:
    """Return the fencing token if it is valid.

    Raises:
        InvalidFieldError: the token is zero or at least 2^53.
    """
    if problem := bounds.fencing_token_problem(token):
        raise InvalidFieldError("fencing_token", problem, lock_pb2.ERROR_REASON_INVALID_FENCING_TOKEN)
    return token


@value
class LeaseId:
    """The secret that proves ownership of a lease; its repr hides the secret from logs.

    Attributes:
        secret: 32 lower-case hex digits.
        digest: the hash that the nodes store; it proves nothing.
    """

    secret: str = field(repr=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        if problem := bounds.lease_id_problem(self.secret):
            raise InvalidFieldError("lease_id", problem, lock_pb2.ERROR_REASON_INVALID_LEASE_ID)
        object.__setattr__(self, "digest", hashlib.sha256(self.secret.encode()).hexdigest())


@value
class AcquireCall:
    """A checked Acquire.

    Attributes:
        wait_ms: how long to wait for a held resource; 0 means try once.
        answer_within_ms: the time from arrival to the caller's deadline; None if it has none.
        peer: whose part of the server the call uses; "" for a call without a limit of its own.
        lock_delay_ms: how long the lock stays closed if the lease is lost.
    """

    resource: str
    lease_id: LeaseId
    ttl_ms: int
    holder: str
    wait_ms: int
    arrived_at_ms: float
    answer_within_ms: float | None = None
    connection: str = ""
    lock_delay_ms: int = 0
    peer: str = ""

    @property
    def hold_ms(self) -> int:
        """How long a node keeps the hold without a renewal."""
        return self.ttl_ms + self.lock_delay_ms


@value
class Lease:
    """A granted lease.

    Attributes:
        validity_ms: counts from the instant at which the caller sent its request.
        nonce: the nonce of the granted attempt, for an undo.
    """

    token: int
    validity_ms: int
    nonce: str = field(default="", compare=False)
