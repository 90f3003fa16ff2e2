"""Write structured logs to standard error: one event a line, JSON for machines or columns for a terminal.

The level is the consequence. Debug is for a reader of the code. Info is an expected change of state. Warning
is a loss that the server repairs itself (one node). Error is a loss that callers notice (a quorum).
"""

from __future__ import annotations

import logging
import sys
from enum import StrEnum

import structlog
from google.protobuf.message import DecodeError

from redfence_server.grpc_sending import caller_has_left


class LogFormat(StrEnum):
    """The format of events; AUTO is CONSOLE on a terminal and JSON elsewhere."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class LogLevel(StrEnum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _LevelFilter:
    """Drops events below a level, which may change while the server runs."""

    def __init__(self) -> None:
        self.number = logging.INFO

    def __call__(
        self, _logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        if logging.getLevelNamesMapping().get(method.upper(), logging.ERROR) < self.number:
            raise structlog.DropEvent
        return event


_LEVEL_FILTER = _LevelFilter()


def set_level(level: LogLevel) -> None:
    """Change the lowest level that is logged, also by loggers that exist already."""
    _LEVEL_FILTER.number = logging.getLevelNamesMapping()[level.upper()]


def configure(
    *, log_format: LogFormat = LogFormat.AUTO, level: LogLevel = LogLevel.INFO, process: int | None = None
) -> None:
    """Send every event of this process to standard error in one format.

    A worker of several gives its number, and each event carries it as `process`.
    """
    if log_format is LogFormat.AUTO:
        log_format = LogFormat.CONSOLE if sys.stderr.isatty() else LogFormat.JSON
    set_level(level)
    renderer: structlog.typing.Processor
    if log_format is LogFormat.JSON:
        renderer = structlog.processors.JSONRenderer(sort_keys=True)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            _LEVEL_FILTER,
            structlog.contextvars.merge_contextvars,
            *([] if process is None else [_numbered(process)]),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        # It writes a line and its end at once, so that lines of several processes do not mix. A print makes
        # two writes where PYTHONUNBUFFERED is set.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    for earlier in [each for each in root.handlers if isinstance(each, _LibraryMessages)]:
        root.removeHandler(earlier)
    root.addHandler(_LibraryMessages(logging.WARNING))


class _LibraryMessages(logging.Handler):
    """Writes the warnings and errors that libraries give to Python's own logging as events."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, DecodeError):
            return  # A caller sent bytes that are no message to health or reflection; gRPC answered it.
        if caller_has_left(error):
            return  # A caller may leave at any time; grpcio takes some of them for errors.
        structlog.get_logger().log(
            record.levelno,
            "library_message",
            library=record.name,
            message=record.getMessage(),
            exc_info=record.exc_info,
        )


def _numbered(process: int) -> structlog.typing.Processor:
    # Not a context variable: callbacks of gRPC's threads begin with an empty context.
    def add_number(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["process"] = process
        return event

    return add_number
