"""Measures one contended lock: grants per second, and the time from a release to the next grant.

It runs with one server and with two. There are 16 callers and 3 nodes with fsync on every write,
all on this machine. Each server has its own client process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack

import redfence
from bench import cluster

CALLERS = 16
SECONDS = 10.0
RESOURCE = "bench/hand-off"


async def contend(address: str, *, callers: int, seconds: float) -> list[tuple[int, float, float]]:
    """Let callers lock and release one resource.

    Return for each grant its token, the instant of the grant, and the instant at which its release was sent.
    """
    grants: list[tuple[int, float, float]] = []
    end = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            lease = await client.acquire(RESOURCE, ttl=10, wait=30)
            granted_at = time.monotonic()
            grants.append((lease.token, granted_at, time.monotonic()))
            await lease.release()

    async with redfence.AsyncClient(address) as client:
        await asyncio.gather(*(caller() for _ in range(callers)))
    return grants


async def _measure(server_count: int) -> None:
    async with cluster.formed_nodes(3) as nodes, AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(cluster.served(nodes)) for _ in range(server_count)]
        clients = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.hand_off", address, str(CALLERS // server_count)),
                stdout=asyncio.subprocess.PIPE,
            )
            for address in addresses
        ]
        outputs = [(await client.communicate())[0] for client in clients]
    by_server = [json.loads(output) for output in outputs]
    grants = sorted(grant for each in by_server for grant in each)
    tokens = [token for token, _, _ in grants]
    assert len(set(tokens)) == len(tokens), "a token was granted twice"
    gaps_ms = [(after[1] - before[2]) * 1000 for before, after in itertools.pairwise(grants)]
    gaps_ms.sort()
    share = min(len(each) for each in by_server) / len(grants)
    print(
        f"hand_off       N=3  {CALLERS} callers  {server_count} server(s)  "
        f"{len(grants) / SECONDS:6,.0f} grants/s  handover p50 {statistics.median(gaps_ms):5.2f} ms  "
        f"p99 {gaps_ms[len(gaps_ms) * 99 // 100]:6.2f} ms  smallest share of a server {share:.0%}"
    )


async def main() -> None:
    """Measure and print."""
    for server_count in (1, 2):
        await _measure(server_count)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(contend(sys.argv[1], callers=int(sys.argv[2]), seconds=SECONDS))))
