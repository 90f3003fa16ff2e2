"""The clients of a run: processes that are started, stopped in mid-thought, killed, followed by others, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from harness.chaos import client
from harness.chaos.cluster import ChaosCluster
from harness.chaos.recorder import settled
from harness.chaos.services import environment, harness_program
from harness.history.records import Kind, Operation, Outcome, in_order, read_operations
from harness.processes.commands import CommandProcess

_START_S = 60.0
# The longest call of a client, and the closing of its connections.
_END_S = 30.0
_TAIL_BYTES = 8 * 1024
_TRIES_MAX = 200
_TRY_S = 0.01
_STOP_LOOK_S = 0.001
MIX = (
    *("append", "append", "append", "append"),
    *("race", "race", "keep", "keep", "sdk", "threads"),
)
_WORKERS = {"append": 3, "race": 3, "keep": 2, "sdk": 2, "threads": 2}


@dataclass(slots=True)
class _Seat:
    workload: str
    process: CommandProcess
    records: Path
    generation: int = 0


class ClientPool:
    """The clients of one cluster.

    Args:
        cluster: what they call.
        seed: of what they do.
        began_s: since when they count.
        count: how many.
        mix: their workloads, in turn.
    """

    def __init__(
        self, cluster: ChaosCluster, *, seed: str, began_s: float, count: int, mix: Sequence[str] = MIX
    ) -> None:
        self._cluster = cluster
        self._seed = seed
        self._began_s = began_s
        self._count = count
        self._mix = mix
        self._seats: list[_Seat] = []
        self._folder = cluster.folder / "records"
        self._files: list[Path] = []

    def __len__(self) -> int:
        return len(self._seats)

    async def start(self) -> None:
        """Start them; return when all of them work."""
        self._folder.mkdir()
        for number in range(self._count):
            workload = self._mix[number % len(self._mix)]
            name = f"{workload}{number}"
            process, records = self._start_process(workload, name)
            self._seats.append(_Seat(workload, process, records))
        for seat in self._seats:
            await seat.process.wait_for_line(client.READY, timeout_s=_START_S)

    def _start_process(self, workload: str, name: str) -> tuple[CommandProcess, Path]:
        records = self._folder / f"{name}.jsonl"
        self._files.append(records)
        named = [word for address in self._cluster.addresses for word in ("--server", address)]
        process = self._cluster.processes.start(
            *harness_program("harness.chaos.client"),
            *("--name", name, "--workload", workload, "--workers", str(_WORKERS[workload])),
            *("--storage", self._cluster.storage.address, "--records", str(records)),
            *("--seed", f"{self._seed}/{name}", "--began", repr(self._began_s), *named),
            environment=environment(),
        )
        return process, records

    def pid(self, place: int) -> int:
        """Return the process id of a client."""
        return self._seats[place].process.pid

    def thinks(self, place: int) -> bool:
        """Tell whether a client has read a list and not yet begun to write it, as far as it has written down."""
        return _thinks(_last(self._seats[place].records))

    def name_of(self, place: int) -> str:
        """Return what a client is called at present."""
        return self._seats[place].records.stem

    def places(self, workloads: Sequence[str]) -> list[int]:
        """Return where clients of these workloads are."""
        return [place for place, seat in enumerate(self._seats) if seat.workload in workloads]

    async def stop_in_thought(self, place: int) -> None:
        """Stop a client (SIGSTOP), if it appends between its read and its write; after many tries anywhere."""
        seat = self._seats[place]
        for _ in range(_TRIES_MAX):
            seat.process.send_signal(signal.SIGSTOP)
            await _until_stopped(seat.process.pid)
            # While it is stopped, what it has written down stays as it is.
            if seat.workload not in ("append", "sdk") or _thinks(_last(seat.records)):
                return
            seat.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(_TRY_S)
        seat.process.send_signal(signal.SIGSTOP)

    def resume(self, place: int) -> None:
        """Let it go on (SIGCONT)."""
        self._seats[place].process.send_signal(signal.SIGCONT)

    def kill(self, place: int) -> None:
        """End it by kill -9."""
        self._seats[place].process.kill()

    async def follow(self, place: int) -> None:
        """Let another client take the place of one that was killed."""
        seat = self._seats[place]
        seat.generation += 1
        name = f"{seat.workload}{place}.{seat.generation}"
        seat.process, seat.records = self._start_process(seat.workload, name)
        await seat.process.wait_for_line(client.READY, timeout_s=_START_S)

    def ended_early(self) -> list[str]:
        """Return clients that have ended without being told, and what they wrote: defects of the harness or of the SDK."""
        return [
            f"{seat.records.stem} ended with {seat.process.exit_status}: {seat.process.stderr[-2000:]}"
            for seat in self._seats
            if seat.process.exit_status is not None
        ]

    async def end(self) -> list[str]:
        """Let all of them end what they do; return those that did not end in order."""
        for seat in self._seats:
            seat.process.send_signal(signal.SIGCONT)
            seat.process.send_signal(signal.SIGTERM)
        wrong = []
        for seat in self._seats:
            try:
                status: object = await seat.process.wait(timeout_s=_END_S)
            except AssertionError:
                status = f"had not ended {_END_S:g} s after SIGTERM"
                seat.process.kill()
            if status != 0:
                wrong.append(f"{seat.records.stem}: {status}: {seat.process.stderr[-2000:]}")
        return wrong

    def operations(self) -> tuple[Operation, ...]:
        """Return everything that they have written down."""
        return in_order(
            each for path in self._files if path.exists() for each in settled(read_operations(path))
        )

    def random_place(self, random: Random, workloads: Sequence[str]) -> int:
        """Return the place of some client of these workloads, or of any if there is none."""
        return random.choice(self.places(workloads) or list(range(len(self._seats))))


async def _until_stopped(pid: int) -> None:
    """Return once a process that was sent SIGSTOP stands still, which may take a moment; give up after many looks."""
    for _ in range(_TRIES_MAX):
        if Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] in ("T", "Z"):
            return
        await asyncio.sleep(_STOP_LOOK_S)


def _last(path: Path) -> list[str]:
    """Return the last whole lines."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read().decode("utf-8")
    return [each for each in text.splitlines(keepends=True)[1:] if each.endswith("\n")]


def _thinks(lines: Sequence[str]) -> bool:
    """Tell whether somebody has read a list and not yet begun to write it."""
    reading: set[str] = set()
    for each in map(json.loads, lines):
        if each["kind"] == Kind.READ and each["outcome"] == Outcome.OK:
            reading.add(each["lease"])
        elif each["kind"] != Kind.READ:
            reading.discard(each["lease"])
    return bool(reading)
