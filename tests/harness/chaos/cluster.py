"""Runs redfence as processes: nodes, servers, the storage, and a proxy between each server and node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, TypeAlias

import grpc
import hiredis

from harness.chaos.node_disk import NodeDisk
from harness.chaos.services import REDFENCE, ServerProcess, Service, StorageProcess, environment
from harness.processes.commands import CommandProcesses
from harness.processes.node_data import with_settings
from harness.processes.process_look import look_at_process
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import form, until, until_all_ready
from redfence_server.embedded.binary import RedisBinary
from redfence_server.embedded.process import AppendFsync

TTL_MS_MAX = 2_000
"""The greatest ttl of the cluster; a quarantine lasts about as long."""
_READY_S = 60.0
Aof: TypeAlias = AppendFsync | Literal["off"]
"""When nodes sync their append-only file; a node with it off comes back empty."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start.

    Attributes:
        node_count: 3 or 5.
        aof: how the nodes write.
        server_count: lock servers.
        server_program: what to run with the arguments of `redfence`, to be a lock server.
        storage_program: the same, to be the storage.
        clock_shim: moves the clocks of nodes and servers; None if no clock is to be moved.
        small_disk: the first node keeps its data on a disk that can be filled.
    """

    node_count: int = 3
    aof: Aof = "always"
    server_count: int = 2
    server_program: Sequence[str] = REDFENCE
    storage_program: Sequence[str] = REDFENCE
    clock_shim: Path | None = None
    small_disk: bool = False


@dataclass(slots=True)
class ChaosCluster:
    """Runs everything but the clients, within `async with`.

    Attributes:
        nodes, servers: by index.
        storage: what clients write to.
        processes: every command that was started.
    """

    plan: Plan
    folder: Path
    binary: RedisBinary
    nodes: list[RedisNode] = field(default_factory=list)
    servers: list[ServerProcess] = field(default_factory=list)
    disks: dict[int, NodeDisk] = field(default_factory=dict)
    processes: CommandProcesses = field(init=False)
    storage: StorageProcess = field(init=False)
    _exits: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def minority(self) -> int:
        """How many nodes may forget at a time."""
        return (len(self.nodes) - 1) // 2

    @property
    def _services(self) -> dict[str, Service]:
        return {
            **{f"server {number}": each for number, each in enumerate(self.servers)},
            "storage": self.storage,
        }

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

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def _start(self) -> None:
        plan = self.plan
        if plan.small_disk:
            self.disks[0] = NodeDisk.mount(self.folder / "node-0")
            self._exits.callback(self.disks[0].unmount)
        for number in range(plan.node_count):
            node = self._node(number)
            node.folder /= "data"  # a second process of the node lies beside it, on the same disk
            self.nodes.append(node)
            self._exits.callback(node.kill)
        await asyncio.gather(*(node.start() for node in self.nodes))
        await form(self.nodes, ttl_ms_max=TTL_MS_MAX)
        self._exits.callback(self.processes.close)
        self.storage = StorageProcess(
            plan.storage_program, self.folder / "storage.db", processes=self.processes
        )
        self.storage.start()
        for _ in range(plan.server_count):
            server = ServerProcess(
                plan.server_program,
                self.nodes,
                processes=self.processes,
                clock_shim=plan.clock_shim,
            )
            self.servers.append(server)
            self._exits.push_async_callback(server.close)
            for proxy in server.proxies:
                await proxy.start()
            server.start()
        await asyncio.gather(*(service.until_serving() for service in self._services.values()))
        await until_all_ready(*(server.view for server in self.servers), timeout_s=_READY_S)
        for server in self.servers:
            server.files_when_idle = look_at_process(server.process.pid).fd_count

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

    async def votes(self, place: int) -> bool:
        """Tell whether a node has its vote by its own data: an identity of this run and no quarantine."""
        try:
            async with asyncio.timeout(2.0):
                state, run = await self._identity(self.nodes[place])
                info = await self.nodes[place].call("INFO", "server")
        except (OSError, hiredis.ReplyError, hiredis.ProtocolError, TimeoutError):
            return False
        assert isinstance(info, bytes)
        # The field is the run id of the process and a suffix of the admission.
        return state == b"ready" and bool(run) and b"run_id:" + run.partition(b"/")[0] in info

    @staticmethod
    async def _identity(node: RedisNode) -> tuple[bytes, bytes]:
        found = await node.call("HMGET", "redfence:node", "state", "run_id")
        assert isinstance(found, list)
        state, run = found
        return state or b"", run or b""

    async def set_right(self) -> list[str]:
        """Return once everything runs and every node votes for every server.

        A server that does not get every vote is restarted, as an operator would do, and returned as a defect.
        """
        for service in self._services.values():
            service.resume()
        for node in self.nodes:
            if not node.is_running:
                await node.start()
        await asyncio.gather(*(service.until_serving() for service in self._services.values()))

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
        """Return the servers and the storage that ended by themselves, and how."""
        return [f"{name}: {how}" for name, service in self._services.items() for how in service.ended_early()]

    def defects(self) -> list[str]:
        """Return the internal errors and tracebacks in the logs of the servers and the storage."""
        return [
            f"{name}: {line}"
            for name, service in self._services.items()
            for line in service.logged()
            if '"internal_error"' in line or line.startswith("Traceback ")
        ]

    def logged(self) -> list[str]:
        """Return the warnings and errors of the servers, in the order of time."""
        lines = [
            (told.get("timestamp", ""), f"{name}: {line}")
            for name, service in self._services.items()
            for line in service.logged()
            if (told := _parsed(line)).get("level") in ("warning", "error", "critical")
        ]
        return [line for _, line in sorted(lines)]

    async def states(self) -> str:
        """Return the state of each node as each server reports it."""
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
        """Recover the cluster as an operator does after a majority forgot; return the command's output."""
        named = [word for node in self.nodes for word in ("--node", node.url)]
        command = self.processes.start(
            *REDFENCE, "cluster", "recover", *named, "--floor", "auto", "--yes", environment=environment()
        )
        status = await command.wait(timeout_s=_READY_S)
        assert status == 0, f"recover ended with {status}: {command.stdout}{command.stderr}"
        return command.stdout


def _parsed(line: str) -> dict[str, str]:
    """Return the fields of a log line; empty if the line is not JSON."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
