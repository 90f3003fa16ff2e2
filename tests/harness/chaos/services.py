"""Starts and stops servers and the storage; each service keeps its address through all its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from harness.chaos.lock_calls import CHANNEL_OPTIONS
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.ports import HOST, free_port
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import LockServer, new_lease_id, until
from harness.processes.tcp_proxy import TcpProxy
from harness.time.moved_clock import MovedClock
from redfence_proto.v1.lock_pb2 import ACQUIRE_OUTCOME_GRANTED, NODE_STATE_READY

REDFENCE: Final = (str(Path(sys.executable).with_name("redfence")),)
"""The program `redfence`."""
# The default, not the longer timeout of other tests: late nodes are part of the run.
_NODE_TIMEOUT_MS = 500
# The default grace of a drain, and a reserve for a busy machine.
_DRAIN_S = 20.0
_START_S = 30.0
_ANSWER_S = 5.0
_TESTS = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Installation:
    """A version of redfence with its harness.

    Attributes:
        python: the interpreter of the environment in which it is installed.
        tests: its folder `tests`.
    """

    python: Path = Path(sys.executable)
    tests: Path = _TESTS

    @property
    def redfence(self) -> Sequence[str]:
        """The program `redfence`."""
        return (str(self.python.with_name("redfence")),)


def harness_program(module: str, *arguments: str) -> tuple[str, ...]:
    """Return how to run a module of the harness."""
    return (sys.executable, "-m", module, *arguments)


def environment(tests: Path = _TESTS) -> Mapping[str, str]:
    """Return the environment in which a process finds the harness and the product."""
    before = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": f"{tests}{os.pathsep}{before}" if before else str(tests),
        "REDFENCE_NODE_TIMEOUT_MS": str(_NODE_TIMEOUT_MS),
        "REDFENCE_LOG_FORMAT": "json",
    }


class Service(ABC):
    """A program that serves at one address.

    Args:
        program: what to run with the arguments of `redfence`.
        processes: ends its processes with all others.
        serves: what it writes when it serves.
    """

    def __init__(self, program: Sequence[str], *, processes: CommandProcesses, serves: str) -> None:
        self.port = free_port()
        self._program = program
        self._processes = processes
        self._serves = serves
        self._started: list[CommandProcess] = []
        self._told_to_end: set[CommandProcess] = set()

    @property
    def address(self) -> str:
        """Where it serves."""
        return f"{HOST}:{self.port}"

    @property
    def process(self) -> CommandProcess:
        """The present or last process."""
        return self._started[-1]

    def start(self) -> None:
        """Start a process."""
        self._started.append(
            self._processes.start(*self._program, *self._arguments(), environment=environment())
        )

    async def replace(self, program: Sequence[str]) -> int:
        """Drain the process, start another program in its place, and return the status of the drain."""
        status = await self.drain()
        self._program = program
        self.start()
        await self.until_serving()
        return status

    @abstractmethod
    def _arguments(self) -> Sequence[str]:
        """Return what follows the program."""

    def kill(self) -> None:
        """End the process by kill -9."""
        self._note_told_to_end()
        self.process.kill()

    async def drain(self) -> int:
        """Ask the process to end, by SIGTERM, and return its exit status; not to end in time is a failure."""
        self._note_told_to_end()
        return await self.process.stop(timeout_s=_DRAIN_S)

    def _note_told_to_end(self) -> None:
        # A process that has already ended did so by itself.
        if self.process.exit_status is None:
            self._told_to_end.add(self.process)

    def pause(self) -> None:
        """Let the process stand still (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        self.process.send_signal(signal.SIGCONT)

    @property
    def is_serving(self) -> bool:
        """Whether the present process serves."""
        return self.process.exit_status is None and self._serves in self.process.stdout

    def ended_early(self) -> list[str]:
        """Return how processes ended by themselves; before it serves, a missing quorum may end a server."""
        return [
            f"it ended by itself, with {process.exit_status}: {process.stderr[-2000:]}"
            for process in self._started
            if process.exit_status is not None
            and process not in self._told_to_end
            and self._serves in process.stdout
        ]

    def logged(self) -> list[str]:
        """Return every line that its processes have logged."""
        return [line for process in self._started for line in process.stderr.splitlines()]

    async def until_serving(self) -> None:
        """Return once it serves; start it again if it ended, as a server does that finds no quorum."""

        async def serves() -> bool:
            if self.process.exit_status is not None:
                self.start()
                await asyncio.sleep(0.2)
            return self.is_serving

        await until(serves, timeout_s=_START_S)


class StorageProcess(Service):
    """The storage, with one database."""

    def __init__(self, program: Sequence[str], database: Path, *, processes: CommandProcesses) -> None:
        super().__init__(program, processes=processes, serves="storage ready")
        self._database = database

    def _arguments(self) -> Sequence[str]:
        return ("storage", "--db", str(self._database), "--listen", self.address)


class ServerProcess(Service):
    """One lock server. It serves once it has found a quorum of nodes.

    Args:
        clock_shim: moves its clock, by a wrapper that is put beside it.

    Attributes:
        proxies: what stands between it and each node, by index.
        view: calls to it.
        clock: of the process, if it can be moved.
        files_when_idle: how many files it has open when it has its nodes, and nobody calls it but `view`.
    """

    def __init__(
        self,
        program: Sequence[str],
        nodes: Sequence[RedisNode],
        *,
        processes: CommandProcesses,
        clock_shim: Path | None,
    ) -> None:
        super().__init__(program, processes=processes, serves="redfence serving")
        self.clock: MovedClock | None = None
        if clock_shim is not None:
            path = clock_shim.with_name(f"server-{self.port}")
            self.clock = MovedClock(clock_shim, program=Path(program[0]), path=path)
            self._program = (str(self.clock.wrapper), *program[1:])
        self.proxies = [TcpProxy(node.port) for node in nodes]
        self._nodes = nodes
        self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.view = LockServer(self._channel, nodes=nodes, proxies=self.proxies)
        self.files_when_idle = 0

    def _arguments(self) -> Sequence[str]:
        urls = [proxy.url(node.url) for proxy, node in zip(self.proxies, self._nodes, strict=True)]
        return ("serve", "--listen", self.address, *(word for url in urls for word in ("--node", url)))

    async def is_ready(self) -> bool:
        """Tell whether every node votes for it."""
        states = await self._states()
        return bool(states) and all(state == NODE_STATE_READY for state in states)

    async def counts(self, place: int) -> bool:
        """Tell whether a node votes for it at present."""
        states = await self._states()
        return bool(states) and states[place] == NODE_STATE_READY

    async def grants(self, resource: str, *, ttl_ms: int) -> bool:
        """Tell whether the server grants a resource now; it does not while too many nodes are late."""
        try:
            answer = await self.view.acquire(
                resource, ttl_ms=ttl_ms, lease_id=new_lease_id(), timeout_s=_ANSWER_S
            )
        except grpc.aio.AioRpcError:
            return False
        return answer.outcome == ACQUIRE_OUTCOME_GRANTED

    async def _states(self) -> Sequence[int]:
        """Return the state of each node as it sees it; nothing if it does not answer."""
        try:
            async with asyncio.timeout(2.0):
                report = await self.view.status()
        except (grpc.aio.AioRpcError, TimeoutError):
            return ()
        return [node.state for node in report.nodes]

    async def close(self) -> None:
        """End the connections; the process is ended with all others."""
        await self._channel.close()
        for proxy in self.proxies:
            await proxy.stop()
