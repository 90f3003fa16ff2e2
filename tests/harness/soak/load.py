"""`python -m harness.soak.load HOST:PORT pairs PACE NAME` or `… streams COUNT LIFE_S` loads a server.

`pairs` acquires and releases at a fixed pace: a pair begins at its time, whether the pair before was answered
or not. `streams` opens, ends and reopens KeepAlive streams, each of which renews its own lease. Every second
the process prints its counts as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Final, TypeAlias

import grpc

from harness.load.session_caller import SessionCaller
from harness.processes.servers import LockServer, new_lease_id
from redfence_proto.v1 import lock_pb2

# Few against the counters that nodes keep for a day, many against the pairs under way.
_RESOURCES: Final = 5_000
_UNANSWERED_MAX: Final = 2_000
_TICK_S: Final = 0.01
_PAIR_TTL_MS: Final = 30_000
_CONNECTIONS: Final = 4
_STREAM_TTL_MS: Final = 60_000
_RENEW_INTERVAL_S: Final = 10.0
_RETRY_S: Final = 0.2
_Stream: TypeAlias = grpc.aio.StreamStreamCall[Any, Any]


class PairsLoad:
    """The pairs of one process.

    Attributes:
        counts: of pairs that were `finished`, `refused`, and `skipped` because too many were unanswered.
    """

    def __init__(self, session: SessionCaller, *, name: str) -> None:
        self._session = session
        self._name = name
        self._under_way: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter(finished=0, refused=0, skipped=0)

    async def run(self, pairs_per_second: float) -> None:
        """Begin pairs at this pace for ever."""
        began_at_s = time.monotonic()
        begun = 0
        while True:
            due = int((time.monotonic() - began_at_s) * pairs_per_second)
            for number in range(begun, due):
                self._begin(number)
            begun = due
            await asyncio.sleep(_TICK_S)

    def _begin(self, number: int) -> None:
        if len(self._under_way) >= _UNANSWERED_MAX:
            self.counts["skipped"] += 1
            return
        task = asyncio.create_task(self._pair(f"soak/{self._name}/{number % _RESOURCES}"))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _pair(self, resource: str) -> None:
        lease_id = new_lease_id()
        granted = await self._session.acquire(resource, ttl_ms=_PAIR_TTL_MS, lease_id=lease_id)
        released = await self._session.release(resource, lease_id)
        done = (granted.acquire.outcome, released.release.outcome)
        was_held = done == (lock_pb2.ACQUIRE_OUTCOME_GRANTED, lock_pb2.RELEASE_OUTCOME_RELEASED)
        self.counts["finished" if was_held else "refused"] += 1


class StreamsLoad:
    """The streams of one process.

    Attributes:
        counts: of streams that are `open` and that were `opened`, and of renewals, `active` or `failed`.

    Args:
        life_s: how long a stream stays open on average.
    """

    def __init__(self, *, life_s: float) -> None:
        self._life_s = life_s
        self._random = random.Random(1)
        self.counts: Counter[str] = Counter(open=0, opened=0, active=0, failed=0)

    async def run(self, server: LockServer, number: int) -> None:
        """Keep a stream open for ever; reopen it when it ends."""
        resource, lease_id = f"soak/stream/{number}", new_lease_id()
        renewal = lock_pb2.KeepAliveRequest(resource=resource, lease_id=lease_id)
        while True:
            try:
                await server.acquire(resource, ttl_ms=_STREAM_TTL_MS, lease_id=lease_id)
                await self._live(server.locks.KeepAlive(), renewal)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                self.counts["failed"] += 1
                await asyncio.sleep(_RETRY_S)

    async def _live(self, stream: _Stream, renewal: lock_pb2.KeepAliveRequest) -> None:
        self.counts["open"] += 1
        self.counts["opened"] += 1
        left_s = self._random.uniform(0, 2 * self._life_s)
        try:
            while left_s > 0:
                await stream.write(renewal)
                answer = await stream.read()
                state = answer.state if isinstance(answer, lock_pb2.KeepAliveResponse) else None
                self.counts["active" if state == lock_pb2.LEASE_STATE_ACTIVE else "failed"] += 1
                pause_s = min(left_s, self._random.uniform(0.5, 1.5) * _RENEW_INTERVAL_S)
                await asyncio.sleep(pause_s)
                left_s -= pause_s
            # End in order, or leave it to the cancel with an unread answer, or with nothing under way.
            match self._random.randrange(3):
                case 0:
                    await stream.done_writing()
                    while await stream.read() is not grpc.aio.EOF:
                        pass
                case 1:
                    await stream.write(renewal)
        finally:
            self.counts["open"] -= 1
            stream.cancel()


async def _main(address: str, what: str, amount: str, detail: str) -> None:
    async with AsyncExitStack() as stack:
        # Without this option the channels would share one connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        servers = [
            LockServer(await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options)))
            for _ in range(_CONNECTIONS if what == "streams" else 1)
        ]
        if what == "streams":
            streams = StreamsLoad(life_s=float(detail))
            counts = streams.counts
            works = [streams.run(servers[number % _CONNECTIONS], number) for number in range(int(amount))]
        else:
            session = await stack.enter_async_context(SessionCaller(servers[0]))
            pairs = PairsLoad(session, name=detail)
            counts = pairs.counts
            works = [pairs.run(float(amount))]
        running = [asyncio.create_task(work) for work in works]
        while not any(task.done() for task in running):
            print(json.dumps(counts), flush=True)
            await asyncio.wait(running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*running)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
