"""A whole redfence as processes on this machine: nodes, a proxy between each server and node, servers and the storage."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeAlias

import grpc
import hiredis

from harness.chaos.lock_calls import CHANNEL_OPTIONS
from harness.chaos.node_disk import NodeDisk
from harness.node_data import with_settings
from harness.ports import HOST, free_port
from harness.processes import CommandProcess, CommandProcesses
from harness.redis_nodes import RedisNode
from harness.servers import LockServer, form, until, until_all_ready
from harness.tcp_proxy import TcpProxy
from redfence_proto.v1.lock_pb2 import NODE_STATE_READY
from redfence_server.redis_binary import RedisBinary
from redfence_server.redis_process import AppendFsync

TTL_MS_MAX = 2_000
"""The greatest ttl of the cluster, and so about how long a quarantine lasts."""
# The default, and not the patience of other tests: what comes of a node that is late is part of the run.
_NODE_TIMEOUT_MS = 500
_START_S = 30.0
_READY_S = 60.0
Aof: TypeAlias = AppendFsync | Literal["off"]
"""When nodes sync their append-only file; a node with it off comes back empty."""
_SERVES = "redfence serving"
_TESTS = Path(__file__).resolve().parents[2]
_REDFENCE = (str(Path(sys.executable).with_name("redfence")),)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start.

    Attributes:
        node_count: 3 or 5.
        aof: how the nodes write.
        server_count: lock servers.
        server_program: what to run with the arguments of `redfence`, to be a lock server.
        storage_program: the same, to be the storage.
        clock_shim: moves the clocks of nodes; None if no clock is to be moved.
        small_disk: the first node keeps its data on a disk that can be filled.
    """

    node_count: int = 3
    aof: Aof = "always"
    server_count: int = 2
    server_program: Sequence[str] = _REDFENCE
    storage_program: Sequence[str] = _REDFENCE
    clock_shim: Path | None = None
    small_disk: bool = False


def harness_program(module: str) -> tuple[str, ...]:
    """Return how to run a module of the harness."""
    return (sys.executable, "-m", module)


def environment() -> Mapping[str, str]:
    """Return what a process needs to find the harness, and the product where this process finds it."""
    before = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": f"{_TESTS}{os.pathsep}{before}" if before else str(_TESTS),
        "REDFENCE_NODE_TIMEOUT_MS": str(_NODE_TIMEOUT_MS),
        "REDFENCE_LOG_FORMAT": "json",
    }


class ServerProcess:
    """One lock server on one port for its whole life, through any number of processes.

    Attributes:
        proxies: what stands between it and each node, by index.
        view: calls to it.
    """

    def __init__(
        self, program: Sequence[str], nodes: Sequence[RedisNode], *, processes: CommandProcesses
    ) -> None:
        self.port = free_port()
        self.proxies = [TcpProxy(node.port) for node in nodes]
        self._nodes = nodes
        self._program = program
        self._processes = processes
        self._started: list[CommandProcess] = []
        self._killed: set[CommandProcess] = set()
        self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.view = LockServer(self._channel, nodes=nodes, proxies=self.proxies)

    @property
    def address(self) -> str:
        """Where it serves."""
        return f"{HOST}:{self.port}"

    @property
    def process(self) -> CommandProcess:
        """The present or last process."""
        return self._started[-1]

    def kill(self) -> None:
        """End the process by kill -9."""
        self._killed.add(self.process)
        self.process.kill()

    def ended_early(self) -> list[str]:
        """Return how each process ended that ended by itself, though it had served; one may give up for want of a quorum before."""
        return [
            f"it ended by itself, with {process.exit_status}: {process.stderr[-2000:]}"
            for process in self._started
            if process.exit_status is not None and process not in self._killed and _SERVES in process.stdout
        ]

    def start(self) -> None:
        """Start a process; it serves once it has found a quorum of nodes."""
        urls = [proxy.url(node.url) for proxy, node in zip(self.proxies, self._nodes, strict=True)]
        named = [word for url in urls for word in ("--node", url)]
        self._started.append(
            self._processes.start(
                *self._program, "serve", "--listen", self.address, *named, environment=environment()
            )
        )

    def logged(self) -> list[str]:
        """Return every line that its processes have logged."""
        return [line for process in self._started for line in process.stderr.splitlines()]

    async def until_serving(self) -> None:
        """Return once it serves, started again should it have given up waiting for a quorum."""

        async def serves() -> bool:
            if self.process.exit_status is not None:
                self.start()
                await asyncio.sleep(0.2)
            return _SERVES in self.process.stdout

        await until(serves, timeout_s=_START_S)

    async def is_ready(self) -> bool:
        """Tell whether every node votes for it."""
        try:
            async with asyncio.timeout(2.0):
                report = await self.view.status()
        except (grpc.aio.AioRpcError, TimeoutError):
            return False
        return all(node.state == NODE_STATE_READY for node in report.nodes)

    async def counts(self, place: int) -> bool:
        """Tell whether a node votes for it at present."""
        try:
            async with asyncio.timeout(2.0):
                report = await self.view.status()
        except (grpc.aio.AioRpcError, TimeoutError):
            return False
        return report.nodes[place].state == NODE_STATE_READY

    async def close(self) -> None:
        """End the connections; the process is ended with all others."""
        await self._channel.close()
        for proxy in self.proxies:
            await proxy.stop()


@dataclass(slots=True)
class ChaosCluster:
    """Everything but the clients, within `async with`.

    Attributes:
        nodes, servers: by index.
        processes: every command that was started.
    """

    plan: Plan
    folder: Path
    binary: RedisBinary
    nodes: list[RedisNode] = field(default_factory=list)
    servers: list[ServerProcess] = field(default_factory=list)
    disks: dict[int, NodeDisk] = field(default_factory=dict)
    processes: CommandProcesses = field(init=False)
    storage_address: str = ""
    _storage: CommandProcess | None = None
    _exits: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def minority(self) -> int:
        """How many nodes may forget at a time."""
        return (len(self.nodes) - 1) // 2

    @property
    def addresses(self) -> list[str]:
        """Where the lock servers serve."""
        return [server.address for server in self.servers]

    async def __aenter__(self) -> Self:
        self.processes = CommandProcesses(self.folder / "commands")
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    async def _start(self) -> None:
        plan = self.plan
        if plan.small_disk:
            self.disks[0] = NodeDisk.mount(self.folder / "node-0")
            self._exits.callback(self.disks[0].unmount)
        for number in range(plan.node_count):
            node = self._node(number)
            self.nodes.append(node)
            self._exits.callback(node.kill)
        await asyncio.gather(*(node.start() for node in self.nodes))
        await form(self.nodes, ttl_ms_max=TTL_MS_MAX)
        self._exits.callback(self.processes.close)
        await self._start_storage()
        for _ in range(plan.server_count):
            server = ServerProcess(plan.server_program, self.nodes, processes=self.processes)
            self.servers.append(server)
            self._exits.push_async_callback(server.close)
            for proxy in server.proxies:
                await proxy.start()
            server.start()
        await asyncio.gather(*(server.until_serving() for server in self.servers))
        await until_all_ready(*(server.view for server in self.servers), timeout_s=_READY_S)

    def _node(self, number: int) -> RedisNode:
        folder, plan, binary = self.folder / f"node-{number}", self.plan, self.binary
        if plan.aof == "off":
            wrapper = folder.with_name(f"{folder.name}-without-aof")
            return RedisNode(
                folder,
                binary=with_settings(binary, "--appendonly", "no", wrapper=wrapper),
                clock_shim=plan.clock_shim,
            )
        return RedisNode(folder, binary=binary, appendfsync=plan.aof, clock_shim=plan.clock_shim)

    async def _start_storage(self) -> None:
        self.storage_address = f"{HOST}:{free_port()}"
        self._storage = self.processes.start(
            *self.plan.storage_program,
            *("storage", "--db", str(self.folder / "storage.db"), "--listen", self.storage_address),
            environment=environment(),
        )
        await self._storage.wait_for_line("ready", timeout_s=_START_S)

    async def votes(self, place: int) -> bool:
        """Tell whether a node votes by its own word: its identity was given to it in this run, and is in no quarantine."""
        try:
            async with asyncio.timeout(2.0):
                state, run = await self._identity(self.nodes[place])
                info = await self.nodes[place].call("INFO", "server")
        except (OSError, hiredis.ReplyError, hiredis.ProtocolError, TimeoutError):
            return False
        assert isinstance(info, bytes)
        # A run is the process's id, and what an admission adds to it.
        return state == b"ready" and bool(run) and b"run_id:" + run.partition(b"/")[0] in info

    @staticmethod
    async def _identity(node: RedisNode) -> tuple[bytes, bytes]:
        found = await node.call("HMGET", "redfence:node", "state", "run_id")
        assert isinstance(found, list)
        state, run = found
        return state or b"", run or b""

    async def set_right(self) -> list[str]:
        """Return once everything runs and every node votes for every server; faults have healed what they broke.

        A server for which that does not come about is started anew, as an operator would do. Return what was the matter with it.
        """
        for server in self.servers:
            server.process.send_signal(signal.SIGCONT)
        for node in self.nodes:
            if not node.is_running:
                await node.start()
        await asyncio.gather(*(server.until_serving() for server in self.servers))

        wrong = []
        for number, server in enumerate(self.servers):
            try:
                await until(server.is_ready, timeout_s=_READY_S)
            except AssertionError:
                wrong.append(f"for server {number} not all nodes vote again: {await self.states()}")
                server.kill()
                server.start()
                await until(server.is_ready, timeout_s=_READY_S)
        return wrong

    def ended_early(self) -> list[str]:
        """Return which servers, nodes and storage have ended by themselves, and how."""
        ended = [
            f"server {number}: {how}"
            for number, server in enumerate(self.servers)
            for how in server.ended_early()
        ]
        if self._storage is not None and self._storage.exit_status is not None:
            ended.append(
                f"the storage ended with {self._storage.exit_status}: {self._storage.stderr[-2000:]}"
            )
        return ended

    def defects(self) -> list[str]:
        """Return what servers and the storage have logged as defects of their own, or written as a traceback."""
        logs = {f"server {number}": server.logged() for number, server in enumerate(self.servers)}
        if self._storage is not None:
            logs["the storage"] = self._storage.stderr.splitlines()
        return [
            f"{name}: {line}"
            for name, lines in logs.items()
            for line in lines
            if '"defect"' in line or line.startswith("Traceback ")
        ]

    def logged(self) -> list[str]:
        """Return what servers have logged as warnings or worse, in the order of their writing."""
        lines = [
            (told.get("timestamp", ""), f"server {number}: {line}")
            for number, server in enumerate(self.servers)
            for line in server.logged()
            if (told := _parsed(line)).get("level") in ("warning", "error", "critical")
        ]
        return [line for _, line in sorted(lines)]

    async def states(self) -> str:
        """Return what each server says of each node."""
        told = []
        for number, server in enumerate(self.servers):
            try:
                report = await server.view.status()
            except grpc.aio.AioRpcError as error:
                told.append(f"server {number}: {error.code().name}")
                continue
            told += [
                f"server {number}, node {node.index}: {node.state} {node.detail}" for node in report.nodes
            ]
        return "; ".join(told)

    async def recover(self) -> str:
        """Do what an operator does when more than a minority has forgotten; return what the command wrote."""
        named = [word for node in self.nodes for word in ("--node", node.url)]
        command = self.processes.start(
            *_REDFENCE, "cluster", "recover", *named, "--floor", "auto", "--yes", environment=environment()
        )
        status = await command.wait(timeout_s=_READY_S)
        assert status == 0, f"recover ended with {status}: {command.stdout}{command.stderr}"
        return command.stdout


def _parsed(line: str) -> dict[str, str]:
    """Return the fields of a line of a log; none of one that is something else."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
