"""Become another program, which the kernel kills as soon as the parent dies, however it dies.

Run it as a script: `python -I -S embedded/parent_death.py PARENT_PID PROGRAM [ARGUMENT…]`. A `preexec_fn`
would run code between fork and exec, which can deadlock in a parent with threads, such as gRPC's.

The *thread* that started the child counts as its parent: start children on a thread that outlives them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(command: list[str]) -> list[str]:
    """Return a command that runs `command`, with an absolute path, and on Linux dies with this process."""
    if sys.platform != "linux":
        return command
    # Isolated and without site-packages, Python starts in a quarter of the time.
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]  # noqa: PTH100  (pathlib is slow to load)


def main(arguments: list[str]) -> None:
    """Tie this process to its parent and become the program."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    # A parent that died before the call above causes no signal (test_a_parent_that_is_already_gone_…).
    if os.getppid() != parent_pid:
        sys.exit("the parent is gone")
    os.execv(command[0], command)  # noqa: S606  (no shell is the point)


if __name__ == "__main__":
    main(sys.argv[1:])
