"""How redfence's errors travel: the one place that writes and reads the details of a gRPC status.

A failed call carries a `google.rpc.Status` in the trailing metadata `grpc-status-details-bin`, as every gRPC language reads
it, with a `google.rpc.ErrorInfo` and, where a retry can help, a `google.rpc.RetryInfo`.
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
    """What went wrong, in the terms of the contract.

    Attributes:
        reason: one value of `ErrorReason`.
        message: for humans.
        metadata: as documented at the reason.
        retry_after_ms: when set, trying again no sooner than this can help.
    """

    reason: lock_pb2.ErrorReason.ValueType
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_ms: int | None = None

    @property
    def reason_name(self) -> str:
        """The reason as `ErrorInfo.reason` spells it: without the enum's prefix."""
        return lock_pb2.ErrorReason.Name(self.reason).removeprefix(_PREFIX)


def to_trailing_metadata(code: int, error: RichError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata that carries `error` beside a status with this numeric code."""
    status = Status(code=code, message=error.message)
    info = ErrorInfo(reason=error.reason_name, domain=DOMAIN, metadata=error.metadata)
    status.details.add().Pack(info)
    if error.retry_after_ms is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(retry)
    return ((_DETAILS_KEY, status.SerializeToString()),)


def from_trailing_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> RichError | None:
    """Return the redfence error in a call's trailing metadata, or None if there is none or it is another domain's."""
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
    # A reason of a newer server is UNSPECIFIED to us; its message still tells.
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
