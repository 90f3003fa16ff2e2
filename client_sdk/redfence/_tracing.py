"""Make a client span of each call if the program uses OpenTelemetry; the SDK itself does not import it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from redfence._errors import RedfenceError

_log = logging.getLogger("redfence")

_NO_SPAN: Final = nullcontext("")
# The faults of the program's OpenTelemetry that are in the log.
_logged: Final[set[str]] = set()


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
    span, traceparent = None, ""
    with _faults_logged():
        scope = trace.get_tracer("redfence").start_as_current_span(
            f"redfence {name}", kind=trace.SpanKind.CLIENT, attributes=attributes
        )
        span = scope.__enter__()
        context = span.get_span_context()
        if context.is_valid:
            traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    try:
        yield traceparent
    except RedfenceError as error:
        if span is not None:
            with _faults_logged():
                span.set_attribute("error.type", type(error).__name__)
        raise
    finally:
        if span is not None:
            with _faults_logged():
                # The span gets no error: a lock that another client holds is no failure of the program.
                scope.__exit__(None, None, None)


@contextmanager
def _faults_logged() -> Iterator[None]:
    """Log each type of error that the program's OpenTelemetry raises once, and let the call go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (what it raises is the program's code, and may be anything)
        kind = type(error).__qualname__
        if kind not in _logged:
            _logged.add(kind)
            _log.warning("span_failed error=%r: OpenTelemetry raised, and the call went on", error)
