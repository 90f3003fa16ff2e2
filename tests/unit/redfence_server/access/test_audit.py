"""The audit log: a disk that takes nothing delays no caller, and the log says how much it lacks."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from redfence_server.access.audit import LINES_MAX, AuditLog
from redfence_server.clock import SystemClock
from redfence_server.errors import ConfigError


def test_a_disk_that_stands_still_costs_lines_that_are_counted(tmp_path: Path) -> None:
    """A pipe that is read late stands for the disk."""
    path = tmp_path / "audit"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    audit = AuditLog(str(path), clock=SystemClock())
    count = 2 * LINES_MAX
    for number in range(count):
        audit.record("acquire", "granted", resource="r", token=number)
    os.set_blocking(reader, True)
    closing = threading.Thread(target=audit.close)
    closing.start()
    with os.fdopen(reader) as stream:
        lines = [json.loads(line) for line in stream]
    closing.join()
    written = [line["token"] for line in lines if line["event"] == "acquire"]
    dropped = sum(line["count"] for line in lines if line["event"] == "audit_lines_dropped")
    assert written == sorted(written)
    assert dropped > 0
    assert len(written) + dropped == count


def test_a_full_disk_is_logged_once() -> None:
    with capture_logs() as logs:
        audit = AuditLog("/dev/full", clock=SystemClock())
        for _ in range(3):
            audit.record("acquire", "granted")
            audit.reopen()
        audit.close()
    assert [entry["event"] for entry in logs] == ["audit_log_failed"]


def test_a_file_that_cannot_be_opened_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audit_log: cannot write"):
        AuditLog(str(tmp_path / "absent" / "audit"), clock=SystemClock())
