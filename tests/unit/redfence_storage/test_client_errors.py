"""What a caller of the storage catches: the SDK's errors, and no tree of its own."""

from __future__ import annotations

import pytest

import redfence
from harness.doubles.failed_call import FailedCall
from redfence_storage import errors, grpc_errors

# One of each kind, as the storage raises it, and what its caller catches.
_REFUSALS: list[tuple[errors.StorageError, type[redfence.RedfenceError]]] = [
    (errors.InvalidResource("is empty"), redfence.InvalidArgumentError),
    (errors.InvalidFencingToken("is 0"), redfence.InvalidArgumentError),
    (errors.UnfencedWithToken("is true"), redfence.InvalidArgumentError),
    (errors.InvalidKey("is empty"), redfence.InvalidArgumentError),
    (errors.InvalidValue("is too long"), redfence.InvalidArgumentError),
    (errors.InvalidPage("is 1001"), redfence.InvalidArgumentError),
    (errors.InvalidPageToken("is malformed"), redfence.InvalidArgumentError),
    (errors.StaleToken("r", token=1, highest_token=7), redfence.StaleTokenError),
    (errors.KeyNotFound("r", key="k"), redfence.NotFoundError),
    (errors.TooManyWrites(4), redfence.OverloadedError),
    (errors.StorageFailed("disk full"), redfence.UnavailableError),
    (errors.StoreClosed(), redfence.UnavailableError),
]


def _caught(refusal: Exception) -> redfence.RedfenceError:
    """Return what the caller catches when the storage refuses with this error."""
    return redfence.from_rpc_error(FailedCall(*grpc_errors.describe(refusal)))


@pytest.mark.parametrize(("refusal", "kind"), _REFUSALS, ids=lambda row: type(row).__name__)
def test_every_refusal_of_the_storage_is_an_error_of_the_sdk_with_all_it_said(
    refusal: errors.StorageError, kind: type[redfence.RedfenceError]
) -> None:
    error = _caught(refusal)
    assert type(error) is kind
    assert str(error) == str(refusal)
    assert error.metadata == refusal.metadata
    assert error.retry_after == (refusal.retry_after_ms and refusal.retry_after_ms / 1000)


def test_every_kind_of_refusal_is_told() -> None:
    assert {type(refusal) for refusal, _ in _REFUSALS} == grpc_errors.TABLE.keys()


def test_a_stale_token_error_knows_the_highest_token_and_a_bad_field_its_name() -> None:
    stale = _caught(errors.StaleToken("r", token=1, highest_token=7))
    assert isinstance(stale, redfence.StaleTokenError)
    assert stale.highest_token == 7
    invalid = _caught(errors.InvalidKey("is empty"))
    assert isinstance(invalid, redfence.InvalidArgumentError)
    assert invalid.field == "key"


def test_a_defect_of_the_storage_is_a_server_error() -> None:
    assert type(_caught(KeyError("inside"))) is redfence.ServerError
