"""Holds everything that one comparison measured, and keeps it as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.figures import Measurement, Target


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Holds the figures of a comparison, and the machine that made them.

    Attributes:
        targets: in the order of the tables' rows, also those that could not be run.
        workloads: in the order of the tables.
        absent: the reason for each target, by its name, that could not be run or failed.
        rounds: turns of each target.
        seconds: the measured time of a turn.
        at: when it was measured, in UTC.
    """

    targets: Sequence[Target]
    workloads: Sequence[str]
    measurements: Sequence[Measurement]
    absent: Mapping[str, str]
    rounds: int
    seconds: float
    at: str = field(default_factory=_now)
    machine: Mapping[str, Any] = field(default_factory=_machine)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Comparison:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
        """
        content = json.loads(path.read_text())
        content["targets"] = [Target(**each) for each in content["targets"]]
        content["measurements"] = [Measurement(**each) for each in content["measurements"]]
        return cls(**content)
