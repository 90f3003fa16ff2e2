"""Make a span of each request, with the answers of the nodes as events; send spans to a collector.

OpenTelemetry's SDK has a bounded queue and a thread of its own, so a slow or dead collector delays no call:
it drops spans that do not fit. A server without the setting `traces_endpoint` does not import this module.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from redfence_server.clock import WallClock
from redfence_server.locking.node import (
    Command,
    Commit,
    LockNode,
    Mint,
    NodeReport,
    NoReply,
    Notice,
    Release,
    Renew,
    Reply,
)
from redfence_server.locking.node import Status as NodeStatus
from redfence_server.metrics import outcomes

_HEADER: Final = "traceparent"
# A traceparent of the only version that exists; a longer one is ignored.
_TRACEPARENT_CHARACTERS_MAX: Final = 55
_RESOURCE_SHOWN_MAX: Final = 256
# How long a server that ends may send its last spans. A collector that is gone must not delay the end.
_CLOSE_S: Final = 2.0
_OF_COMMAND: Final = {Mint: "Acquire", Commit: "Acquire", Renew: "Renew", Release: "Release"}
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class RequestSpan:
    """The span of one request. It lasts until the answer, and is sent once every asked node has answered."""

    __slots__ = ("_clock", "_ended_at_ns", "_span", "_unanswered", "keys")

    def __init__(self, span: Any, *, clock: WallClock) -> None:
        self._span = span
        self._clock = clock
        self._unanswered = 0
        self._ended_at_ns = 0
        self.keys: Sequence[tuple[str, str]] = ()

    @property
    def is_open(self) -> bool:
        """Whether the request has no answer yet."""
        return not self._ended_at_ns

    def asked(self) -> None:
        """Note that a node will answer, once, within the node timeout."""
        self._unanswered += 1

    def answered(self, attributes: dict[str, Any]) -> None:
        """Note what the node answered."""
        self._unanswered -= 1
        self._span.add_event("node", attributes, _now_ns(self._clock))
        self._send_if_complete()

    def end(self, outcome: str, token: int | None) -> None:
        """End the request."""
        self._ended_at_ns = _now_ns(self._clock)
        self._span.set_attribute("redfence.outcome", outcome)
        if token:
            self._span.set_attribute("redfence.token", token)
        if outcome == outcomes.INTERNAL:
            self._span.set_status(Status(StatusCode.ERROR))
        self._send_if_complete()

    def _send_if_complete(self) -> None:
        if self._ended_at_ns and not self._unanswered:
            self._span.end(self._ended_at_ns)


_CURRENT: ContextVar[RequestSpan | None] = ContextVar("redfence_request_span", default=None)


class Spans:
    """Makes the spans of one server process; belongs to one thread.

    Args:
        exporter: where spans go.
        clock: gives the instants of spans.
        service: the name of the service, unless OTEL_SERVICE_NAME gives one.
    """

    def __init__(self, exporter: SpanExporter, *, clock: WallClock, service: str) -> None:
        self.clock = clock
        attributes = {SERVICE_VERSION: version("redfence")}
        if OTEL_SERVICE_NAME not in os.environ:
            attributes[SERVICE_NAME] = service
        resource = Resource.create(attributes)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("redfence")
        # The open requests by the digest of their lease id and by what they do; the newest last.
        self._open: dict[tuple[str, str], list[RequestSpan]] = {}

    def begin_call(self, service: str, method: str, request: Any, metadata: Any) -> RequestSpan:
        """Begin the span of a unary call, and make it the span of the running task."""
        span = self.begin(service, method, request, metadata=metadata)
        # A command to a node that names no lease finds its span by the task.
        _CURRENT.set(span)
        return span

    def begin(
        self, service: str, method: str, request: Any, *, metadata: Any, parent: str = ""
    ) -> RequestSpan:
        """Begin the span of a request.

        Its parent is the traceparent `parent`, or else that of the call's metadata. A malformed one is
        ignored.
        """
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        if resource := getattr(request, "resource", ""):
            attributes["redfence.resource"] = resource[:_RESOURCE_SHOWN_MAX]
        span = self._tracer.start_span(
            f"{service}/{method}",
            _context(parent or _traceparent_of(metadata)),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        found = RequestSpan(span, clock=self.clock)
        if span.is_recording() and (lease_id := getattr(request, "lease_id", "")):
            # Only the digest is kept, as on the nodes; no attribute has it.
            digest = hashlib.sha256(lease_id.encode()).hexdigest()
            found.keys = ((digest, method.rpartition(".")[2].capitalize()),)
            for key in found.keys:
                self._open.setdefault(key, []).append(found)
        return found

    def end(self, span: RequestSpan, outcome: str, token: int | None = None) -> None:
        """End the span of a request."""
        for key in span.keys:
            same = self._open[key]
            same.remove(span)
            if not same:
                del self._open[key]
        span.end(outcome, token)

    def of_command(self, command: Command) -> list[RequestSpan]:
        """Return the spans of the requests for which the server sends a command; a handover has two."""
        asked = [command, getattr(command, "release_first", None)]
        keys = [(getattr(each, "digest", ""), _OF_COMMAND.get(type(each), "")) for each in asked]
        found = [self._open[key][-1] for key in keys if key in self._open]
        current = _CURRENT.get()
        if not found and current is not None and current.is_open:
            return [current]
        return found

    def nodes(self, nodes: Sequence[LockNode]) -> Sequence[LockNode]:
        """Return nodes whose answers become events of these spans."""
        return [TracedNode(node, self) for node in nodes]

    async def close(self) -> None:
        """Send what is left, for a short while at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-traces", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_S)


class TracedNode:
    """A node whose answers become events of the spans; see `LockNode`."""

    def __init__(self, node: LockNode, spans: Spans) -> None:
        self.index = node.index
        self._node = node
        self._spans = spans

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Send a command, and note the answer."""
        if on_reply is None or not (spans := self._spans.of_command(command)):
            return self._node.send(command, on_reply)
        sent_at_ms = self._spans.clock.now_ms()
        for span in spans:
            span.asked()

        def noted(reply: Reply) -> None:
            attributes = {
                "redfence.node": self.index,
                "redfence.command": type(command).__name__.lower(),
                "redfence.reply": _name_of(reply),
                "redfence.duration_ms": round(self._spans.clock.now_ms() - sent_at_ms, 3),
            }
            for span in spans:
                span.answered(attributes)
            on_reply(reply)

        return self._node.send(command, noted)

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        """Pass the notices on."""
        self._node.listen(on_notice)

    def report(self) -> NodeReport:
        """Return what the server knows about the node."""
        return self._node.report()


def open_spans(endpoint: str, *, clock: WallClock, service: str) -> Spans:
    """Return spans that go to this URL by OTLP over HTTP."""
    return Spans(OTLPSpanExporter(endpoint=endpoint), clock=clock, service=service)


def _now_ns(clock: WallClock) -> int:
    return int(clock.wall_ms() * 1e6)


def _traceparent_of(metadata: Any) -> str:
    """Return the traceparent of a call's metadata, or nothing."""
    for key, value in metadata or ():
        if key == _HEADER and isinstance(value, str):
            return value
    return ""


def _context(traceparent: str) -> Context | None:
    if not traceparent or len(traceparent) > _TRACEPARENT_CHARACTERS_MAX:
        return Context()
    return _PROPAGATOR.extract({_HEADER: traceparent}, Context())


def _name_of(reply: Reply) -> str:
    if isinstance(reply, NodeStatus | NoReply):
        return reply.name.lower()
    return type(reply).__name__.lower()
