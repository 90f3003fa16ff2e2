"""`python -m harness.soak.streams_load HOST:PORT STREAMS LIFE_S` opens, ends and reopens KeepAlive streams.

Each stream renews its own lease. Every second it prints one line of JSON: how many streams are open, how many
were opened, and how many renewals were answered ACTIVE or otherwise.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Final

import grpc

from harness.processes.servers import LockServer, new_lease_id
from redfence_proto.v1 import lock_pb2

_CONNECTIONS: Final = 4
_TTL_MS: Final = 60_000
_RENEW_INTERVAL_S: Final = 10.0
_RETRY_S: Final = 0.2


class StreamsLoad:
    """The streams of one process.

    Attributes:
        told: how many streams are `open`; how often they were `opened`, renewals were `active`, or `failed`.

    Args:
        life_s: how long a stream is left open on average.
        seed: of every chance.
    """

    def __init__(self, *, life_s: float, seed: int) -> None:
        self._life_s = life_s
        self._chance = random.Random(seed)
        self.told: Counter[str] = Counter(open=0, opened=0, active=0, failed=0)

    async def keep_open(self, server: LockServer, number: int) -> None:
        """Keep a stream open for ever; reopen it when it ends."""
        resource, lease_id = f"soak/stream/{number}", new_lease_id()
        renewal = lock_pb2.KeepAliveRequest(resource=resource, lease_id=lease_id)
        while True:
            try:
                await server.acquire(resource, ttl_ms=_TTL_MS, lease_id=lease_id)
                await self._live(server.locks.KeepAlive(), renewal)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                self.told["failed"] += 1
                await asyncio.sleep(_RETRY_S)

    async def _live(
        self, stream: grpc.aio.StreamStreamCall[Any, Any], renewal: lock_pb2.KeepAliveRequest
    ) -> None:
        self.told["open"] += 1
        self.told["opened"] += 1
        left_s = self._chance.uniform(0, 2 * self._life_s)
        try:
            while left_s > 0:
                await stream.write(renewal)
                answer = await stream.read()
                is_active = (
                    isinstance(answer, lock_pb2.KeepAliveResponse)
                    and answer.state == lock_pb2.LEASE_STATE_ACTIVE
                )
                self.told["active" if is_active else "failed"] += 1
                pause_s = min(left_s, self._chance.uniform(0.5, 1.5) * _RENEW_INTERVAL_S)
                await asyncio.sleep(pause_s)
                left_s -= pause_s
            await self._end(stream, renewal)
        finally:
            self.told["open"] -= 1
            stream.cancel()

    async def _end(
        self, stream: grpc.aio.StreamStreamCall[Any, Any], renewal: lock_pb2.KeepAliveRequest
    ) -> None:
        """End the stream in order, or leave it to the cancel, with or without an unread answer."""
        match self._chance.randrange(3):
            case 0:
                await stream.done_writing()
                while await stream.read() is not grpc.aio.EOF:
                    pass
            case 1:
                await stream.write(renewal)


async def _main(address: str, count: int, life_s: float) -> None:
    load = StreamsLoad(life_s=life_s, seed=1)
    async with AsyncExitStack() as stack:
        # Without this option the channels would share one connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for _ in range(_CONNECTIONS)
        ]
        servers = [LockServer(channel) for channel in channels]
        running = [
            asyncio.create_task(load.keep_open(servers[number % _CONNECTIONS], number))
            for number in range(count)
        ]
        while not any(task.done() for task in running):
            print(json.dumps(load.told), flush=True)
            await asyncio.wait(running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*running)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
