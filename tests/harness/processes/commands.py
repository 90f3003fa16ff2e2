"""Real commands as real processes, their output in files, and none left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.processes.redis_nodes import RedisNode
from harness.time import timeouts
from redfence_server.embedded.parent_death import die_with_parent

_LOOK_INTERVAL_S = 0.005
_KILL_TIMEOUT_S = 10.0
DEV = ("dev", "--listen", "127.0.0.1:0", "--storage-listen", "127.0.0.1:0")
DEV_READY = r"^redfence ready: lock server on (\S+), storage on (\S+), (\d) nodes in (\S+); Ctrl-C stops all$"


def node_flags(nodes: Sequence[RedisNode | str]) -> list[str]:
    """Name nodes, or their URLs, on a command line."""
    return [flag for node in nodes for flag in ("--node", node if isinstance(node, str) else node.url)]


class CommandProcess:
    """One started command. It is in a session of its own, and dies with the test run at the latest."""

    def __init__(
        self, command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._command = command
        self._stdout_path, self._stderr_path = folder / "stdout", folder / "stderr"
        with self._stdout_path.open("wb") as stdout, self._stderr_path.open("wb") as stderr:
            # A full pipe would stop the command. A file does not.
            self._popen = subprocess.Popen(
                die_with_parent(list(command)),
                cwd=folder,
                # A killed command leaves its temporary files behind.
                env={**os.environ, "TMPDIR": str(folder), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id, also after its end."""
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; then its exit status, or the signal's number negated."""
        return self._popen.poll()

    @property
    def stdout(self) -> str:
        """The output that the command has written so far."""
        return self._stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """The output that the command has written so far."""
        return self._stderr_path.read_text(errors="replace")

    async def wait_for_line(self, pattern: str, *, timeout_s: float = 10.0) -> re.Match[str]:
        """Return the first whole line of output that has `pattern`; fail if the command ends before."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # Asked first, so that the last line counts.
                    ended = self.exit_status is not None
                    for line in self.stdout.splitlines(keepends=True):
                        if line.endswith("\n") and (found := re.search(pattern, line)):
                            return found
                    if ended:
                        raise AssertionError(
                            self._told(
                                f"ended with status {self.exit_status} without a line like {pattern!r}"
                            )
                        )
                    await asyncio.sleep(_LOOK_INTERVAL_S)
        except TimeoutError:
            raise AssertionError(self._told(f"wrote no line like {pattern!r} in {timeout_s:g} s")) from None

    async def wait(self, *, timeout_s: float = 10.0) -> int:
        """Return the exit status once the command has ended by itself."""
        try:
            async with asyncio.timeout(timeout_s):
                while (status := self.exit_status) is None:  # noqa: ASYNC110  (a process sets no event)
                    await asyncio.sleep(_LOOK_INTERVAL_S)
        except TimeoutError:
            raise AssertionError(self._told(f"had not ended after {timeout_s:g} s")) from None
        return status

    async def stop(self, *, number: signal.Signals = signal.SIGTERM, timeout_s: float = 10.0) -> int:
        """Ask the command to end and return its exit status; not to end is a failure."""
        self.send_signal(number)
        return await self.wait(timeout_s=timeout_s)

    async def ended(self, *, status: int = 0, timeout_s: float = 30.0) -> str:
        """Return all it wrote, once it has ended by itself with this status and without a traceback."""
        assert await self.wait(timeout_s=timeout_s) == status, self._told("ended with another status")
        assert "Traceback" not in self.stderr, self.stderr
        return self.stdout + self.stderr

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, SIGSTOP and SIGCONT included; nothing happens after the command's end."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """End the command by kill -9; it is gone on return. Harmless to repeat."""
        self.send_signal(signal.SIGKILL)
        self._popen.wait(_KILL_TIMEOUT_S)

    def _told(self, what: str) -> str:
        return f"{' '.join(self._command)} {what}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class CommandProcesses:
    """Every command of one test; `close` ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[CommandProcess] = []

    def start(self, *command: str, environment: Mapping[str, str] | None = None) -> CommandProcess:
        """Start a command; its program is an absolute path."""
        process = CommandProcess(
            command, folder=self._folder / f"command-{len(self._started)}", environment=environment
        )
        self._started.append(process)
        return process

    def start_redfence(self, *arguments: str, environment: Mapping[str, str] | None = None) -> CommandProcess:
        """Start the installed console command `redfence`; it is patient with nodes unless told otherwise."""
        return self.start(
            str(Path(sys.executable).with_name("redfence")),
            *arguments,
            environment={"REDFENCE_NODE_TIMEOUT_MS": str(timeouts.NODE_TIMEOUT_MS), **(environment or {})},
        )

    async def start_serve(self, nodes: Sequence[RedisNode | str], *flags: str) -> tuple[CommandProcess, str]:
        """Start `redfence serve` over formed nodes on any free port; return it and its address."""
        server = self.start_redfence("serve", "--listen", "127.0.0.1:0", *node_flags(nodes), *flags)
        return server, (await server.wait_for_line(r"serving on ([\d.:]+)", timeout_s=20))[1]

    async def start_dev(self, *options: str) -> tuple[CommandProcess, re.Match[str]]:
        """Start `redfence dev` on free ports; return it and its ready line.

        The groups of the line: addresses of lock server and storage, count of nodes, folder.
        """
        dev = self.start_redfence(*DEV, *options)
        return dev, await dev.wait_for_line(DEV_READY, timeout_s=30)

    def close(self) -> None:
        """Kill whatever still runs; harmless to repeat."""
        for process in self._started:
            process.kill()
