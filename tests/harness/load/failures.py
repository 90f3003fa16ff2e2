"""A failure as a caller sees it, in one form for calls, session commands and renewals."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from redfence_proto.rich_error import from_trailing_metadata
from redfence_proto.v1 import lock_pb2

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Failure:
    """What a caller is told. `retry_after_ms` is None where no retry is suggested."""

    code: grpc.StatusCode
    reason: lock_pb2.ErrorReason.ValueType
    message: str
    metadata: Mapping[str, str]
    retry_after_ms: int | None

    @classmethod
    def of_call(cls, error: grpc.aio.AioRpcError) -> Failure:
        """Read the details of a status; a status without any is a failure of the test."""
        rich = from_trailing_metadata(error.trailing_metadata())
        assert rich is not None, f"no details on {error!r}"
        assert rich.message == error.details()
        return cls(error.code(), rich.reason, rich.message, rich.metadata, rich.retry_after_ms)

    @classmethod
    def of_message(cls, error: lock_pb2.CommandError) -> Failure:
        """Read the error of a stream's command."""
        retry_after_ms = error.retry_after.ToMilliseconds() if error.HasField("retry_after") else None
        return cls(_CODES[error.code], error.reason, error.message, dict(error.metadata), retry_after_ms)

    @property
    def is_retryable(self) -> bool:
        """Whether the contract tells a caller to try again."""
        return self.code is grpc.StatusCode.UNAVAILABLE and self.retry_after_ms is not None


async def failure_of(call: Awaitable[Any]) -> Failure:
    """Return how a unary call fails; one that does not is a failure of the test."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return Failure.of_call(caught.value)
