"""Map each error of the server to the status code and reason that callers see."""

from __future__ import annotations

from typing import NoReturn

import grpc
import structlog

from redfence_proto.rich_error import RichError, to_trailing_metadata
from redfence_proto.v1 import lock_pb2
from redfence_server.errors import (
    AccessError,
    AcquireCancelledError,
    DrainingError,
    InvalidFieldError,
    NoQuorumError,
    OverloadedError,
    PermissionDeniedError,
    TooManyCommandsError,
    TooManyNewResourcesError,
    TooManyWaitersError,
    UnauthenticatedError,
    ValidityExhaustedError,
    WatchLimitError,
)

_UNAVAILABLE, _EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
# The status, the reason, and after how many ms a retry can help. A lost node is dialled again within 200 ms.
_CODES: dict[type[Exception], tuple[grpc.StatusCode, lock_pb2.ErrorReason.ValueType, int | None]] = {
    NoQuorumError: (_UNAVAILABLE, lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE, 200),
    ValidityExhaustedError: (_UNAVAILABLE, lock_pb2.ERROR_REASON_VALIDITY_EXHAUSTED, 100),
    DrainingError: (_UNAVAILABLE, lock_pb2.ERROR_REASON_DRAINING, 50),
    TooManyWaitersError: (_EXHAUSTED, lock_pb2.ERROR_REASON_TOO_MANY_WAITERS, 1_000),
    WatchLimitError: (_EXHAUSTED, lock_pb2.ERROR_REASON_WATCH_LIMIT, None),
    TooManyCommandsError: (_EXHAUSTED, lock_pb2.ERROR_REASON_TOO_MANY_COMMANDS, None),
    TooManyNewResourcesError: (_EXHAUSTED, lock_pb2.ERROR_REASON_TOO_MANY_NEW_RESOURCES, 1_000),
    UnauthenticatedError: (grpc.StatusCode.UNAUTHENTICATED, lock_pb2.ERROR_REASON_UNAUTHENTICATED, None),
    PermissionDeniedError: (
        grpc.StatusCode.PERMISSION_DENIED,
        lock_pb2.ERROR_REASON_PERMISSION_DENIED,
        None,
    ),
    AcquireCancelledError: (grpc.StatusCode.CANCELLED, lock_pb2.ERROR_REASON_CANCELLED, None),
}
_INTERNAL = RichError(lock_pb2.ERROR_REASON_INTERNAL, "internal error in the server; see its log")


def describe(error: Exception, *, where: str) -> tuple[grpc.StatusCode, RichError]:
    """Return the status and details that a caller sees; log an error of an unknown class as internal."""
    if isinstance(error, InvalidFieldError):
        metadata = {"field": error.field_name, **error.metadata} if error.field_name else {}
        return grpc.StatusCode.INVALID_ARGUMENT, RichError(error.reason, str(error), metadata)
    if type(error) in _CODES:
        code, reason, retry_ms = _CODES[type(error)]
        return code, RichError(reason, str(error), _metadata(error), retry_ms)
    structlog.get_logger().error("internal_error", where=where, exc_info=error)
    return grpc.StatusCode.INTERNAL, _INTERNAL


def _metadata(error: Exception) -> dict[str, str]:
    match error:
        case NoQuorumError(silent=silent) if silent:
            return {"nodes": silent}
        case ValidityExhaustedError(elapsed_ms=elapsed_ms):
            return {"elapsed_ms": f"{elapsed_ms:.0f}"}
        case (
            TooManyWaitersError(limit=limit, scope=scope)
            | TooManyCommandsError(limit=limit, scope=scope)
            | WatchLimitError(limit=limit, scope=scope)
        ):
            return {"limit": str(limit), "scope": scope}
        case AccessError(details=details):
            return dict(details)
        case OverloadedError(limit=limit):
            return {"limit": str(limit)}
    return {}


async def abort(
    context: grpc.aio.ServicerContext[object, object], code: grpc.StatusCode, error: RichError
) -> NoReturn:
    """End a call with a status that carries the error's details."""
    await context.abort(code, error.message, to_trailing_metadata(code.value[0], error))
    raise AssertionError("abort raises")  # pragma: no cover


def to_message(code: grpc.StatusCode, error: RichError) -> lock_pb2.CommandError:
    """Return the error as the result of a command on a stream."""
    message = lock_pb2.CommandError(
        code=code.value[0], reason=error.reason, message=error.message, metadata=error.metadata
    )
    if error.retry_after_ms is not None:
        message.retry_after.FromMilliseconds(error.retry_after_ms)
    return message
