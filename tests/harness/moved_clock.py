"""The wall clock of a real process, moved while it runs, as if an operator or a time service had set it."""

from __future__ import annotations

import ctypes
import mmap
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock_shim.c")
_COMPILE_TIMEOUT_S = 60.0


class NoCompilerError(Exception):
    """Clocks cannot be moved on this machine; the message says why."""


def compile_clock_shim(folder: Path) -> Path:
    """Return the library that moves a process' clock, compiled into `folder`.

    Raises:
        NoCompilerError: there is no C compiler, or this is not Linux.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or sys.platform != "linux":
        raise NoCompilerError("no C compiler for Linux: clocks cannot be moved")
    library = folder / "clock_shim.so"
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, "-o", library, _SOURCE], check=True, timeout=_COMPILE_TIMEOUT_S)
    return library


class MovedClock:
    """The wall clock of the processes started through one wrapper; it outlives each of them.

    Args:
        shim: from `compile_clock_shim`.
        program: what the wrapper becomes.
        path: where to put the wrapper. What it needs is put beside it.
    """

    def __init__(self, shim: Path, *, program: Path, path: Path) -> None:
        file = path.with_name(f"{path.name}.clock")
        file.write_bytes(bytes(ctypes.sizeof(ctypes.c_int64)))
        with file.open("r+b") as opened:
            self._mapped = mmap.mmap(opened.fileno(), 0)
        # One aligned store: the process never sees half of a change.
        self._offset_ns = ctypes.c_int64.from_buffer(self._mapped)
        variables = {"LD_PRELOAD": shim, "REDFENCE_CLOCK_FILE": file}
        settings = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in variables.items())
        path.write_text(f'#!/bin/sh\n{settings} exec {shlex.quote(str(program))} "$@"\n')
        path.chmod(0o700)
        self.wrapper = path

    @property
    def offset_ms(self) -> float:
        """By how much it is ahead of the machine's."""
        return self._offset_ns.value / 1e6

    def step(self, ms: float) -> None:
        """Move it, forward if above 0, from this instant on."""
        self._offset_ns.value += round(ms * 1e6)
