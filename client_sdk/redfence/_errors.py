"""Defines the SDK's exceptions, and translates the errors of servers into them.

    RedfenceError
    ├── InvalidArgumentError    an argument is wrong: fix the call, do not retry
    ├── NotAcquiredError        another client holds the lock
    │   ├── LockHeldError       the call did not wait (wait=0)
    │   └── AcquireTimeoutError the wait ended first
    ├── LeaseLostError          the lease ended while it was in use: stop the protected work
    ├── UnavailableError        no server, or no quorum; nothing was granted or acknowledged: retry later
    │   └── OverloadedError     a queue is full: retry after `retry_after`
    ├── OutcomeUnknownError     no answer: the client releases any grant; repeat a write with the same token
    ├── AccessDeniedError       the credentials are refused, or do not permit this: get others, do not retry
    ├── StaleTokenError         storage: a later holder has accessed the resource; acquire again
    ├── NotFoundError           storage: the key does not exist
    ├── ServerError             a bug in the server
    │   └── WrongServiceError   the address is that of another service
    └── ClosedError             the client is closed

The `ErrorReason` decides the exception. Without a reason, the status code decides. The text never decides.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import grpc

from redfence_proto import rich_error
from redfence_proto.v1 import lock_pb2

_NO_METADATA: Mapping[str, str] = MappingProxyType({})


class RedfenceError(Exception):
    """The base class of all errors that redfence raises.

    Attributes:
        error_reason: the contract's `ErrorReason` without its prefix, e.g. "QUORUM_UNAVAILABLE"; ""
            if the server sent none or one that this SDK does not know, or if the SDK made the error.
        metadata: details, as the contract documents them for that reason.
        retry_after: seconds after which a retry can succeed, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        error_reason: str = "",
        metadata: Mapping[str, str] = _NO_METADATA,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.error_reason = error_reason
        self.metadata = dict(metadata)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the error with all its attributes, because process pools pickle errors."""
        # The default would call `__init__` with the message alone.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[RedfenceError], args: tuple[Any, ...], attributes: Mapping[str, Any]
) -> RedfenceError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class InvalidArgumentError(RedfenceError, ValueError):
    """An argument was wrong, and nothing was changed."""

    @property
    def field(self) -> str:
        """The name of the wrong argument, or of the contract's field; "" if it is unknown."""
        return self.metadata.get("field", "")


class NotAcquiredError(RedfenceError):
    """Another client holds the lock.

    Attributes:
        resource: the name of the lock.
        holder: the present holder's label; "" if it has none or no holder was seen.
        token: the present holder's fencing token; None if no holder was seen.
        remaining: seconds until the present lease ends unless it is renewed; None if no holder was seen.
        position: the caller's place in the server's queue when its wait ended; 1 is next. 0 if it
            had no place or the place is unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str,
        holder: str = "",
        token: int | None = None,
        remaining: float | None = None,
        position: int = 0,
    ) -> None:
        super().__init__(message)
        self.resource = resource
        self.holder = holder
        self.token = token
        self.remaining = remaining
        self.position = position


class LockHeldError(NotAcquiredError):
    """Another client holds the lock, and the call did not wait."""

    def __init__(
        self, *, resource: str, holder: str = "", token: int | None = None, remaining: float | None = None
    ) -> None:
        super().__init__(
            f"{resource!r} is held{_by(holder)}",
            resource=resource,
            holder=holder,
            token=token,
            remaining=remaining,
        )


class AcquireTimeoutError(NotAcquiredError, TimeoutError):
    """The wait of `wait` seconds ended before the lock was granted."""

    def __init__(
        self,
        *,
        wait: float,
        resource: str,
        holder: str = "",
        token: int | None = None,
        remaining: float | None = None,
        position: int = 0,
    ) -> None:
        in_line = f"; still {_ordinal(position)} in line" if position else ""
        super().__init__(
            f"{resource!r} was still held{_by(holder)} after {wait:g} s{in_line}",
            resource=resource,
            holder=holder,
            token=token,
            remaining=remaining,
            position=position,
        )


def _by(holder: str) -> str:
    return f" by {holder!r}" if holder else ""


def _ordinal(number: int) -> str:
    teens = number % 100 in {11, 12, 13}
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


class LossReason(enum.Enum):
    """Why a lease no longer protects its work."""

    EXPIRED = "its validity ended before a renewal was confirmed"
    NOT_HELD = "a quorum of nodes no longer holds it"
    FORCED = "an operator ended it by a forced release"
    MAX_HOLD = "it was held for max_hold, so the client stopped renewing it"
    CLIENT_CLOSED = "the client was closed"
    RELEASED = "it was released"
    FORKED = "the parent of this process holds it"


class LeaseLostError(RedfenceError):
    """The lease no longer protects the work: stop, and acquire again.

    Attributes:
        resource: the name of the lock.
        token: the fencing token of the lost lease.
        reason: why the lease ended.
    """

    def __init__(self, *, resource: str, token: int, reason: LossReason) -> None:
        super().__init__(f"the lease of {resource!r} (token {token}) is over: {reason.value}")
        self.resource = resource
        self.token = token
        self.reason = reason


class UnavailableError(RedfenceError):
    """No server was reachable, or it reached no quorum or no disk. Nothing was granted or acknowledged."""


class OverloadedError(UnavailableError):
    """A queue of the server is full; retry after `retry_after`."""

    @property
    def scope(self) -> str:
        """Where too many acquires wait: "resource", "server" or "connection"; "" if another queue is full.

        For a watch, "server" or "prefix": too many watches are open, or too many locks have its prefix.
        """
        return self.metadata.get("scope", "")


class OutcomeUnknownError(RedfenceError):
    """No answer came in time, or the call was cut off; the request may or may not have taken effect."""


class AccessDeniedError(RedfenceError):
    """The server refused the credentials, or its policy does not grant this to their principal.

    `error_reason` tells which: "UNAUTHENTICATED" or "PERMISSION_DENIED". A retry with the same credentials
    fails again.
    """

    @property
    def principal(self) -> str:
        """The principal as the server knows it, e.g. "token:billing"; "" if the server did not say."""
        return self.metadata.get("principal", "")


class StaleTokenError(RedfenceError):
    """The storage has seen a higher fencing token, so this holder's lease is over; nothing was changed."""

    @property
    def highest_token(self) -> int:
        """The highest token seen for the resource; 0 if the storage did not say."""
        return int(self.metadata.get("highest_token", "0"))


class NotFoundError(RedfenceError):
    """The storage has no such key; a fenced read has still raised the highest token."""


class ServerError(RedfenceError):
    """The server failed in a way that the contract does not define."""


class WrongServiceError(ServerError):
    """The address is that of another service, or of a server that is too old; it changed nothing."""


class ClosedError(RedfenceError):
    """The client is closed; create a new one."""


BY_REASON: Mapping[int, type[RedfenceError]] = MappingProxyType(
    {
        lock_pb2.ERROR_REASON_INVALID_RESOURCE: InvalidArgumentError,
        lock_pb2.ERROR_REASON_INVALID_TTL: InvalidArgumentError,
        lock_pb2.ERROR_REASON_INVALID_WAIT_TIMEOUT: InvalidArgumentError,
        lock_pb2.ERROR_REASON_INVALID_LEASE_ID: InvalidArgumentError,
        lock_pb2.ERROR_REASON_INVALID_HOLDER: InvalidArgumentError,
        lock_pb2.ERROR_REASON_INVALID_FENCING_TOKEN: InvalidArgumentError,
        lock_pb2.ERROR_REASON_UNKNOWN_COMMAND: ServerError,
        lock_pb2.ERROR_REASON_INVALID_COMMAND_ID: ServerError,
        lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE: UnavailableError,
        lock_pb2.ERROR_REASON_VALIDITY_EXHAUSTED: UnavailableError,
        lock_pb2.ERROR_REASON_DRAINING: UnavailableError,
        lock_pb2.ERROR_REASON_TOO_MANY_WAITERS: OverloadedError,
        lock_pb2.ERROR_REASON_TOO_MANY_COMMANDS: OverloadedError,
        lock_pb2.ERROR_REASON_CANCELLED: UnavailableError,
        lock_pb2.ERROR_REASON_STALE_TOKEN: StaleTokenError,
        lock_pb2.ERROR_REASON_INVALID_KEY: InvalidArgumentError,
        lock_pb2.ERROR_REASON_INVALID_VALUE: InvalidArgumentError,
        lock_pb2.ERROR_REASON_KEY_NOT_FOUND: NotFoundError,
        lock_pb2.ERROR_REASON_TOO_MANY_WRITES: OverloadedError,
        lock_pb2.ERROR_REASON_TOO_MANY_NEW_RESOURCES: OverloadedError,
        lock_pb2.ERROR_REASON_STORAGE_FAILED: UnavailableError,
        lock_pb2.ERROR_REASON_INVALID_PAGE: InvalidArgumentError,
        lock_pb2.ERROR_REASON_INVALID_REASON: InvalidArgumentError,
        lock_pb2.ERROR_REASON_INVALID_INTERVAL: InvalidArgumentError,
        lock_pb2.ERROR_REASON_WATCH_LIMIT: OverloadedError,
        lock_pb2.ERROR_REASON_INVALID_LOCK_DELAY: InvalidArgumentError,
        lock_pb2.ERROR_REASON_INTERNAL: ServerError,
        lock_pb2.ERROR_REASON_MALFORMED_MESSAGE: InvalidArgumentError,
        lock_pb2.ERROR_REASON_UNAUTHENTICATED: AccessDeniedError,
        lock_pb2.ERROR_REASON_PERMISSION_DENIED: AccessDeniedError,
    }
)

BY_CODE: Mapping[grpc.StatusCode, type[RedfenceError]] = MappingProxyType(
    {
        # The server ended the stream with OK because it is stopping.
        grpc.StatusCode.OK: UnavailableError,
        grpc.StatusCode.CANCELLED: OutcomeUnknownError,
        grpc.StatusCode.UNKNOWN: ServerError,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
        grpc.StatusCode.DEADLINE_EXCEEDED: OutcomeUnknownError,
        grpc.StatusCode.NOT_FOUND: NotFoundError,
        grpc.StatusCode.ALREADY_EXISTS: ServerError,
        grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
        grpc.StatusCode.FAILED_PRECONDITION: ServerError,
        grpc.StatusCode.ABORTED: UnavailableError,
        grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
        grpc.StatusCode.UNIMPLEMENTED: WrongServiceError,
        grpc.StatusCode.INTERNAL: ServerError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.DATA_LOSS: ServerError,
        grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
    }
)

_CODE_BY_NUMBER: Mapping[int, grpc.StatusCode] = MappingProxyType(
    {code.value[0]: code for code in grpc.StatusCode}
)


def from_wire(error: lock_pb2.CommandError) -> RedfenceError:
    """Return the exception for the error of one session command."""
    code = _CODE_BY_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
    retry_after_ms = error.retry_after.ToMilliseconds() if error.HasField("retry_after") else None
    return _build(code, error.reason, error.message, metadata=error.metadata, retry_after_ms=retry_after_ms)


def from_rpc_error(error: grpc.RpcError) -> RedfenceError:
    """Return the exception for a failed gRPC call of a lock server or storage; raise it `from` the error."""
    # grpc raises an object that is also a Call. The two kinds of grpc have different metadata
    # types; both are pairs.
    call: Any = error
    code: grpc.StatusCode = call.code()
    rich = rich_error.from_trailing_metadata(call.trailing_metadata())
    if rich is None:
        text = call.details() or code.value[1]
        if code is grpc.StatusCode.UNIMPLEMENTED:
            text += "; is the address that of another service, or of an older server?"
        return _build(code, lock_pb2.ERROR_REASON_UNSPECIFIED, text)
    return _build(code, rich.reason, rich.message, metadata=rich.metadata, retry_after_ms=rich.retry_after_ms)


def _build(
    code: grpc.StatusCode,
    reason: int,
    message: str,
    *,
    metadata: Mapping[str, str] = _NO_METADATA,
    retry_after_ms: int | None = None,
) -> RedfenceError:
    # A newer server may send reasons that this table lacks. Then the status code decides.
    kind = BY_REASON.get(reason) or BY_CODE[code]
    name = ""
    if reason in BY_REASON:
        name = lock_pb2.ErrorReason.Name(lock_pb2.ErrorReason.ValueType(reason)).removeprefix("ERROR_REASON_")
    retry_after = None if retry_after_ms is None else retry_after_ms / 1000
    return kind(message, error_reason=name, metadata=metadata, retry_after=retry_after)
