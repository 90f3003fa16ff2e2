"""What the clients raise for what the storage and the transport say."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import pytest

from redfence_proto.rich_error import RichError, to_trailing_metadata
from redfence_proto.v1 import lock_pb2
from redfence_storage import client_errors, grpc_errors
from redfence_storage.client_errors import StorageClientError, from_call


@dataclass(frozen=True)
class Call:
    """A failed call."""

    status: grpc.StatusCode
    rich: RichError | None = None

    def code(self) -> grpc.StatusCode:
        return self.status

    def details(self) -> str:
        return "what the transport says"

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return () if self.rich is None else to_trailing_metadata(self.status.value[0], self.rich)


@pytest.mark.parametrize("reason", lock_pb2.ErrorReason.values())
def test_every_reason_becomes_an_error_that_carries_all_it_said(
    reason: lock_pb2.ErrorReason.ValueType,
) -> None:
    """Whatever the reason: message, metadata and advice arrive; an unforeseen one is told by its status code."""
    rich = RichError(reason=reason, message="why", metadata={"field": "key"}, retry_after_ms=70)
    error = from_call(Call(grpc.StatusCode.UNAVAILABLE, rich))
    assert type(error) is client_errors.BY_REASON.get(reason, client_errors.UnavailableError)
    assert (str(error), error.metadata, error.retry_after_ms) == ("why", {"field": "key"}, 70)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_code_without_a_reason_becomes_an_error(code: grpc.StatusCode) -> None:
    """What a proxy or the transport says is told as well as it can be."""
    error = from_call(Call(code))
    assert type(error) is client_errors.BY_CODE.get(code, StorageClientError)
    assert (str(error), error.code) == ("what the transport says", code)


def test_every_reason_that_the_storage_gives_has_an_error_of_its_kind() -> None:
    """The two tables know the same reasons."""
    assert {reason for _, reason in grpc_errors.TABLE.values()} == client_errors.BY_REASON.keys()


def test_a_stale_token_error_knows_the_highest_token() -> None:
    """A caller can tell how far behind it is."""
    rich = RichError(
        reason=lock_pb2.ERROR_REASON_STALE_TOKEN, message="stale", metadata={"highest_token": "7"}
    )
    error = from_call(Call(grpc.StatusCode.FAILED_PRECONDITION, rich))
    assert isinstance(error, client_errors.StaleTokenError)
    assert error.highest_token == 7
