"""The table of errors."""

from __future__ import annotations

import grpc
import pytest

from redfence_proto.v1 import lock_pb2
from redfence_storage import errors
from redfence_storage.grpc_errors import TABLE

# What the contract documents beside each reason.
CONTRACT = {
    "INVALID_RESOURCE": "INVALID_ARGUMENT",
    "INVALID_FENCING_TOKEN": "INVALID_ARGUMENT",
    "INVALID_KEY": "INVALID_ARGUMENT",
    "INVALID_VALUE": "INVALID_ARGUMENT",
    "INVALID_PAGE": "INVALID_ARGUMENT",
    "STALE_TOKEN": "FAILED_PRECONDITION",
    "KEY_NOT_FOUND": "NOT_FOUND",
    "TOO_MANY_WRITES": "RESOURCE_EXHAUSTED",
    "STORAGE_FAILED": "UNAVAILABLE",
    "DRAINING": "UNAVAILABLE",
}


def kinds(root: type[errors.StorageError]) -> set[type[errors.StorageError]]:
    return {root}.union(*(kinds(kind) for kind in root.__subclasses__()))


def test_every_error_that_a_call_can_meet_has_a_row() -> None:
    abstract = {errors.StorageError, errors.InvalidRequest}
    assert kinds(errors.StorageError) - abstract - {errors.DatabaseUnusable} == TABLE.keys()


def test_the_table_says_what_the_contract_says() -> None:
    told = {
        lock_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_"): code.name
        for code, reason in TABLE.values()
    }
    assert told == CONTRACT


@pytest.mark.parametrize("kind", list(TABLE))
def test_a_retry_is_advised_exactly_where_one_can_help(kind: type[errors.StorageError]) -> None:
    code, _ = TABLE[kind]
    may_help = code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert (kind.retry_after_ms is not None) == may_help
