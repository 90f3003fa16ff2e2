"""The command that runs under a lock: a process group of its own, of which nothing is left in the end."""

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
    """A started command and its group.

    Attributes:
        status: the command's own exit status as a shell gives it (128 + n for signal n), once it has ended.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str]) -> None:
        """Start the command.

        Raises:
            OSError: it could not be executed; nothing runs.
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
        # This object reaps; subprocess must not wait for the process a second time.
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
        """Collect what has ended; return whether the whole group has."""
        while True:
            try:
                pid, status = os.waitpid(-self._group, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if os.WIFSTOPPED(status):
                if os.WSTOPSIG(status) == signal.SIGTSTP:
                    # Ctrl-Z: a holder that is suspended only loses its lease, and nobody could resume it.
                    self.signal(signal.SIGCONT)
            elif pid == self._group:
                self.status = _exit_status(status)

    def give_back_terminal(self) -> None:
        """Make this process' group the terminal's foreground again, if it was before."""
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
    """Adopt the group's orphans, so that `reap` knows when the last of them has ended; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
