"""Starts what the benchmarks measure: real nodes with fsync on every write, and server processes."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from redfence_proto import bounds
from redfence_server.embedded.nodes import EmbeddedNodes
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations import forming
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.scripts import Keyspace


@asynccontextmanager
async def formed_nodes(count: int) -> AsyncIterator[EmbeddedNodes]:
    """Run the nodes of a formed cluster."""
    with tempfile.TemporaryDirectory(prefix="redfence-bench-") as folder:
        async with EmbeddedNodes(count=count, data_dir=Path(folder)) as nodes:
            await forming.form(
                check_urls(nodes.urls),
                keys=Keyspace(),
                ttl_ms_max=bounds.TTL_MS_MAX_DEFAULT,
                randomness=SystemRandomness(),
            )
            yield nodes


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running `redfence serve`."""

    address: str
    pid: int


@asynccontextmanager
async def served(nodes: EmbeddedNodes, **settings: object) -> AsyncIterator[str]:
    """Run `redfence serve` over the nodes; yield its address."""
    async with served_process(nodes, **settings) as server:
        yield server.address


@asynccontextmanager
async def served_process(nodes: EmbeddedNodes, **settings: object) -> AsyncIterator[ServerProcess]:
    """Run `redfence serve` over the nodes with these settings; yield its address and process id."""
    settings = {"nodes": ",".join(nodes.urls), "log_level": "error", **settings}
    environment = {f"REDFENCE_{name.upper()}": str(value) for name, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "redfence", "serve", "--listen", "127.0.0.1:0"),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        yield ServerProcess(line.partition(" on ")[2].partition(" ")[0], process.pid)
    finally:
        process.terminate()
        await process.wait()
