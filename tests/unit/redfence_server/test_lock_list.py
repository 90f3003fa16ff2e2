"""How many pages of a list are read at once, without a node."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from redfence_server.lock_list import LockList
from redfence_server.lock_service import LockView
from redfence_server.locking.node import ScannedKeys
from redfence_server.redis_io.scripts import Keyspace


class BusyNode:
    """Has no keys, and counts who asks it at the same time."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.asking = self.asking_max = 0

    async def scan(self, pattern: str, *, cursor: int, count: int) -> ScannedKeys:
        self.asking += 1
        self.asking_max = max(self.asking, self.asking_max)
        try:
            await asyncio.sleep(0)
        finally:
            self.asking -= 1
        return ScannedKeys(0, [])

    def report(self) -> Any:
        return SimpleNamespace(run_id="")


async def _look(resource: str) -> LockView:
    raise NotImplementedError


async def test_few_pages_are_read_at_once_and_a_cancelled_one_frees_its_place() -> None:
    nodes = [BusyNode(index) for index in range(3)]
    locks = LockList(nodes, keys=Keyspace(), look=_look)
    pages = [asyncio.create_task(locks.page("", size=50, token="")) for _ in range(1_000)]
    await asyncio.sleep(0)
    for page in pages[:10]:
        page.cancel()
    done = await asyncio.gather(*pages[10:])
    assert {page.next_token for page in done} == {""}
    assert max(node.asking_max for node in nodes) == 4
