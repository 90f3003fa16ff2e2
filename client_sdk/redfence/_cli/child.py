"""Runs the command of `redfence lock` in its own process group, and waits for all its processes."""

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
_ANY = -1  # for waitpid: any child
_IS_LINUX = sys.platform == "linux"


class Child:
    """A running command with its process group and, on Linux, every other process that it has started.

    On Linux an orphan becomes a child of this process, even if it left the group by setsid.

    Attributes:
        status: the exit status of the command as a shell shows it (128 + n for signal n); None while it runs.
        was_suspended: whether Ctrl-Z came since the last `reap`; the group was continued.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str]) -> None:
        """Start the command.

        Raises:
            OSError: the command could not be executed; nothing runs.
        """
        _become_subreaper()
        # A shell that replaced itself with this program may have started them.
        others = _children()
        self._sees_children = others is not None
        self._others = frozenset(others or ())
        self.status: int | None = None
        self.was_suspended = False
        self._owned_terminal = _owns_terminal()
        read_end, write_end = os.pipe()
        os.set_inheritable(write_end, True)
        try:
            shim = [sys.executable, "-I", "-S", str(_EXEC_CHILD), str(os.getpid()), str(write_end)]
            process = subprocess.Popen(
                [*shim, "1" if self._owned_terminal else "0", *command],
                env=dict(environment),
                # The command gets what this program was given, e.g. make's jobserver and bash's <(…).
                close_fds=False,
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

    def end(self, number: int) -> None:
        """Send a signal to every process of the group, and to the orphans that left it."""
        self.signal(number)
        for pid in self._own_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def reap(self) -> bool:
        """Reap the processes that have ended; return whether all have ended."""
        self.was_suspended = False
        while True:
            try:
                pid, status = os.waitpid(
                    _ANY if self._sees_children else -self._group, os.WNOHANG | os.WUNTRACED
                )
            except ChildProcessError:
                return True
            if pid == 0:
                return self._sees_children and not self._own_children()
            if os.WIFSTOPPED(status):
                if os.WSTOPSIG(status) == signal.SIGTSTP:
                    # Ctrl-Z: continue the group. A suspended holder would lose its lease, and no
                    # shell could resume it.
                    self.signal(signal.SIGCONT)
                    self.was_suspended = True
            elif pid == self._group:
                self.status = _exit_status(status)

    def _own_children(self) -> set[int]:
        return set(_children() or ()) - self._others

    def give_back_terminal(self) -> None:
        """Make this process's group the terminal's foreground group again, if it was so before."""
        if self._owned_terminal:
            before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.tcsetpgrp(_STDIN, os.getpgrp())
            signal.signal(signal.SIGTTOU, before)


def _exit_status(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _children() -> list[int] | None:
    """Return the children of this process, with the orphans that it has adopted; None if unknown."""
    # Only Linux has this file, and not every kernel. Without it only the group of the command is known.
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return None


def _owns_terminal() -> bool:
    try:
        return os.isatty(_STDIN) and os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:
        return False


def _become_subreaper() -> None:
    """Adopt the orphans of the group, so that `reap` sees when the last one has ended; on Linux only."""
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
