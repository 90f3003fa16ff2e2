"""Writes and reads redfence's error details in a gRPC status.

A failed call has a `google.rpc.Status` in the trailing metadata `grpc-status-details-bin`, as in
all gRPC languages. The status contains a `google.rpc.ErrorInfo` and, if a retry can help, a
`google.rpc.RetryInfo`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from redfence_proto.v1 import lock_pb2

DOMAIN = "redfence"
_DETAILS_KEY = "grpc-status-details-bin"
_PREFIX = "ERROR_REASON_"


@dataclass(frozen=True, slots=True)
class RichError:
    """An error in the terms of the contract.

    Attributes:
        reason: one value of `ErrorReason`.
        message: the text for humans.
        metadata: the details that the contract documents for the reason.
        retry_after_ms: the time after which a retry can succeed, or None.
    """

    reason: lock_pb2.ErrorReason.ValueType
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_ms: int | None = None

    @property
    def reason_name(self) -> str:
        """The reason as in `ErrorInfo.reason`, without the enum's prefix."""
        return lock_pb2.ErrorReason.Name(self.reason).removeprefix(_PREFIX)


def to_trailing_metadata(code: int, error: RichError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata with the details of `error`, for a status with this numeric code."""
    status = Status(code=code, message=error.message)
    info = ErrorInfo(reason=error.reason_name, domain=DOMAIN, metadata=error.metadata)
    status.details.add().Pack(info)
    if error.retry_after_ms is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(retry)
    return ((_DETAILS_KEY, status.SerializeToString()),)


def from_trailing_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> RichError | None:
    """Return the redfence error in a call's trailing metadata; None if it has none or another domain's."""
    for key, value in metadata or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            status = Status.FromString(value)
            return _from_details(status.message, status.details)
    return None


def _from_details(message: str, details: Iterable[AnyMessage]) -> RichError | None:
    info, retry = ErrorInfo(), RetryInfo()
    has_info = has_retry = False
    for detail in details:
        has_info |= detail.Unpack(info)
        has_retry |= detail.Unpack(retry)
    if not has_info or info.domain != DOMAIN:
        return None
    # A newer server may send an unknown reason, which becomes UNSPECIFIED; the message stays.
    reason = (
        lock_pb2.ErrorReason.Value(_PREFIX + info.reason)
        if _known(info.reason)
        else lock_pb2.ERROR_REASON_UNSPECIFIED
    )
    return RichError(
        reason=reason,
        message=message,
        metadata=dict(info.metadata),
        retry_after_ms=retry.retry_delay.ToMilliseconds() if has_retry else None,
    )


def _known(name: str) -> bool:
    return _PREFIX + name in lock_pb2.ErrorReason.keys()  # noqa: SIM118  (an enum wrapper has no __contains__)
