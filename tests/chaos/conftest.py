"""Fixtures of the chaos tests: a small cluster of processes with two clients, which the tests of one module strike in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from harness.chaos.cluster import ChaosCluster, Plan
from harness.chaos.crowd import Crowd
from harness.chaos.node_disk import can_mount
from harness.chaos.recorder import now_s
from harness.chaos.strike import Stage, Strike
from redfence_server.embedded.binary import RedisBinary


@dataclass(slots=True)
class Begun:
    """The faults that have begun, in their order."""

    strikes: list[Strike] = field(default_factory=list)


@pytest.fixture(scope="module")
def no_disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tell why no node can have a small disk of its own here; nothing if one can."""
    return can_mount(tmp_path_factory.mktemp("disk"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    tmp_path_factory: pytest.TempPathFactory, redis_binary: RedisBinary, clock_shim: Path, no_disk: str
) -> AsyncIterator[Stage]:
    """Yield three nodes, two servers, the storage and two clients; a test sets right what it breaks."""
    plan = Plan(clock_shim=clock_shim, small_disk=not no_disk)
    async with ChaosCluster(plan, tmp_path_factory.mktemp("chaos"), redis_binary) as cluster:
        crowd = Crowd(cluster, seed="0", began_s=now_s(), count=2, mix=("append",))
        await crowd.start()
        begun = Begun()
        yield Stage(cluster, crowd, on_begin=begun.strikes.append)
        assert not await crowd.end()
