"""The clocks of a real process, moved while it runs.

An operator may set the wall clock. The steady clocks may stand still or run slow.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock_shim.c")
_COMPILE_TIMEOUT_S = 60.0
# A lag begins so long after it was set. The old and the new one agree before, so no clock goes back.
_LAG_BEGINS_NS = 1_000_000


class NoCompilerError(Exception):
    """Clocks cannot be moved on this machine; the message says why."""


def compile_clock_shim(folder: Path) -> Path:
    """Return the library that moves a process' clock, compiled into `folder`."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or sys.platform != "linux":
        raise NoCompilerError("no C compiler for Linux: clocks cannot be moved")
    library = folder / "clock_shim.so"
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, "-o", library, _SOURCE], check=True, timeout=_COMPILE_TIMEOUT_S)
    return library


class _Lag(ctypes.Structure):
    """A loss of the steady clocks, as in clock_shim.c."""

    lost_ns: int
    from_ns: int
    until_ns: int
    loss_ns: int
    _fields_ = [(name, ctypes.c_int64) for name in ("lost_ns", "from_ns", "until_ns", "loss_ns")]


class _Moves(ctypes.Structure):
    """What the shim reads."""

    offset_ns: int
    in_force: int
    lags: ctypes.Array[_Lag]
    _fields_ = [("offset_ns", ctypes.c_int64), ("in_force", ctypes.c_int64), ("lags", _Lag * 2)]


class MovedClock:
    """The clocks of the processes started through one wrapper; it outlives each of them."""

    def __init__(self, shim: Path, *, program: Path, path: Path) -> None:
        file = path.with_name(f"{path.name}.clock")
        file.write_bytes(bytes(ctypes.sizeof(_Moves)))
        with file.open("r+b") as opened:
            self._mapped = mmap.mmap(opened.fileno(), 0)
        # Each change takes effect by one aligned store: the process never sees half of it.
        self._moves = _Moves.from_buffer(self._mapped)
        variables = {"LD_PRELOAD": shim, "REDFENCE_CLOCK_FILE": file}
        settings = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in variables.items())
        path.write_text(f'#!/bin/sh\n{settings} exec {shlex.quote(str(program))} "$@"\n')
        path.chmod(0o700)
        self.wrapper = path

    @property
    def offset_ms(self) -> float:
        return self._moves.offset_ns / 1e6

    def step(self, ms: float) -> None:
        """Move the wall clock, forward if above 0, from this instant on."""
        self._moves.offset_ns += round(ms * 1e6)

    def lag(self, loss_ms: float, *, over_ms: float) -> None:
        """Let the steady clocks lose so much, evenly, from now on; all of `over_ms` if they stand still.

        A lag before it ends. What they have lost they never get back.
        """
        assert 0 <= loss_ms <= over_ms, "no steady clock goes back"
        assert over_ms > 0, "a loss takes time"
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        before = self._moves.lags[self._moves.in_force]
        spare = 1 - self._moves.in_force
        self._moves.lags[spare] = _Lag(
            lost_ns=_lost_ns(before, now_ns),
            from_ns=now_ns + _LAG_BEGINS_NS,
            until_ns=now_ns + _LAG_BEGINS_NS + round(over_ms * 1e6),
            loss_ns=round(loss_ms * 1e6),
        )
        self._moves.in_force = spare

    @property
    def lag_ms(self) -> float:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return _lost_ns(self._moves.lags[self._moves.in_force], now_ns) / 1e6


def _lost_ns(lag: _Lag, now_ns: int) -> int:
    """Return what is lost by an instant."""
    if now_ns <= lag.from_ns:
        return lag.lost_ns
    if now_ns >= lag.until_ns:
        return lag.lost_ns + lag.loss_ns
    return lag.lost_ns + lag.loss_ns * (now_ns - lag.from_ns) // (lag.until_ns - lag.from_ns)
