"""One table: what went wrong in the server's terms -> the status code and reason that callers see."""

from __future__ import annotations

from typing import NoReturn

import grpc

from redfence_proto.rich_error import RichError, to_trailing_metadata
from redfence_proto.v1 import lock_pb2
from redfence_server.errors import (
    DrainingError,
    InvalidFieldError,
    NoQuorumError,
    OverloadedError,
    RedfenceServerError,
    TooManyCommandsError,
    TooManyWaitersError,
    ValidityExhaustedError,
)

# How soon a retry can help: a link to a node is dialled again within this; waiters and drains take longer.
_RETRY_MS = {NoQuorumError: 200, ValidityExhaustedError: 100, DrainingError: 50, TooManyWaitersError: 1_000}

_CODES: dict[type[RedfenceServerError], tuple[grpc.StatusCode, lock_pb2.ErrorReason.ValueType]] = {
    NoQuorumError: (grpc.StatusCode.UNAVAILABLE, lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE),
    ValidityExhaustedError: (grpc.StatusCode.UNAVAILABLE, lock_pb2.ERROR_REASON_VALIDITY_EXHAUSTED),
    DrainingError: (grpc.StatusCode.UNAVAILABLE, lock_pb2.ERROR_REASON_DRAINING),
    TooManyWaitersError: (grpc.StatusCode.RESOURCE_EXHAUSTED, lock_pb2.ERROR_REASON_TOO_MANY_WAITERS),
    TooManyCommandsError: (grpc.StatusCode.RESOURCE_EXHAUSTED, lock_pb2.ERROR_REASON_TOO_MANY_COMMANDS),
}

INTERNAL = RichError(lock_pb2.ERROR_REASON_INTERNAL, "a defect in the server; see its log")
CANCELLED = RichError(
    lock_pb2.ERROR_REASON_CANCELLED, "cancelled by the caller, or with its stream; nothing was granted"
)


def describe(error: RedfenceServerError) -> tuple[grpc.StatusCode, RichError]:
    """Return what a caller is told of `error`."""
    if isinstance(error, InvalidFieldError):
        metadata = {"field": error.field_name, **error.metadata} if error.field_name else {}
        return grpc.StatusCode.INVALID_ARGUMENT, RichError(error.reason, str(error), metadata)
    code, reason = _CODES[type(error)]
    return code, RichError(reason, str(error), _metadata(error), _RETRY_MS.get(type(error)))


def _metadata(error: RedfenceServerError) -> dict[str, str]:
    match error:
        case NoQuorumError(silent=silent) if silent:
            return {"nodes": silent}
        case ValidityExhaustedError(elapsed_ms=elapsed_ms):
            return {"elapsed_ms": f"{elapsed_ms:.0f}"}
        case TooManyWaitersError(limit=limit, scope=scope):
            return {"limit": str(limit), "scope": scope}
        case OverloadedError(limit=limit):
            return {"limit": str(limit)}
    return {}


async def abort(
    context: grpc.aio.ServicerContext[object, object], code: grpc.StatusCode, error: RichError
) -> NoReturn:
    """End a call with a rich status."""
    await context.abort(code, error.message, to_trailing_metadata(code.value[0], error))
    raise AssertionError("abort raises")  # pragma: no cover


def to_message(code: grpc.StatusCode, error: RichError) -> lock_pb2.Error:
    """Return the error as the result of a stream's command."""
    message = lock_pb2.Error(
        code=code.value[0], reason=error.reason, message=error.message, metadata=error.metadata
    )
    if error.retry_after_ms is not None:
        message.retry_after.FromMilliseconds(error.retry_after_ms)
    return message
