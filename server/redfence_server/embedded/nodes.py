"""Run real nodes as child processes: a durable quorum on one machine, for `redfence dev` and small sites.

The nodes survive the death of each of them, but not the machine's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from redfence_server.embedded.binary import RedisBinary, find_redis_binary
from redfence_server.embedded.directory import DataDirectory
from redfence_server.embedded.process import HOST, NodeConf, NodeProcess, PortTakenError
from redfence_server.errors import ConfigError, StartupError
from redfence_server.locking.quorum import NODE_COUNTS
from redfence_server.randomness import SystemRandomness

NODE_DIED_EVENT = "embedded_node_died"
# A try fails only if another program takes the port within the few ms after it was free.
_PORT_TRIES_MAX = 8
_START_TIMEOUT_S = 30.0
# A node that does not stop in time is killed.
_STOP_TIMEOUT_S = 5.0
_WATCH_INTERVAL_S = 0.25


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class EmbeddedNodes:
    """N nodes below one data directory, running from `start` to `stop`, or within `async with`.

    The directory keeps what the nodes know for the next start. Each start has new ports and passwords.
    """

    def __init__(
        self,
        *,
        count: int,
        data_dir: Path,
        binary: RedisBinary | None = None,
        choose_port: Callable[[], int] = free_port,
    ) -> None:
        """Keep the settings; `start` starts the nodes.

        A missing data directory is created. If `binary` is None, `start` finds a program.

        Raises:
            ConfigError: the count is not 1, 3, 5 or 7.
        """
        if count not in NODE_COUNTS:
            raise ConfigError(f"{count} nodes were asked for; a quorum needs 1, 3, 5 or 7")
        self._count = count
        self._data_dir = data_dir.absolute()  # the nodes run in folders of their own
        self._binary = binary
        self._choose_port = choose_port
        self._randomness = SystemRandomness()
        self._directory: DataDirectory | None = None
        self._confs: dict[int, NodeConf] = {}
        self._processes: dict[int, NodeProcess] = {}
        self._watch: asyncio.Task[None] | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        """The address of every node, by index, passwords included: never log them."""
        return tuple(self._confs[index].url for index in range(self._count))

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of every node, by index."""
        return tuple(self._processes[index].pid for index in range(self._count))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all nodes and return when every node answers. After a failure no node is left running.

        Call it on a thread that outlives the nodes: Linux ends them with it.

        Cancellation: as after a failure.

        Raises:
            StartupError: no program to run, a directory that cannot be used, or a node that does not start.
        """
        assert self._directory is None, "started twice"
        binary = await asyncio.to_thread(find_redis_binary) if self._binary is None else self._binary
        self._directory = directory = await DataDirectory.open(self._data_dir, count=self._count)
        try:
            async with asyncio.TaskGroup() as starts:
                for index in range(self._count):
                    starts.create_task(
                        self._start_node(index, binary, directory), name=f"embedded-node-start-{index}"
                    )
        except BaseException as error:
            await self.stop()
            if not isinstance(error, BaseExceptionGroup):
                raise
            first = error.exceptions[0]
            if isinstance(first, OSError):  # a node's folder cannot be written, or no process can be started
                raise StartupError(str(first)) from first
            raise first from None
        self._watch = asyncio.create_task(self._report_deaths(), name="embedded-nodes-watch")

    async def stop(self) -> None:
        """Stop all nodes; kill those that do not end in time. Harmless to repeat, also after a failed start.

        Cancellation: the nodes are killed at once.
        """
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        try:
            async with asyncio.TaskGroup() as stops:
                for process in self._processes.values():
                    stops.create_task(process.stop(timeout_s=_STOP_TIMEOUT_S))
        finally:
            if self._directory is not None:
                self._directory.close()
                self._directory = None

    async def _start_node(self, index: int, binary: RedisBinary, directory: DataDirectory) -> None:
        """Start one node, on another port if the chosen one is taken."""
        for tries_left in reversed(range(_PORT_TRIES_MAX)):
            # A new password each time: another program on a taken port may have received the last one.
            conf = NodeConf(directory.node_folder(index), self._choose_port(), self._randomness.hex_id())
            process = NodeProcess(conf, binary=binary, inherited_fds=(directory.lock_fd,))
            self._confs[index], self._processes[index] = conf, process
            try:
                await process.wait_until_ready(timeout_s=_START_TIMEOUT_S)
            except PortTakenError:
                if not tries_left:
                    raise
            else:
                return

    async def _report_deaths(self) -> None:
        """Log once every node that ends while it should serve."""
        watched = dict(self._processes)
        while watched:
            for index, process in tuple(watched.items()):
                if process.exit_status is not None:
                    del watched[index]
                    structlog.get_logger().error(
                        NODE_DIED_EVENT, index=index, exit_status=process.exit_status
                    )
            await asyncio.sleep(_WATCH_INTERVAL_S)
