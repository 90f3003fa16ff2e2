"""Runs the command of `redfence lock` in its own process group, and waits until the whole group has ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_EXEC_CHILD = Path(__file__).with_name("exec_child.py")
_PR_SET_CHILD_SUBREAPER = 36
_STDIN = 0


class Child:
    """A running command and its process group.

    Attributes:
        status: the exit status of the command as a shell shows it (128 + n for signal n); None while it runs.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str]) -> None:
        """Start the command.

        Raises:
            OSError: the command could not be executed; nothing runs.
        """
        _become_subreaper()
        self.status: int | None = None
        self._owned_terminal = _owns_terminal()
        read_end, write_end = os.pipe()
        try:
            shim = [sys.executable, "-I", "-S", str(_EXEC_CHILD), str(os.getpid()), str(write_end)]
            process = subprocess.Popen(
                [*shim, "1" if self._owned_terminal else "0", *command],
                env=dict(environment),
                pass_fds=[write_end],
                process_group=0,
            )
        finally:
            os.close(write_end)
        # This object reaps the process, so subprocess must not wait for it.
        process.returncode = 0
        self._group = process.pid
        with os.fdopen(read_end, "rb") as errors:
            if failure := errors.read():
                os.waitpid(self._group, 0)
                self.give_back_terminal()
                raise OSError(int(failure), os.strerror(int(failure)), command[0])

    def signal(self, number: int) -> None:
        """Send a signal to every process of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, number)

    def reap(self) -> bool:
        """Reap the processes that have ended; return whether the whole group has ended."""
        while True:
            try:
                pid, status = os.waitpid(-self._group, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if os.WIFSTOPPED(status):
                if os.WSTOPSIG(status) == signal.SIGTSTP:
                    # Ctrl-Z: continue the group. A suspended holder would lose its lease, and no
                    # shell could resume it.
                    self.signal(signal.SIGCONT)
            elif pid == self._group:
                self.status = _exit_status(status)

    def give_back_terminal(self) -> None:
        """Make this process's group the terminal's foreground group again, if it was so before."""
        if self._owned_terminal:
            before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.tcsetpgrp(_STDIN, os.getpgrp())
            signal.signal(signal.SIGTTOU, before)


def _exit_status(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _owns_terminal() -> bool:
    try:
        return os.isatty(_STDIN) and os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:
        return False


def _become_subreaper() -> None:
    """Adopt the orphans of the group, so that `reap` sees when the last one has ended; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
