"""The spans of a program that traces with OpenTelemetry, and the faults of its OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

import redfence
from harness.doubles.grpc_fake import GrpcFake
from redfence import _tracing


class RaisingSampler(Sampler):
    def should_sample(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("sampler")

    def get_description(self) -> str:
        return "raises"


class RaisingProcessor(SpanProcessor):
    """Raises when a span starts, or when it ends."""

    def __init__(self, part: str) -> None:
        setattr(self, part, self._raise)
        self._part = part

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self._part)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """The provider of this program, which OpenTelemetry lets it set only once."""
    monkeypatch.setattr(_tracing, "_logged", set())
    provider = TracerProvider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return provider


async def test_the_release_that_a_closed_client_leaves_out_is_no_error_in_its_span(
    fake: GrpcFake, make_client: Callable[..., Any], provider: TracerProvider
) -> None:
    client = make_client(fake.address)
    lease = await client.acquire("orders/1", ttl=60)
    await client.close()
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    assert not await lease.release()
    (span,) = exporter.get_finished_spans()
    assert span.name == "redfence release"
    assert dict(span.attributes or {}) == {"redfence.resource": "orders/1"}


@pytest.mark.parametrize("part", ["sampler", "on_start", "on_end"])
async def test_a_fault_of_opentelemetry_fails_no_call_and_is_logged_once(
    fake: GrpcFake,
    make_client: Callable[..., Any],
    provider: TracerProvider,
    caplog: pytest.LogCaptureFixture,
    part: str,
) -> None:
    """A failed release would leave the lock held, and an acquire would end without its lease."""
    if part == "sampler":
        provider.sampler = RaisingSampler()
    else:
        provider.add_span_processor(RaisingProcessor(part))
    client = make_client(fake.address)
    current = trace.get_current_span()
    async with client.lock("orders/1", ttl=60):
        assert (await client.get_lock("orders/1")).current
    lease = await client.acquire("orders/1", ttl=60)
    assert await lease.release()
    assert not (await client.get_lock("orders/1")).current
    assert not await lease.release()
    with pytest.raises(redfence.LockHeldError):
        async with client.lock("orders/2", ttl=60):
            await client.acquire("orders/2", ttl=60, wait=0)
    assert trace.get_current_span() is current
    (logged,) = [each.getMessage() for each in caplog.records if each.name == "redfence"]
    assert f"span_failed error=RuntimeError('{part}')" in logged
