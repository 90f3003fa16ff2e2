"""Fixtures of the chaos tests: a small cluster of processes with two clients, shared by a module's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from harness.chaos.client_pool import ClientPool
from harness.chaos.cluster import ChaosCluster, Plan
from harness.chaos.fault_injection import FaultInjector
from harness.chaos.node_disk import can_mount
from harness.chaos.recorder import now_s
from redfence_server.embedded.binary import RedisBinary


@pytest.fixture(scope="module")
def no_disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return why no node can have a small disk on this machine; empty if it can."""
    return can_mount(tmp_path_factory.mktemp("disk"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def injector(
    tmp_path_factory: pytest.TempPathFactory, redis_binary: RedisBinary, clock_shim: Path, no_disk: str
) -> AsyncIterator[FaultInjector]:
    """Yield three nodes, two servers, the storage and two clients; a test repairs what it breaks."""
    plan = Plan(clock_shim=clock_shim, small_disk=not no_disk)
    async with ChaosCluster(plan, tmp_path_factory.mktemp("chaos"), redis_binary) as cluster:
        client_pool = ClientPool(cluster, seed="0", began_s=now_s(), count=2, mix=("append",))
        await client_pool.start()
        yield FaultInjector(cluster, client_pool, on_begin=lambda _: None)
        assert not await client_pool.end()
