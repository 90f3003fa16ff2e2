"""Run one Redis or Valkey process as a node that forgets nothing: configure, start and end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from redfence_server.embedded.binary import RedisBinary
from redfence_server.embedded.parent_death import die_with_parent
from redfence_server.errors import StartupError
from redfence_server.redis_io.dial import DialError, NodeUrl, dial

HOST = "127.0.0.1"
CONF_NAME = "node.conf"
LOG_NAME = "node.log"
AppendFsync = Literal["always", "everysec", "no"]

_LOG_TAIL_BYTES = 4096
# The interval between checks of a starting or stopping process grows: most take only a few ms.
_POLL_INTERVAL_S_FIRST = 0.002
_POLL_INTERVAL_S_MAX = 0.05
# Another program on the port may accept and never answer; we must still notice that our process died.
_ANSWER_TIMEOUT_MS = 200
_KILL_TIMEOUT_S = 10.0


class NodeStartError(StartupError):
    """The process did not become a node; the message ends with its log."""


class PortTakenError(NodeStartError):
    """Another process has the port; try another port."""


@dataclass(frozen=True, slots=True)
class NodeConf:
    """The configuration of one node: its folder, its port and its durability.

    Attributes:
        password: hex digits, written only to a file that this user alone may read.
        appendfsync: any value but "always" forgets acknowledged writes when the machine dies.
    """

    folder: Path
    port: int
    password: str = field(repr=False)
    appendfsync: AppendFsync = "always"

    @property
    def url(self) -> str:
        """The node's address, password included."""
        return f"redis://:{self.password}@{HOST}:{self.port}"

    def write(self) -> None:
        """Create the folder and the configuration file, both for this user only."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = (
            f"bind {HOST}",
            f"port {self.port}",
            "protected-mode yes",
            f"requirepass {self.password}",
            "daemonize no",
            # Paths are relative to the working directory, so no path is ever quoted.
            "dir .",
            f"logfile {LOG_NAME}",
            "appendonly yes",
            f"appendfsync {self.appendfsync}",
            # A node whose append-only file lost its end must not start and vote as if it remembered.
            "aof-load-truncated no",
            'save ""',
            "maxmemory-policy noeviction",
        )
        descriptor = os.open(self.folder / CONF_NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            # The file may have existed with other rights.
            os.fchmod(descriptor, 0o600)
            file.write("\n".join(lines) + "\n")


class NodeProcess:
    """A started process. Its owner ends it by `stop` or `kill`; Linux ends it if this process dies first."""

    def __init__(self, conf: NodeConf, *, binary: RedisBinary, inherited_fds: Collection[int] = ()) -> None:
        """Write the configuration and start the process, in a session without the terminal's Ctrl-C.

        The binary may be a wrapper script that execs the server. The process keeps the locks of
        `inherited_fds`.
        """
        conf.write()
        self._conf = conf
        log_path = conf.folder / LOG_NAME
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        with log_path.open("ab") as log:
            # The process reports configuration errors before it opens its log file.
            self._popen = subprocess.Popen(
                die_with_parent([str(binary.path), CONF_NAME]),
                cwd=conf.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=tuple(inherited_fds),
            )

    @property
    def pid(self) -> int:
        """The process id, also after its end."""
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; then its exit status, or the negated number of the signal."""
        return self._popen.poll()

    async def wait_until_ready(self, *, timeout_s: float) -> None:
        """Return once this very process has loaded its data and answers commands.

        Cancellation: the process runs on; end it.

        Raises:
            PortTakenError: it ended because it could not listen.
            NodeStartError: it ended, or was not ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                interval_s = _POLL_INTERVAL_S_FIRST
                while not await self._answers():
                    if self.exit_status is not None:
                        raise self._start_error(f"ended with status {self.exit_status}")
                    await asyncio.sleep(interval_s)
                    interval_s = min(interval_s * 1.5, _POLL_INTERVAL_S_MAX)
        except TimeoutError:
            raise self._start_error(f"was not ready after {timeout_s:g} s") from None

    async def stop(self, *, timeout_s: float) -> None:
        """End the process by SIGTERM, or by SIGKILL after `timeout_s`. Harmless to repeat.

        Cancellation: the process is killed at once.
        """
        self.send_signal(signal.SIGTERM)
        interval_s = _POLL_INTERVAL_S_FIRST
        try:
            async with asyncio.timeout(timeout_s):
                while self.exit_status is None:
                    await asyncio.sleep(interval_s)
                    interval_s = min(interval_s * 1.5, _POLL_INTERVAL_S_MAX)
        except TimeoutError:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process at once (SIGKILL) and return when it is gone. Harmless to repeat."""
        self.send_signal(signal.SIGKILL)
        self._popen.wait(_KILL_TIMEOUT_S)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended: another process may have its id by then."""
        self._popen.send_signal(number)

    async def _answers(self) -> bool:
        with contextlib.suppress(DialError, OSError):
            node = await dial(NodeUrl(self._conf.url), timeout_ms=_ANSWER_TIMEOUT_MS)
            try:
                # A node answers INFO also while it loads its data.
                pong, info = await node.commands(("PING",), ("INFO", "server"))
            finally:
                await node.close()
            # Another program may have taken the port; it would answer PONG as well.
            return pong == b"PONG" and isinstance(info, bytes) and b"process_id:%d\r\n" % self.pid in info
        return False

    def _start_error(self, what: str) -> NodeStartError:
        with (self._conf.folder / LOG_NAME).open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        kind = PortTakenError if "address already in use" in tail.lower() else NodeStartError
        return kind(f"the node in {self._conf.folder} {what}; its log ends with:\n{tail}")
