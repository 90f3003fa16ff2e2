"""What can go wrong, as exceptions; and the two tables that translate a server's word into one of them.

    RedfenceError
    ├── InvalidArgumentError    the call was wrong: mend it, do not retry
    ├── NotAcquiredError        somebody else holds the lock
    │   ├── LockHeldError       it was tried once (wait=0)
    │   └── AcquireTimeoutError the wait ran out
    ├── LeaseLostError          the lease ended under its holder: stop the protected work
    ├── UnavailableError        no server, or no quorum behind it; nothing was granted or acknowledged: retry later
    │   └── OverloadedError     a queue is full: retry after `retry_after`
    ├── OutcomeUnknownError     no answer; a Release was sent for what may have been granted, and a write to a storage
    │                           may be repeated with the same token
    ├── AccessDeniedError       the credentials were refused
    ├── StaleTokenError         storage: a later holder was here before; acquire anew
    ├── NotFoundError           storage: there is no such key
    ├── ServerError             a defect, or a server that does not know what it was asked
    └── ClosedError             the client was closed

An error is translated by its `ErrorReason` if the server gave one, else by its status code, never by its text.
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
    """The root of everything redfence raises on purpose.

    Attributes:
        error_reason: the contract's `ErrorReason` without its prefix, e.g. "QUORUM_UNAVAILABLE"; "" if the error did
            not come from a server.
        metadata: details as the contract documents them at that reason.
        retry_after: seconds after which trying again can help, or None.
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


class InvalidArgumentError(RedfenceError, ValueError):
    """The call was wrong, and nothing was changed."""

    @property
    def field(self) -> str:
        """The name of the argument, or of the contract's field; "" if it is not known."""
        return self.metadata.get("field", "")


class NotAcquiredError(RedfenceError):
    """Somebody else holds the lock.

    Attributes:
        resource: the lock's name.
        holder: the present holder's label; "" if it has none or was not seen.
        token: the present holder's fencing token; None if not seen.
        remaining: seconds until its lease ends unless renewed; None if not seen.
        position: the caller's place in the server's queue when its wait ran out, 1 being the next to be granted; 0 if it
            had none or it is not known.
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
    """The lock was tried once and somebody else holds it."""


class AcquireTimeoutError(NotAcquiredError, TimeoutError):
    """The lock did not become free within the wait."""


class LossReason(enum.Enum):
    """Why a lease no longer protects anything."""

    EXPIRED = "its validity ended before a renewal was confirmed"
    NOT_HELD = "a quorum of nodes no longer holds it"
    MAX_HOLD = "it was held for max_hold and therefore not renewed any more"
    CLIENT_CLOSED = "the client was closed"
    RELEASED = "it was released"


class LeaseLostError(RedfenceError):
    """The lease does not protect the work any more: stop, and acquire anew.

    Attributes:
        resource: the lock's name.
        token: the fencing token that is now out of date.
        reason: why.
    """

    def __init__(self, *, resource: str, token: int, reason: LossReason) -> None:
        super().__init__(f"the lease of {resource!r} (token {token}) is over: {reason.value}")
        self.resource = resource
        self.token = token
        self.reason = reason


class UnavailableError(RedfenceError):
    """No server could be reached, or it reached no quorum or no disk: nothing was granted, and nothing acknowledged."""


class OverloadedError(UnavailableError):
    """A server's queue is full."""

    @property
    def scope(self) -> str:
        """What has too many waiters: "resource", "server" or "connection"; "" if something else is full."""
        return self.metadata.get("scope", "")


class OutcomeUnknownError(RedfenceError):
    """No answer came in time, or the call was cut off; what was asked may or may not have happened."""


class AccessDeniedError(RedfenceError):
    """The server refused the credentials."""


class StaleTokenError(RedfenceError):
    """The storage has seen a greater fencing token: this holder's time is over, and nothing was changed."""

    @property
    def highest_token(self) -> int:
        """The highest token seen for the resource; 0 if the storage did not say."""
        return int(self.metadata.get("highest_token", "0"))


class NotFoundError(RedfenceError):
    """The storage has no such key; a fenced read has shut out lower tokens all the same."""


class ServerError(RedfenceError):
    """The server failed in a way the contract does not foresee."""


class ClosedError(RedfenceError):
    """The client was closed."""


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
        lock_pb2.ERROR_REASON_STORAGE_FAILED: UnavailableError,
        lock_pb2.ERROR_REASON_INVALID_PAGE: InvalidArgumentError,
        lock_pb2.ERROR_REASON_INTERNAL: ServerError,
        lock_pb2.ERROR_REASON_MALFORMED_MESSAGE: InvalidArgumentError,
    }
)

BY_CODE: Mapping[grpc.StatusCode, type[RedfenceError]] = MappingProxyType(
    {
        # A stream that ended well although it should not have: the server is going away.
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
        grpc.StatusCode.UNIMPLEMENTED: ServerError,
        grpc.StatusCode.INTERNAL: ServerError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.DATA_LOSS: ServerError,
        grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
    }
)

_CODE_BY_NUMBER: Mapping[int, grpc.StatusCode] = MappingProxyType(
    {code.value[0]: code for code in grpc.StatusCode}
)


def from_wire(error: lock_pb2.Error) -> RedfenceError:
    """Translate the error of one command of a session."""
    code = _CODE_BY_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
    retry_after_ms = error.retry_after.ToMilliseconds() if error.HasField("retry_after") else None
    return _build(code, error.reason, error.message, metadata=error.metadata, retry_after_ms=retry_after_ms)


def from_rpc_error(error: grpc.RpcError) -> RedfenceError:
    """Translate a failed gRPC call, of a lock server or a storage; raise the result `from` it to keep the cause."""
    # What grpc raises is a Call as well, whose metadata differ between its two flavours; both are pairs.
    call: Any = error
    code: grpc.StatusCode = call.code()
    rich = rich_error.from_trailing_metadata(call.trailing_metadata())
    if rich is None:
        return _build(code, lock_pb2.ERROR_REASON_UNSPECIFIED, call.details() or code.value[1])
    return _build(code, rich.reason, rich.message, metadata=rich.metadata, retry_after_ms=rich.retry_after_ms)


def _build(
    code: grpc.StatusCode,
    reason: int,
    message: str,
    *,
    metadata: Mapping[str, str] = _NO_METADATA,
    retry_after_ms: int | None = None,
) -> RedfenceError:
    # A newer server may know reasons that this table does not; its status code still tells the kind.
    kind = BY_REASON.get(reason) or BY_CODE[code]
    name = ""
    if reason in BY_REASON:
        name = lock_pb2.ErrorReason.Name(lock_pb2.ErrorReason.ValueType(reason)).removeprefix("ERROR_REASON_")
    retry_after = None if retry_after_ms is None else retry_after_ms / 1000
    return kind(message, error_reason=name, metadata=metadata, retry_after=retry_after)
