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
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from harness.processes.commands import CommandProcesses
from harness.processes.ports import HOST, free_port
from harness.processes.servers import FormedNodes
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_server.http2.settings import Transport

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("transport", list(Transport))]

# A program as a user writes it, in a process of its own: the provider of OpenTelemetry is global.
CLIENT = """
import asyncio, sys
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
with tracer.start_as_current_span("threads"), redfence.Client(server) as client:
    with client.lock("orders/threads", ttl=5):
        client.get_lock("orders/threads")

async def main():
    async with redfence.AsyncClient(server) as client:
        with tracer.start_as_current_span("asyncio"):
            async with client.lock("orders/asyncio", ttl=5):
                pass

asyncio.run(main())
provider.shutdown()
"""


MALFORMED = ("", "nonsense", f"00-{'0' * 32}-{'0' * 16}-01", "x" * 9_000)


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP.

    Attributes:
        spans: all that came.
        bodies: as they came.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.endpoint = f"http://{HOST}:{self.server_port}/v1/traces"

    def named(self, name: str) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        self.server.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
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


def attributes(of: Span | Span.Event) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in of.attributes}


async def test_one_trace_has_the_client_the_server_and_the_nodes(
    commands: CommandProcesses, formed_nodes: FormedNodes, transport: Transport
) -> None:
    with collecting() as collector:
        flags = ("--transport", transport, "--traces-endpoint", collector.endpoint)
        server, address = await commands.start_serve(await formed_nodes(3), *flags)
        await commands.start(sys.executable, "-c", CLIENT, address, collector.endpoint).ended()
        assert await server.stop() == 0  # it sends what is left

        await eventually(lambda: len(collector.named("LockService/Session.release")) == 2)
        for program in ("threads", "asyncio"):
            (root,) = collector.named(program)
            trace = [span for span in collector.spans if span.trace_id == root.trace_id]
            (of_client,) = [span for span in trace if span.name == "redfence acquire"]
            assert of_client.parent_span_id == root.span_id
            (of_server,) = [span for span in trace if span.name == "LockService/Session.acquire"]
            assert of_server.parent_span_id == of_client.span_id
            told = attributes(of_server)
            assert told["redfence.resource"] == f"orders/{program}"
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
