"""Traces as a collector gets them: the client's span, the server's span, and the answers of the nodes."""

from __future__ import annotations

import gzip
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from harness.processes.commands import CommandProcesses
from harness.processes.ports import HOST, free_port
from harness.processes.servers import FormedNodes
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_server.http2.settings import Transport

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("transport", list(Transport))]

# A program as a user writes it, in a process of its own: the provider of OpenTelemetry is global.
SET_UP = """
import asyncio, sys, warnings
import redfence
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

server, endpoint = sys.argv[1:]
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("program")
"""

CLIENT = f"""{SET_UP}
with tracer.start_as_current_span("threads"), redfence.Client(server) as client:
    with client.lock("orders/threads", ttl=5):
        client.get_lock("orders/threads")
    dropped = client.acquire("dropped/threads", ttl=5)
    warnings.simplefilter("ignore")
    del dropped

async def main():
    async with redfence.AsyncClient(server) as client:
        with tracer.start_as_current_span("asyncio"):
            async with client.lock("orders/asyncio", ttl=5):
                pass
            dropped = await client.acquire("dropped/asyncio", ttl=5)
            del dropped

asyncio.run(main())
provider.shutdown()
"""

WRITER = f"""{SET_UP}
from redfence_storage.client import AsyncStorageClient, StorageClient

with tracer.start_as_current_span("threads"), StorageClient(server) as storage:
    storage.put("orders/threads", key="state", value=b"paid", token=2)
    try:
        storage.put("orders/threads", key="state", value=b"late", token=1)
    except redfence.StaleTokenError:
        pass

async def main():
    async with AsyncStorageClient(server) as storage:
        with tracer.start_as_current_span("asyncio"):
            await storage.fence("orders/asyncio", token=1)

asyncio.run(main())
provider.shutdown()
"""


MALFORMED = ("", "nonsense", f"00-{'0' * 32}-{'0' * 16}-01", "x" * 9_000)


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP.

    Attributes:
        spans: all that came.
        bodies: as they came.
        services: the names of the services that sent spans.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.services: set[object] = set()
        self.endpoint = f"http://{HOST}:{self.server_port}/v1/traces"

    def named(self, name: str) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name]

    def of(self, name: str, resource: str) -> Span:
        """Return the only span with this name for this resource."""
        (span,) = [each for each in self.named(name) if attributes(each)["redfence.resource"] == resource]
        return span


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        self.server.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.server.services.add(attributes(resource.resource)["service.name"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


def attributes(of: Span | Span.Event | Resource) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in of.attributes}


async def test_one_trace_has_the_client_the_server_and_the_nodes(
    commands: CommandProcesses, formed_nodes: FormedNodes, transport: Transport
) -> None:
    with collecting() as collector:
        flags = ("--transport", transport, "--traces-endpoint", collector.endpoint)
        server, address = await commands.start_serve(await formed_nodes(3), *flags)
        await commands.start(sys.executable, "-c", CLIENT, address, collector.endpoint).ended()
        assert await server.stop() == 0  # it sends what is left

        await eventually(lambda: len(collector.named("LockService/Session.release")) == 4)
        for program in ("threads", "asyncio"):
            (root,) = collector.named(program)
            resource = f"orders/{program}"
            for command in ("release", "acquire"):
                of_client = collector.of(f"redfence {command}", resource)
                of_server = collector.of(f"LockService/Session.{command}", resource)
                assert of_client.parent_span_id == root.span_id
                assert of_server.parent_span_id == of_client.span_id
            # The program did not ask for the release of a lease that it dropped.
            dropped = collector.of("LockService/Session.release", f"dropped/{program}")
            assert not dropped.parent_span_id
            told = attributes(of_server)
            assert told["redfence.outcome"] == "granted"
            assert told["redfence.token"]
            answers = [attributes(event) for event in of_server.events]
            mints = {each["redfence.node"]: each for each in answers if each["redfence.command"] == "mint"}
            assert set(mints) == {0, 1, 2}
            assert all(each["redfence.reply"] == "granted" for each in mints.values())
            assert all(event.time_unix_nano >= of_server.start_time_unix_nano for event in of_server.events)
        (look,) = collector.named("LockService/GetLock")
        (of_client,) = [each for each in collector.spans if each.span_id == look.parent_span_id]
        assert of_client.name == "redfence GetLock"
        assert {attributes(event)["redfence.command"] for event in look.events} == {"inspect"}
        # A lease id is a secret, and its digest names it.
        assert not re.search(rb"[0-9a-f]{32}", b"".join(collector.bodies))
        assert b"Health" not in b"".join(collector.bodies)


async def test_a_silent_collector_and_a_malformed_parent_delay_and_break_nothing(
    commands: CommandProcesses, formed_nodes: FormedNodes, transport: Transport
) -> None:
    """Nothing listens at the endpoint. The server still ends in order, and within its time."""
    flags = ("--transport", transport, "--traces-endpoint", f"http://{HOST}:{free_port()}/v1/traces")
    server, address = await commands.start_serve(await formed_nodes(3), *flags)
    async with grpc.aio.insecure_channel(address) as channel:
        stream = lock_pb2_grpc.LockServiceStub(channel).Session()
        request = lock_pb2.SessionRequest()
        for number, parent in enumerate(
            ("", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 9_000)
        ):
            command = request.commands.add(id=number + 1, traceparent=parent)
            command.acquire.resource = f"orders/{number}"
            command.acquire.ttl.seconds = 5
        await stream.write(request)
        granted = 0
        while granted < 4:
            answer = await stream.read()
            assert isinstance(answer, lock_pb2.SessionResponse)
            granted += sum(
                result.acquire.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED for result in answer.results
            )
        stream.cancel()
    assert await server.stop() == 0
    assert "Traceback" not in server.stderr


async def test_the_storage_of_dev_makes_spans_with_the_parents_of_its_callers(
    commands: CommandProcesses, transport: Transport
) -> None:
    with collecting() as collector:
        flags = ("--transport", transport, "--traces-endpoint", collector.endpoint)
        dev, ready = await commands.start_dev(*flags)
        await commands.start(sys.executable, "-c", WRITER, ready[2], collector.endpoint).ended()
        assert await dev.stop() == 0  # its storage sends what is left

        await eventually(lambda: len(collector.named("StorageService/Put")) == 2)
        roots = {name: collector.named(name)[0].span_id for name in ("threads", "asyncio")}
        for method, program, outcomes in (
            ("Put", "threads", {"ok", "stale_token"}),
            ("Fence", "asyncio", {"ok"}),
        ):
            of_client = {span.span_id: span for span in collector.named(f"redfence {method}")}
            of_storage = collector.named(f"StorageService/{method}")
            assert {span.parent_span_id for span in of_client.values()} == {roots[program]}
            assert {span.parent_span_id for span in of_storage} == set(of_client)
            assert {attributes(span)["redfence.outcome"] for span in of_storage} == outcomes
            assert {attributes(span)["redfence.resource"] for span in of_storage} == {f"orders/{program}"}
        assert "redfence-storage" in collector.services
