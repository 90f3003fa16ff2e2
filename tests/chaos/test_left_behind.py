"""The watch over a cluster names each process, port and file that its end leaves behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from harness.chaos import left_behind as module
from harness.chaos.cluster import TTL_MS_MAX, ChaosCluster, Plan
from harness.chaos.left_behind import left_behind
from harness.processes.ports import HOST
from harness.processes.process_look import look_at_process
from harness.processes.servers import until
from redfence_server.embedded.binary import RedisBinary

pytestmark = pytest.mark.slow


async def test_holds_keys_without_an_end_and_open_connections_are_told(
    tmp_path: Path, redis_binary: RedisBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter, which ends some day, is not; nor is a hold that ends in time."""
    monkeypatch.setattr(module, "_CLOSED_S", 0.5)
    async with ChaosCluster(Plan(server_count=1), tmp_path, redis_binary) as cluster:
        (server,) = cluster.servers
        assert not await left_behind(cluster)

        await until(lambda: server.grants("held", ttl_ms=TTL_MS_MAX))
        told = await left_behind(cluster, gone_s=0.1)
        assert len(told) >= 2
        assert all("holds 'redfence:lock:held'" in each for each in told)
        assert not await left_behind(cluster, gone_s=10.0)

        await cluster.nodes[1].call("PERSIST", "redfence:counter:held")
        assert await left_behind(cluster) == ["node 1 keeps 'redfence:counter:held', which has no end"]
        await cluster.nodes[1].call("DEL", "redfence:counter:held")

        # Several: when the server began it may have had one that it needs no more.
        connections = [await asyncio.open_connection(HOST, server.port) for _ in range(5)]

        async def taken() -> bool:
            return look_at_process(server.process.pid).fd_count > server.files_when_idle

        try:
            # A connection is open here before the server has taken it.
            await until(taken)
            (told_of_files,) = await left_behind(cluster)
        finally:
            for _, writer in connections:
                writer.close()
                await writer.wait_closed()
        assert told_of_files.startswith("server 0 has ")
        monkeypatch.setattr(module, "_CLOSED_S", 10.0)
        assert not await left_behind(cluster)
