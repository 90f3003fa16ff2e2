"""Runs one load program, and reads the CPU time and the memory of processes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster import ServiceError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A program that ends this much later than its measured time hangs.
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the output of a load program, and the CPU seconds of each role while it measured."""

    result: dict[str, Any]
    cpu_s: dict[str, float]


async def run_load(
    command: Sequence[str], *, processes: Mapping[str, Sequence[int]], timeout_s: float
) -> Outcome:
    """Run a load program to its end; `processes` maps each role to the ids of its processes.

    The program prints `begin` and `end` around the measured time, and then its result as JSON, with
    `cpu_s` of its own. It has the role `client`.

    Raises:
        ServiceError: the program failed or hung; the message has the last line of its errors.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    readings: dict[str, dict[str, float]] = {}
    last = ""
    try:
        async with asyncio.timeout(timeout_s + _GRACE_S):
            errors = asyncio.create_task(process.stderr.read())
            while line := (await process.stdout.readline()).decode().strip():
                if line in {"begin", "end"}:
                    readings[line] = {role: sum(map(cpu_s, pids)) for role, pids in processes.items()}
                last = line
            said = (await errors).decode().strip().splitlines()
            status = await process.wait()
    except TimeoutError:
        raise ServiceError(f"the load program did not end within {timeout_s + _GRACE_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status or readings.keys() != {"begin", "end"}:
        raise ServiceError(said[-1] if said else f"the load program ended with status {status} and no result")
    result = json.loads(last)
    used = {role: readings["end"][role] - readings["begin"][role] for role in processes}
    return Outcome(result, {**used, "client": result["cpu_s"]})


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its children so far, also of those that ended."""
    folder = Path("/proc", str(pid))
    try:
        # Fields 11 to 14 after the name are the CPU ticks of the process and of its ended children.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in (folder / "task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it ended
    return sum(map(int, fields[11:15])) / _TICKS_PER_S + sum(map(cpu_s, children))


def memory_bytes(pid: int) -> int:
    """Return how much memory of a process is in RAM."""
    lines = Path("/proc", str(pid), "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
