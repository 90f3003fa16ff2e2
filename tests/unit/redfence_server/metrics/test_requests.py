"""How requests are counted, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from redfence_proto.v1 import lock_pb2
from redfence_server.clock import SystemClock
from redfence_server.metrics.histogram import BOUNDS_S, Histogram
from redfence_server.metrics.observing import Observer
from redfence_server.metrics.outcomes import outcome_of, reason_name
from redfence_server.metrics.requests import RequestCounts
from redfence_server.metrics.telemetry import Telemetry


def test_a_duration_counts_in_every_bucket_that_is_not_below_it() -> None:
    """A bound belongs to its own bucket, as Prometheus has it."""
    for duration_s in (*BOUNDS_S, 0.0, 0.0007, 1e9):
        histogram = Histogram()
        histogram.observe(duration_s)
        assert histogram.cumulated() == [
            *((str(bound), float(duration_s <= bound)) for bound in BOUNDS_S),
            ("+Inf", 1.0),
        ]
        assert histogram.sum_s == duration_s


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        (lock_pb2.AcquireResponse(outcome=lock_pb2.ACQUIRE_OUTCOME_WAIT_TIMEOUT), "wait_timeout"),
        (lock_pb2.ReleaseResponse(outcome=lock_pb2.RELEASE_OUTCOME_NOT_HELD), "not_held"),
        (lock_pb2.KeepAliveResponse(state=lock_pb2.LEASE_STATE_AT_RISK), "at_risk"),
        (lock_pb2.CheckTokenResponse(state=lock_pb2.TOKEN_STATE_NOT_LIVE), "not_live"),
        (lock_pb2.CancelResult(found=False), "not_found"),
        (lock_pb2.GetLockResponse(), "ok"),
    ],
)
def test_the_outcome_is_the_name_in_the_contract(response: object, outcome: str) -> None:
    assert outcome_of(response) == outcome


def test_a_reason_that_is_no_value_of_the_enum_makes_no_series_of_its_own() -> None:
    assert reason_name(lock_pb2.ERROR_REASON_TOO_MANY_WAITERS) == "too_many_waiters"
    assert {reason_name(number) for number in (10_000, 10_001, -1)} == {"unknown"}


def test_requests_that_asked_to_wait_have_a_histogram_of_their_own() -> None:
    counts = RequestCounts()
    for waits in (False, True, True):
        kind = counts.requests("LockService", "Acquire", waits=waits)
        kind.begin()
        kind.end("granted", 0.001)
    registry = CollectorRegistry()
    registry.register(counts)
    text = generate_latest(registry).decode()
    assert 'redfence_requests_total{method="Acquire",outcome="granted",service="LockService"} 3.0' in text
    assert 'duration_seconds_count{method="Acquire",service="LockService",waits="yes"} 2.0' in text
    assert 'duration_seconds_count{method="Acquire",service="LockService",waits="no"} 1.0' in text


def test_without_metrics_and_debug_log_no_handler_is_wrapped() -> None:
    """So a server without them spends nothing on them."""
    clock = SystemClock()
    assert Telemetry(listen="", logs=False, clock=clock).wrap is None
    assert Telemetry(listen=":0", logs=False, clock=clock).wrap is not None
    assert Telemetry(listen="", logs=True, clock=clock).wrap is not None


class LeavingPeer:
    """The context of a stream whose peer leaves while the answer to its first message is written."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def peer(self) -> str:
        return "peer"

    async def read(self) -> Any:
        return self._request

    async def write(self, message: Any) -> None:
        raise asyncio.CancelledError


_DENIED = lock_pb2.CommandError(reason=lock_pb2.ERROR_REASON_PERMISSION_DENIED)
_RENEWAL = lock_pb2.KeepAliveRequest(resource="a", sequence=1)


@pytest.mark.parametrize(
    ("method", "request_", "answer"),
    [
        (
            "Session",
            lock_pb2.SessionRequest(
                commands=[lock_pb2.SessionCommand(id=1, acquire=lock_pb2.AcquireRequest())]
            ),
            lock_pb2.SessionResponse(results=[lock_pb2.SessionResult(id=1, error=_DENIED)]),
        ),
        ("KeepAlive", _RENEWAL, lock_pb2.KeepAliveResponse(resource="a", sequence=1, error=_DENIED)),
    ],
)
async def test_an_answer_counts_though_its_caller_leaves_at_once(
    method: str, request_: Any, answer: Any
) -> None:
    async def serve(_: Any, context: Any) -> None:
        await context.read()
        await context.write(answer)

    counts = RequestCounts()
    observer = Observer(counts, clock=SystemClock(), logs=False)
    path = f"/redfence.v1.LockService/{method}"
    handler = observer.wrap(path, grpc.stream_stream_rpc_method_handler(serve))
    with pytest.raises(asyncio.CancelledError):
        await handler.stream_stream(None, LeavingPeer(request_))
    command = "acquire" if method == "Session" else "renew"
    assert counts.requests("LockService", f"{method}.{command}").ended == {"permission_denied": 1}
