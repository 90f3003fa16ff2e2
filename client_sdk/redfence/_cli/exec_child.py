"""Replaces itself with the command of `redfence lock`; ends with its parent and reports a failed exec.

Run as a script: `python -I -S exec_child.py PARENT_PID ERROR_FD FOREGROUND COMMAND [ARGUMENT…]`.

If FOREGROUND is 1, it also takes the terminal. It is a script because Python code between fork and
exec could deadlock in a parent with threads, and gRPC has threads. It costs about 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Execute the command; if that fails, write the errno to ERROR_FD. A successful exec closes ERROR_FD."""
    parent_pid, error_fd, foreground, *command = arguments
    if sys.platform == "linux":
        # A killed parent cannot renew the lease, so its command must not continue without the lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent_pid):
        os._exit(signal.SIGKILL + 128)
    if foreground == "1":
        # The kernel stops a background group that takes the terminal, unless the group ignores SIGTTOU.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(0, os.getpgrp())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    # Python ignores these signals, but a program expects the default actions.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    os.set_inheritable(int(error_fd), False)
    try:
        os.execvp(command[0], command)  # noqa: S606  (no shell is wanted)
    except OSError as error:
        os.write(int(error_fd), str(error.errno).encode())
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
