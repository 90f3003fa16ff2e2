"""Translates the storage's errors into gRPC status codes and reasons, by one table."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeAlias

import grpc
import structlog

from redfence_proto.rich_error import RichError, to_trailing_metadata
from redfence_proto.v1 import lock_pb2
from redfence_server.api import errors as server_errors
from redfence_server.errors import AccessError
from redfence_storage import errors

# `DatabaseUnusable` has no row, because it ends the process before the first call.
_Row: TypeAlias = tuple[grpc.StatusCode, "lock_pb2.ErrorReason.ValueType"]
TABLE: dict[type[errors.StorageError], _Row] = {
    errors.InvalidResource: (grpc.StatusCode.INVALID_ARGUMENT, lock_pb2.ERROR_REASON_INVALID_RESOURCE),
    errors.InvalidFencingToken: (
        grpc.StatusCode.INVALID_ARGUMENT,
        lock_pb2.ERROR_REASON_INVALID_FENCING_TOKEN,
    ),
    errors.UnfencedWithToken: (
        grpc.StatusCode.INVALID_ARGUMENT,
        lock_pb2.ERROR_REASON_INVALID_FENCING_TOKEN,
    ),
    errors.InvalidKey: (grpc.StatusCode.INVALID_ARGUMENT, lock_pb2.ERROR_REASON_INVALID_KEY),
    errors.InvalidValue: (grpc.StatusCode.INVALID_ARGUMENT, lock_pb2.ERROR_REASON_INVALID_VALUE),
    errors.InvalidPage: (grpc.StatusCode.INVALID_ARGUMENT, lock_pb2.ERROR_REASON_INVALID_PAGE),
    errors.InvalidPageToken: (grpc.StatusCode.INVALID_ARGUMENT, lock_pb2.ERROR_REASON_INVALID_PAGE),
    errors.StaleToken: (grpc.StatusCode.FAILED_PRECONDITION, lock_pb2.ERROR_REASON_STALE_TOKEN),
    errors.KeyNotFound: (grpc.StatusCode.NOT_FOUND, lock_pb2.ERROR_REASON_KEY_NOT_FOUND),
    errors.TooManyWrites: (grpc.StatusCode.RESOURCE_EXHAUSTED, lock_pb2.ERROR_REASON_TOO_MANY_WRITES),
    errors.StorageFailed: (grpc.StatusCode.UNAVAILABLE, lock_pb2.ERROR_REASON_STORAGE_FAILED),
    errors.StoreClosed: (grpc.StatusCode.UNAVAILABLE, lock_pb2.ERROR_REASON_DRAINING),
}


def describe(error: Exception) -> tuple[grpc.StatusCode, RichError]:
    """Return the status and details for an error; an error without a row becomes INTERNAL without details."""
    if isinstance(error, errors.StorageError) and type(error) in TABLE:
        code, reason = TABLE[type(error)]
        return code, RichError(
            reason=reason,
            message=str(error),
            metadata=error.metadata,
            retry_after_ms=error.retry_after_ms,
        )
    if isinstance(error, AccessError):
        return server_errors.describe(error, where="storage")
    return grpc.StatusCode.INTERNAL, RichError(
        reason=lock_pb2.ERROR_REASON_INTERNAL, message="internal error in the storage; the outcome is unknown"
    )


class AbortOnError:
    """Aborts the call with the right status if the body of `async with` raises; logs unexpected errors."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        """Do nothing."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort the call if the body raised an error; let a cancellation pass."""
        if not isinstance(error, Exception):
            return
        code, rich = describe(error)
        if code is grpc.StatusCode.INTERNAL:
            structlog.get_logger().error("unexpected_error", exc_info=error)
        await self._context.abort(
            code, rich.message, trailing_metadata=to_trailing_metadata(code.value[0], rich)
        )
