"""Write what callers did to the audit log: one line of JSON each, by a thread of its own.

A slow or full disk never delays a caller. At most `LINES_MAX` lines wait; further lines are dropped, and one
line says how many. So the log is complete unless it says otherwise.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from redfence_server.clock import WallClock
from redfence_server.errors import ConfigError

STDERR: Final = "-"
LINES_MAX: Final = 10_000
_LINES_PER_WRITE_MAX: Final = 500
_DIGEST_DIGITS: Final = 8
_STDERR_FILE: Final = 2
# For the last lines, if the disk takes them.
_CLOSE_TIMEOUT_S: Final = 5.0


class AuditLog:
    """Appends lines to a file, or to standard error for `-`. Several processes may append to one file.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, target: str, *, clock: WallClock) -> None:
        self._target = target
        self._clock = clock
        self._lines: queue.Queue[Mapping[str, object] | None] = queue.Queue(LINES_MAX)
        # Each is changed by one thread only: the first by the callers' loop, the others by the writer.
        self._dropped = 0
        self._lost = 0
        self._reported = 0
        self._failed = False
        self._reopen = False
        self._closing = False
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"audit_log: cannot write {target}: {error.strerror}; name a file that this user can write, "
                f"or {STDERR} for standard error"
            ) from error
        self._writer = threading.Thread(target=self._run, name="redfence-audit", daemon=True)
        self._writer.start()

    def record(
        self,
        event: str,
        outcome: str,
        *,
        principal: str = "",
        peer: str = "",
        resource: str = "",
        token: int = 0,
        digest: str = "",
        **more: Any,
    ) -> None:
        """Queue one line; never wait. Only the first digits of a lease id's digest are written."""
        line = {
            "time": self._clock.wall_ms(),
            "event": event,
            "outcome": outcome,
            "principal": principal,
            "peer": peer,
            "resource": resource,
            "token": token,
            "lease": digest[:_DIGEST_DIGITS],
            **more,
        }
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def reopen(self) -> None:
        """Open the file anew before the next line, because a log rotation may have renamed it."""
        self._reopen = True
        self._wake()

    def close(self) -> None:
        """Write the queued lines and end; give up after `_CLOSE_TIMEOUT_S` if the disk does not take them."""
        self._closing = True
        self._wake()
        self._writer.join(_CLOSE_TIMEOUT_S)

    def _wake(self) -> None:
        # A full queue means that the writer is awake.
        with suppress(queue.Full):
            self._lines.put_nowait(None)

    def _open(self) -> int:
        if self._target == STDERR:
            return os.dup(_STDERR_FILE)
        return os.open(self._target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    # --- in the writer's thread

    def _run(self) -> None:
        while True:
            batch = [self._lines.get()]
            with suppress(queue.Empty):
                while len(batch) < _LINES_PER_WRITE_MAX:
                    batch.append(self._lines.get_nowait())
            self._write_batch([line for line in batch if line is not None])
            if self._closing and self._lines.empty():
                os.close(self._file)
                return

    def _write_batch(self, lines: list[Mapping[str, object]]) -> None:
        missing = self._dropped + self._lost - self._reported
        if missing:
            now = {"time": self._clock.wall_ms(), "event": "audit_lines_dropped", "count": missing}
            lines = [now, *lines]
        try:
            if self._reopen:
                self._reopen = False
                opened = self._open()
                os.close(self._file)
                self._file = opened
            # A failed write may have left the beginning of a line.
            self._write(("\n" * self._failed + "".join(map(_text, lines))).encode())
        except OSError as error:
            self._lost += len(lines) - bool(missing)
            if not self._failed:
                self._failed = True
                problem = error.strerror or str(error)
                structlog.get_logger().error("audit_log_failed", file=self._target, problem=problem)
            return
        self._reported += missing
        if self._failed:
            self._failed = False
            structlog.get_logger().info("audit_log_recovered", file=self._target, lines_lost=missing)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]


def _text(line: Mapping[str, object]) -> str:
    at_ms = line["time"]
    assert isinstance(at_ms, float)
    at = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return json.dumps({**line, "time": at}) + "\n"
