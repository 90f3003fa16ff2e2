"""Start, drain and kill the process of one worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

from redfence_server.api.serving import parse_listen
from redfence_server.config import RELOADABLE, ServeConfig
from redfence_server.embedded.parent_death import die_with_parent
from redfence_server.errors import StartupError
from redfence_server.supervision import worker

# For the interpreter's start and the last steps; `start_timeout_ms` bounds the wait for a quorum.
_START_TIMEOUT_S = 30.0


class WorkerStartError(StartupError):
    """A worker did not come to serve; the message is the worker's own reason if it gave one."""


def _own_settings(settings: ServeConfig, number: int) -> ServeConfig:
    """Return the settings of one worker; each serves metrics on a port of its own."""
    if not settings.metrics_listen:
        return settings
    _, port = parse_listen(settings.metrics_listen, setting="metrics_listen")
    # Port 0 takes any free one for each; a port above 65535 is refused by the worker.
    own = f"{settings.metrics_listen.rpartition(':')[0]}:{port and port + number - 1}"
    return settings.model_copy(update={"metrics_listen": own})


class WorkerProcess:
    """Runs one worker as a process, at most one at a time. Linux kills the process if this one dies.

    The owner must call `kill` at the end.

    Attributes:
        number: which worker it is, from 1.
        serves: whether the process takes connections, as far as it has said.
    """

    def __init__(self, number: int, settings: ServeConfig) -> None:
        self.number = number
        self.serves = False
        self._settings = _own_settings(settings, number)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The id of the last process."""
        return self._running.pid

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "it was never started"
        return self._process

    async def start(self) -> None:
        """Start the process, and return once it serves.

        Cancellation: the process runs on; `kill` ends it.

        Raises:
            WorkerStartError: it ended, or did not serve in time; no process is left.
        """
        # `-P`: no module of the working directory may take the place of a library.
        command = [sys.executable, "-P", "-m", worker.__name__, str(self.number)]
        # In a session of its own, without the terminal's Ctrl-C: the supervisor drains it.
        process = self._process = await asyncio.create_subprocess_exec(
            *die_with_parent(command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._write_settings(process.stdin)
        start_timeout_s = self._settings.start_timeout_ms / 1000
        # A process that waits for a quorum without a bound answers, by its health, that it is not ready.
        timeout_s = _START_TIMEOUT_S + start_timeout_s if start_timeout_s else None
        try:
            async with asyncio.timeout(timeout_s):
                report = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            await self.kill()
            raise WorkerStartError(f"process {self.number} did not serve in {timeout_s:g} s") from None
        if report == worker.SERVING:
            self.serves = True
            return
        status = await self.ended()
        raise WorkerStartError(
            report.removeprefix(worker.REFUSED).strip()
            or f"process {self.number} ended with status {status} before it served; its log says more"
        )

    async def ended(self) -> int:
        """Return the exit status once the process has ended, or the negated number of the signal."""
        status = await self._running.wait()
        self.serves = False
        return status

    def reload(self, settings: ServeConfig | None) -> None:
        """Have the process read its files again, and take over the settings that a reload may change."""
        if settings is not None:
            taken = {name: getattr(settings, name) for name in RELOADABLE}
            self._settings = self._settings.model_copy(update=taken)
        if self.serves and self._running.stdin is not None and not self._running.stdin.is_closing():
            self._write_settings(self._running.stdin)

    def _write_settings(self, stdin: asyncio.StreamWriter) -> None:
        # By a pipe, because every user of the machine can see arguments, and URLs hold passwords.
        stdin.write(self._settings.model_dump_json().encode() + b"\n")

    def begin_drain(self) -> None:
        """Tell the process to drain and to end; harmless to repeat."""
        assert self._running.stdin is not None
        self._running.stdin.close()

    async def kill(self) -> None:
        """End the process at once, and return when it is gone; harmless to repeat, or if none was started."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # By the system: asyncio's `kill` reaps a process that has just ended, so its own watcher
                # reports the status 255, and an unknown process in the log.
                os.kill(self._process.pid, signal.SIGKILL)
        await self.ended()
