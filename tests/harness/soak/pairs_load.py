"""`python -m harness.soak.pairs_load HOST:PORT PAIRS_PER_SECOND NAME` acquires and releases at a fixed pace.

A pair begins at its time, whether the pair before was answered or not. Every second it prints one line of
JSON: how many pairs were finished, refused, and skipped because too many were unanswered.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Final

import grpc

from harness.load.session_caller import SessionCaller
from harness.processes.servers import LockServer, new_lease_id
from redfence_proto.v1 import lock_pb2

# Few against the counters that nodes keep for a day, many against the pairs under way.
RESOURCES: Final = 5_000
UNANSWERED_MAX: Final = 2_000
_TICK_S: Final = 0.01
_TTL_MS: Final = 30_000


class PairsLoad:
    """The pairs of one process.

    Attributes:
        told: how many pairs were `finished`, `refused`, `skipped`.
    """

    def __init__(self, session: SessionCaller, *, name: str) -> None:
        self._session = session
        self._name = name
        self._under_way: set[asyncio.Task[None]] = set()
        self._begun = 0
        self.told: Counter[str] = Counter(finished=0, refused=0, skipped=0)

    async def run(self, pairs_per_second: float) -> None:
        """Begin pairs at this pace for ever."""
        began_at_s = time.monotonic()
        due = 0
        while True:
            wanted = int((time.monotonic() - began_at_s) * pairs_per_second)
            for _ in range(wanted - due):
                self._begin()
            due = wanted
            await asyncio.sleep(_TICK_S)

    def _begin(self) -> None:
        if len(self._under_way) >= UNANSWERED_MAX:
            self.told["skipped"] += 1
            return
        self._begun += 1
        task = asyncio.create_task(self._pair(f"soak/{self._name}/{self._begun % RESOURCES}"))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _pair(self, resource: str) -> None:
        lease_id = new_lease_id()
        granted = await self._session.acquire(resource, ttl_ms=_TTL_MS, lease_id=lease_id)
        released = await self._session.release(resource, lease_id)
        done = (granted.acquire.outcome, released.release.outcome)
        was_held = done == (lock_pb2.ACQUIRE_OUTCOME_GRANTED, lock_pb2.RELEASE_OUTCOME_RELEASED)
        self.told["finished" if was_held else "refused"] += 1


async def _main(address: str, pairs_per_second: float, name: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel, SessionCaller(LockServer(channel)) as session:
        load = PairsLoad(session, name=name)
        running = asyncio.create_task(load.run(pairs_per_second))
        while not running.done():
            print(json.dumps(load.told), flush=True)
            await asyncio.wait([running], timeout=1.0)
        await running


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
