"""Translates the errors of servers into the SDK's exceptions.

The `ErrorReason` decides the exception. Without a reason, the status code decides. The text never decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import grpc

from redfence._errors import (
    AccessDeniedError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    OverloadedError,
    RedfenceError,
    ServerError,
    StaleTokenError,
    UnavailableError,
    WrongServiceError,
)
from redfence_proto import rich_error
from redfence_proto.v1 import lock_pb2

_NO_METADATA: Mapping[str, str] = MappingProxyType({})

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
        lock_pb2.ERROR_REASON_TOO_MANY_BUFFERED_BYTES: OverloadedError,
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
