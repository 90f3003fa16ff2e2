"""Make a client span of each call if the program uses OpenTelemetry; the SDK itself does not import it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from redfence._errors import RedfenceError

_NO_SPAN: Final = nullcontext("")


def client_span(name: str, resource: str) -> AbstractContextManager[str]:
    """Return a context that makes a span, and yields its W3C traceparent; it yields "" if there is no span.

    A program that traces has imported `opentelemetry.trace` by then. Otherwise the call costs one look-up.
    """
    trace = sys.modules.get("opentelemetry.trace")
    # Another thread may be importing it; it defines `__all__` last.
    return _span(trace, name, resource) if hasattr(trace, "__all__") else _NO_SPAN


@contextmanager
def _span(trace: Any, name: str, resource: str) -> Iterator[str]:
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
