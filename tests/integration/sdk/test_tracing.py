"""The spans of a program that traces with OpenTelemetry, and the faults of its OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from harness.doubles.grpc_fake import GrpcFake


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """The provider of this program, which OpenTelemetry lets it set only once."""
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
