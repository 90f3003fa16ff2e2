"""Becomes the command of `redfence lock`: dies with its parent, owns the terminal if there is one, reports a failed exec.

Run as a script: `python -I -S exec_child.py PARENT_PID ERROR_FD FOREGROUND COMMAND [ARGUMENT…]`. It is a script and not code
between fork and exec, which could deadlock in a parent that has threads, as gRPC has. It costs about 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become the command; write the errno of a failed exec to ERROR_FD, which a successful one closes."""
    parent_pid, error_fd, foreground, *command = arguments
    if sys.platform == "linux":
        # A wrapper that was killed cannot renew: its command must not go on without the lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent_pid):
        os._exit(signal.SIGKILL + 128)
    if foreground == "1":
        # A background group that takes the terminal is stopped by SIGTTOU unless it ignores it.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(0, os.getpgrp())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    # Python ignores these; a program expects to start with the defaults.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(ignored, signal.SIG_DFL)
    os.set_inheritable(int(error_fd), False)
    try:
        os.execvp(command[0], command)  # noqa: S606  (no shell is the point)
    except OSError as error:
        os.write(int(error_fd), str(error.errno).encode())
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
