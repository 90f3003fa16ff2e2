"""No word of a server escapes untranslated."""

from __future__ import annotations

import copy
import pickle

import grpc
import pytest

import redfence
from harness.doubles.failed_call import FailedCall
from redfence._messages.server_errors import BY_CODE, BY_REASON, from_rpc_error, from_wire
from redfence_proto import rich_error
from redfence_proto.v1 import lock_pb2

_REASONS = [reason for reason in lock_pb2.ErrorReason.values() if reason != lock_pb2.ERROR_REASON_UNSPECIFIED]


@pytest.mark.parametrize("reason", _REASONS, ids=lambda reason: str(lock_pb2.ErrorReason.Name(reason)))
def test_every_reason_of_the_contract_has_an_exception(reason: lock_pb2.ErrorReason.ValueType) -> None:
    wire = lock_pb2.CommandError(code=2, reason=reason, message="m", metadata={"field": "ttl"})
    wire.retry_after.FromMilliseconds(250)
    rich = rich_error.RichError(reason=reason, message="m", metadata={"field": "ttl"}, retry_after_ms=250)
    call = FailedCall(grpc.StatusCode.UNKNOWN, rich)
    for error in (from_wire(wire), from_rpc_error(call)):
        assert type(error) is BY_REASON[reason]
        assert error.error_reason == lock_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")
        assert (str(error), error.metadata, error.retry_after) == ("m", {"field": "ttl"}, 0.25)


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: str(code.name))
def test_every_status_code_has_an_exception(code: grpc.StatusCode) -> None:
    assert type(from_rpc_error(FailedCall(code, details="d"))) is BY_CODE[code]
    newer = lock_pb2.CommandError(code=code.value[0], message="d")
    newer.reason = 9999  # type: ignore[assignment]
    assert type(from_wire(newer)) is BY_CODE[code]
    assert from_wire(newer).error_reason == ""


def test_a_code_that_grpc_does_not_know_is_a_server_error() -> None:
    assert type(from_wire(lock_pb2.CommandError(code=99, message="?"))) is redfence.ServerError


def test_every_exception_has_one_root() -> None:
    exceptions = [value for name in redfence.__all__ if isinstance(value := getattr(redfence, name), type)]
    errors = [kind for kind in exceptions if issubclass(kind, BaseException)]
    assert len(errors) > 10
    assert all(issubclass(kind, redfence.RedfenceError) for kind in errors)


def _raised() -> list[redfence.RedfenceError]:
    held = redfence.LockHeldError(resource="r", holder="h", token=3, remaining=1.5)
    late = redfence.AcquireTimeoutError(wait=1.5, resource="r", position=2, closed=True)
    lost = redfence.LeaseLostError(resource="r", token=7, reason=redfence.LossReason.EXPIRED)
    kinds = dict.fromkeys([*BY_REASON.values(), *BY_CODE.values(), redfence.ClosedError])
    return [held, late, lost, *(kind("m", metadata={"field": "f"}, retry_after=0.5) for kind in kinds)]


@pytest.mark.parametrize("error", _raised(), ids=lambda error: type(error).__name__)
def test_an_error_crosses_processes_with_all_it_says(error: redfence.RedfenceError) -> None:
    error.add_note("seen by a worker")
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
