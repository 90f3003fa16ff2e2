"""Stalls of this machine, reported beside a failure: was it the product or the machine?"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BEAT_S: Final = 0.05
# A beat this late was held up by more than other threads of this process.
_LATE_MS: Final = 250.0
# The clocks of a machine agree better than this over one beat, unless one of them is set.
_STEP_MS: Final = 100.0
_PRESSURE: Final = Path("/proc/pressure")
_US_PER_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Stall:
    """One beat that came late, or over which the clocks did not agree.

    Attributes:
        at_s: its end, on the monotonic clock.
        late_ms: how late the beat came.
        stepped_ms: by how much more the wall clock went than the monotonic one. Redis uses the wall clock.
    """

    at_s: float
    late_ms: float
    stepped_ms: float


@dataclass(frozen=True, slots=True)
class MachineMark:
    """An instant to tell what happened since."""

    at_s: float
    waited_ms: dict[str, float]


class StallWatch:
    """A thread that beats, and notes when it could not."""

    def __init__(self) -> None:
        self._noted: list[Stall] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="stall-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    @staticmethod
    def mark() -> MachineMark:
        return MachineMark(time.monotonic(), _waited_ms())

    def slowed_s(self, mark: MachineMark) -> float:
        """Return by how much the machine may have slowed a test since then; infinity if Linux does not tell.

        Linux counts the time for which at least one task waited, however many did. Two cores run two tests,
        so each second counts twice.
        """
        waited_ms = _waited_ms()
        if not waited_ms:
            return math.inf
        late_ms = sum(noted.late_ms for noted in self._noted if noted.at_s > mark.at_s)
        return (2 * (sum(waited_ms.values()) - sum(mark.waited_ms.values())) + late_ms) / 1e3

    def told_since(self, mark: MachineMark) -> str:
        """Return what of the machine may explain a failure since then, a line each."""
        lines = [
            f"{noted.at_s - mark.at_s:.1f} s after the start nothing ran for {noted.late_ms:.0f} ms,"
            f" and the wall clock went {noted.stepped_ms:+.0f} ms beside the monotonic one"
            for noted in self._noted
            if noted.at_s > mark.at_s
        ]
        lines += [
            f"tasks of this machine waited for {what} for {waited_ms - mark.waited_ms.get(what, 0):.0f} ms"
            for what, waited_ms in _waited_ms().items()
        ]
        return "\n".join(lines)

    def _beat(self) -> None:
        before_s, before_wall_s = time.monotonic(), time.time()
        while not self._stopping.wait(_BEAT_S):
            now_s, now_wall_s = time.monotonic(), time.time()
            late_ms = (now_s - before_s - _BEAT_S) * 1e3
            stepped_ms = ((now_wall_s - before_wall_s) - (now_s - before_s)) * 1e3
            if late_ms > _LATE_MS or abs(stepped_ms) > _STEP_MS:
                self._noted.append(Stall(now_s, late_ms, stepped_ms))
            before_s, before_wall_s = now_s, now_wall_s


def _waited_ms() -> dict[str, float]:
    """Return how long tasks waited for each resource since the machine's start; {} if Linux does not tell."""
    waited = {}
    for what in ("cpu", "io", "memory"):
        try:
            some = (_PRESSURE / what).read_text("ascii").splitlines()[0]
        except OSError:
            continue
        waited[what] = int(some.rpartition("total=")[2]) / _US_PER_MS
    return waited
