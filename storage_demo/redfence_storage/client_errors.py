"""What the storage clients raise.

StorageClientError
├── StaleTokenError           the lease behind the token is over: stop, and acquire anew
├── KeyNotFoundError
├── InvalidArgumentError      a field breaks its bounds; do not retry
├── UnavailableError          not acknowledged, and it may be retried with the same token
└── OutcomeUnknownError       it may or may not have happened; repeating it with the same token is harmless

Every failed call ends in one of these: by the reason the storage gave, or else by the status code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import grpc

from redfence_proto.rich_error import RichError, from_trailing_metadata
from redfence_proto.v1 import lock_pb2


class StorageClientError(Exception):
    """Every failure of a call to the storage; raised itself for a defect or a code that no subclass stands for.

    Attributes:
        code: the call's status code.
        reason: why, if the storage said so.
        metadata: the facts, as documented at the reason.
        retry_after_ms: when set, trying again no sooner than this can help.
    """

    def __init__(self, message: str, *, code: grpc.StatusCode, rich: RichError | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = rich.reason if rich else lock_pb2.ERROR_REASON_UNSPECIFIED
        self.metadata: Mapping[str, str] = rich.metadata if rich else {}
        self.retry_after_ms = rich.retry_after_ms if rich else None


class StaleTokenError(StorageClientError):
    """The storage has seen a higher token: somebody else holds the lease now. Nothing was changed."""

    @property
    def highest_token(self) -> int:
        """The highest token seen for the resource; 0 if the storage did not say."""
        return int(self.metadata.get("highest_token", "0"))


class KeyNotFoundError(StorageClientError):
    """There is no such key. A fenced read has raised the highest token all the same."""


class InvalidArgumentError(StorageClientError):
    """A field breaks its bounds; nothing was changed."""

    @property
    def field(self) -> str:
        """The field's name in the contract; empty if the storage did not say."""
        return self.metadata.get("field", "")


class UnavailableError(StorageClientError):
    """The storage cannot be reached, is overloaded, is stopping, or its database failed."""


class OutcomeUnknownError(StorageClientError):
    """The call's time was over, or it was cut off, before the answer came."""


BY_REASON: dict[lock_pb2.ErrorReason.ValueType, type[StorageClientError]] = {
    lock_pb2.ERROR_REASON_STALE_TOKEN: StaleTokenError,
    lock_pb2.ERROR_REASON_KEY_NOT_FOUND: KeyNotFoundError,
    lock_pb2.ERROR_REASON_INVALID_RESOURCE: InvalidArgumentError,
    lock_pb2.ERROR_REASON_INVALID_FENCING_TOKEN: InvalidArgumentError,
    lock_pb2.ERROR_REASON_INVALID_KEY: InvalidArgumentError,
    lock_pb2.ERROR_REASON_INVALID_VALUE: InvalidArgumentError,
    lock_pb2.ERROR_REASON_INVALID_PAGE: InvalidArgumentError,
    lock_pb2.ERROR_REASON_TOO_MANY_WRITES: UnavailableError,
    lock_pb2.ERROR_REASON_STORAGE_FAILED: UnavailableError,
    lock_pb2.ERROR_REASON_DRAINING: UnavailableError,
}
# For what the transport itself ends, and for reasons of a newer storage.
BY_CODE: dict[grpc.StatusCode, type[StorageClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: UnavailableError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: OutcomeUnknownError,
    grpc.StatusCode.CANCELLED: OutcomeUnknownError,
}


class FailedCall(Protocol):
    """What grpc raises, for asyncio and for threads alike."""

    def code(self) -> grpc.StatusCode:
        """The status code."""
        ...

    def details(self) -> str | None:
        """The status message."""
        ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """The metadata that came with the status."""
        ...


def from_call(call: FailedCall) -> StorageClientError:
    """Return the error that stands for a failed call."""
    code, rich = call.code(), from_trailing_metadata(call.trailing_metadata())
    kind = BY_REASON.get(rich.reason) if rich else None
    if kind is None:
        kind = BY_CODE.get(code, StorageClientError)
    return kind((rich.message if rich else call.details()) or code.name, code=code, rich=rich)
