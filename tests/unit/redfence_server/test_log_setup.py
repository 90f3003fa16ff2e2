"""The log's lines, as a reader of a file of several processes sees them."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import grpc
import pytest
import structlog
from google.protobuf.message import DecodeError

from redfence_server import log_setup


class Writes(io.StringIO):
    """Remembers each write, which the system does not split."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return super().write(text)


@pytest.fixture
def restored_log() -> Iterator[None]:
    """Leave the log as it was."""
    handlers = list(logging.getLogger().handlers)
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers


@pytest.mark.usefixtures("restored_log")
def test_a_line_and_its_end_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two writes, as where PYTHONUNBUFFERED is set, lines of several processes would mix."""
    # Not in the fixture: pytest sets the streams again before it calls a test.
    monkeypatch.setattr(sys, "stderr", stderr := Writes())
    log_setup.configure(process=3)
    structlog.get_logger().info("served", port=1)
    (text,) = stderr.texts
    assert text.endswith("\n")
    event = json.loads(text)
    assert (event["event"], event["port"], event["process"]) == ("served", 1, 3)
    log_setup.configure()
    structlog.get_logger().info("served")
    assert "process" not in json.loads(stderr.texts[1])


@pytest.mark.usefixtures("restored_log")
def test_messages_of_libraries_are_events_and_each_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := Writes())
    log_setup.configure()
    log_setup.configure()
    defect = ValueError("of the library")
    logging.getLogger("asyncio").error("Task exception was never %s", "retrieved", exc_info=defect)
    logging.getLogger("grpc").info("not of interest")
    logging.getLogger("grpc").error("bytes of a caller", exc_info=DecodeError("no message"))
    not_sent = grpc.aio.InternalError('Failed "execute_batch": (…)')
    logging.getLogger("grpc").error("a caller that left", exc_info=not_sent)
    (text,) = stderr.texts
    event = json.loads(text)
    assert (event["event"], event["library"], event["level"]) == ("library_message", "asyncio", "error")
    assert event["message"] == "Task exception was never retrieved"
    assert "ValueError: of the library" in event["exception"]
