"""Starts, stops, kills, replaces and ends the client processes of a run."""

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
from harness.chaos.services import Installation, environment
from harness.history.records import Kind, Operation, Outcome, in_order, read_operations
from harness.processes.commands import CommandProcess

_START_S = 60.0
# The longest call of a client and the close of its connections.
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
class _Client:
    installation: Installation
    workload: str
    process: CommandProcess
    records: Path
    generation: int = 0

    @property
    def name(self) -> str:
        return self.records.stem


class ClientPool:
    """The clients of one cluster.

    Args:
        cluster: the servers and the storage that they call.
        seed: of what they do.
        began_s: from when on they count their lists.
        count: how many clients to start.
        mix: their workloads, in turn.
        installations: the versions that they run, in turn.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        *,
        seed: str,
        began_s: float,
        count: int,
        mix: Sequence[str] = MIX,
        installations: Sequence[Installation] = (Installation(),),
    ) -> None:
        self._cluster = cluster
        self._seed = seed
        self._began_s = began_s
        self._count = count
        self._mix = mix
        self._installations = installations
        self._clients: list[_Client] = []
        self._folder = cluster.folder / "records"
        self._files: list[Path] = []

    def __len__(self) -> int:
        return len(self._clients)

    async def start(self) -> None:
        """Start all clients and return when all of them work."""
        self._folder.mkdir()
        for number in range(self._count):
            workload = self._mix[number % len(self._mix)]
            installation = self._installations[number % len(self._installations)]
            started = self._start_process(installation, workload, f"{workload}{number}")
            self._clients.append(_Client(installation, workload, *started))
        for each in self._clients:
            await each.process.wait_for_line(client.READY, timeout_s=_START_S)

    def _start_process(
        self, installation: Installation, workload: str, name: str
    ) -> tuple[CommandProcess, Path]:
        records = self._folder / f"{name}.jsonl"
        self._files.append(records)
        named = [word for address in self._cluster.addresses for word in ("--server", address)]
        process = self._cluster.processes.start(
            *(str(installation.python), "-m", "harness.chaos.client"),
            *("--name", name, "--workload", workload, "--workers", str(_WORKERS[workload])),
            *("--storage", self._cluster.storage.address, "--records", str(records)),
            *("--seed", f"{self._seed}/{name}", "--began", repr(self._began_s), *named),
            environment=environment(installation.tests),
        )
        return process, records

    def pid(self, index: int) -> int:
        """Return the process id of a client."""
        return self._clients[index].process.pid

    def is_before_write(self, index: int) -> bool:
        """Tell whether the records show a read of a list and not yet the write that follows it."""
        return _is_before_write(_last_lines(self._clients[index].records))

    def name_of(self, index: int) -> str:
        """Return the name of the present client at this index."""
        return self._clients[index].name

    def random_index(self, random: Random, workloads: Sequence[str]) -> int:
        """Draw a client of these workloads, or any client if there is none."""
        found = [index for index, each in enumerate(self._clients) if each.workload in workloads]
        return random.choice(found or list(range(len(self._clients))))

    async def stop_before_write(self, index: int) -> None:
        """Stop a client (SIGSTOP); a client that appends stops between its read and its write if possible."""
        stopped = self._clients[index]
        for _ in range(_TRIES_MAX):
            stopped.process.send_signal(signal.SIGSTOP)
            await _until_stopped(stopped.process.pid)
            # The records of a stopped process do not change.
            if stopped.workload not in ("append", "sdk") or self.is_before_write(index):
                return
            stopped.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(_TRY_S)
        stopped.process.send_signal(signal.SIGSTOP)

    def resume(self, index: int) -> None:
        """Let a stopped client go on (SIGCONT)."""
        self._clients[index].process.send_signal(signal.SIGCONT)

    def kill(self, index: int) -> None:
        """End a client by kill -9."""
        self._clients[index].process.kill()

    async def replace(self, index: int) -> None:
        """Start a new client, with a new name, at the index of a client that was killed."""
        each = self._clients[index]
        each.generation += 1
        name = f"{each.workload}{index}.{each.generation}"
        each.process, each.records = self._start_process(each.installation, each.workload, name)
        await each.process.wait_for_line(client.READY, timeout_s=_START_S)

    def ended_early(self) -> list[str]:
        """Return clients that have ended by themselves: defects of the harness or of the SDK."""
        return [
            f"{each.name} ended with {each.process.exit_status}: {each.process.stderr[-2000:]}"
            for each in self._clients
            if each.process.exit_status is not None
        ]

    async def end(self) -> list[str]:
        """Let all clients finish their work; return those that did not end with status 0."""
        for each in self._clients:
            each.process.send_signal(signal.SIGCONT)
            each.process.send_signal(signal.SIGTERM)
        wrong = []
        for each in self._clients:
            try:
                status: object = await each.process.wait(timeout_s=_END_S)
            except AssertionError:
                status = f"had not ended {_END_S:g} s after SIGTERM"
                each.process.kill()
            if status != 0:
                wrong.append(f"{each.name}: {status}: {each.process.stderr[-2000:]}")
        return wrong

    def operations(self) -> tuple[Operation, ...]:
        """Return all recorded calls, in the order of their invocation."""
        return in_order(
            each for path in self._files if path.exists() for each in settled(read_operations(path))
        )


async def _until_stopped(pid: int) -> None:
    """Return once a process has stopped after SIGSTOP; give up after many looks."""
    for _ in range(_TRIES_MAX):
        if Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] in ("T", "Z"):
            return
        await asyncio.sleep(_STOP_LOOK_S)


def _last_lines(path: Path) -> list[str]:
    """Return the last complete lines of a file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read().decode("utf-8")
    return [each for each in text.splitlines(keepends=True)[1:] if each.endswith("\n")]


def _is_before_write(lines: Sequence[str]) -> bool:
    reading: set[str] = set()
    for each in map(json.loads, lines):
        if each["kind"] == Kind.READ and each["outcome"] == Outcome.OK:
            reading.add(each["lease"])
        elif each["kind"] != Kind.READ:
            reading.discard(each["lease"])
    return bool(reading)
