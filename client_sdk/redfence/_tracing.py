"""Make a client span of each call if the program uses OpenTelemetry; the SDK itself does not import it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from redfence._errors import RedfenceError


@contextmanager
def client_span(name: str, resource: str) -> Iterator[str]:
    """Make a span for the body, and yield its W3C traceparent; yield "" if there is no span.

    A program that traces has imported `opentelemetry.trace` by then. Otherwise the call costs one look-up.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        yield ""
        return
    attributes = {"redfence.resource": resource} if resource else {}
    with trace.get_tracer("redfence").start_as_current_span(
        f"redfence {name}",
        kind=trace.SpanKind.CLIENT,
        attributes=attributes,
        # A lock that another client holds is no failure of the program.
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        context = span.get_span_context()
        try:
            yield (
                f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
                if context.is_valid
                else ""
            )
        except RedfenceError as error:
            span.set_attribute("error.type", type(error).__name__)
            raise
