"""Starts what the benchmarks measure: real nodes with fsync on every write, and server processes."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from redfence_server.embedded.nodes import EmbeddedNodes

# Built programs, data and reports. Data is here and not in /tmp, which may be memory: fsync is free there.
FOLDER = Path(__file__).resolve().parents[1] / ".bench"
# The program of this checkout.
REDFENCE = (sys.executable, "-m", "redfence")


class ServiceError(Exception):
    """A service could not be started; the message tells why."""


@contextmanager
def data_folder() -> Iterator[Path]:
    """Yield a new folder on the disk of the checkout; delete it at the exit."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="data-", dir=FOLDER) as folder:
        yield Path(folder)


@asynccontextmanager
async def running_nodes(count: int) -> AsyncIterator[EmbeddedNodes]:
    """Run empty nodes that belong to no cluster."""
    with data_folder() as folder:
        async with EmbeddedNodes(count=count, data_dir=folder) as nodes:
            yield nodes


@asynccontextmanager
async def formed_nodes(count: int, *, program: Sequence[str] = REDFENCE) -> AsyncIterator[EmbeddedNodes]:
    """Run the nodes of a cluster that `program` formed.

    Raises:
        ServiceError: the program could not form a cluster.
    """
    async with running_nodes(count) as nodes:
        process = await asyncio.create_subprocess_exec(
            *(*program, "cluster", "init"),
            env=_environment(nodes),
            stdout=asyncio.subprocess.DEVNULL,
        )
        if status := await process.wait():
            raise ServiceError(f"`{' '.join(program)} cluster init` failed with status {status}")
        yield nodes


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running `redfence serve` or `redfence storage`."""

    address: str
    pid: int


@asynccontextmanager
async def served(nodes: EmbeddedNodes, *, arguments: Sequence[str] = ()) -> AsyncIterator[str]:
    """Run `redfence serve` with these arguments over the nodes; yield its address."""
    async with served_process(nodes, arguments=arguments) as server:
        yield server.address


@asynccontextmanager
async def served_process(
    nodes: EmbeddedNodes,
    *,
    program: Sequence[str] = REDFENCE,
    arguments: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    files_max: int | None = None,
) -> AsyncIterator[ServerProcess]:
    """Run `program serve` with these arguments over the nodes; yield its address and process id.

    `settings` are variables of its environment: an earlier version ignores one that it does not know.
    `files_max` bounds the file descriptors of the process.

    Raises:
        ServiceError: the server ended before it was ready.
    """
    command = (*program, "serve", "--listen", "127.0.0.1:0", *arguments)
    environment = {**_environment(nodes), **(settings or {})}
    async with _running(command, environment, files_max=files_max) as server:
        yield server


@asynccontextmanager
async def served_storage(*, arguments: Sequence[str] = ()) -> AsyncIterator[ServerProcess]:
    """Run `redfence storage` with these arguments over an empty file; yield its address and process id.

    Raises:
        ServiceError: the storage ended before it was ready.
    """
    with data_folder() as folder:
        database = str(folder / "storage.db")
        command = (*REDFENCE, "storage", "--db", database, "--listen", "127.0.0.1:0", *arguments)
        async with _running(command, {**os.environ, "REDFENCE_LOG_LEVEL": "error"}) as server:
            yield server


@asynccontextmanager
async def _running(
    command: Sequence[str], environment: Mapping[str, str], *, files_max: int | None = None
) -> AsyncIterator[ServerProcess]:
    """Run a server whose first line has ` on HOST:PORT`; yield its address and process id."""
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    if files_max is not None:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files_max, files_max))
    try:
        line = (await process.stdout.readline()).decode()
        address = line.partition(" on ")[2].partition(" ")[0]
        if not address:
            raise ServiceError(f"`{' '.join(command)}` ended before it was ready")
        yield ServerProcess(address.strip(), process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _environment(nodes: EmbeddedNodes) -> dict[str, str]:
    return {**os.environ, "REDFENCE_NODES": ",".join(nodes.urls), "REDFENCE_LOG_LEVEL": "error"}
