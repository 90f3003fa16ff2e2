"""Runs SDK callers that acquire and release as fast as they get answers, and records their latencies."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import redfence


@dataclass
class LoadResult:
    """The latencies of the acquires in milliseconds, and the length of the run."""

    acquire_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def pairs_per_second(self) -> float:
        """How many pairs of acquire and release finished per second."""
        return len(self.acquire_ms) / self.seconds

    def percentile(self, percent: float) -> float:
        """Return the latency that this percentage of the acquires did not exceed."""
        ordered = sorted(self.acquire_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def pairs(client: redfence.AsyncClient, *, callers: int, seconds: float) -> LoadResult:
    """Let each caller lock its own resource again and again; fail if a token does not rise."""
    result = LoadResult()
    start = time.monotonic()

    async def caller(number: int) -> None:
        resource, last_token = f"bench/{number}", 0
        while time.monotonic() - start < seconds:
            before = time.perf_counter()
            lease = await client.acquire(resource, ttl=30, wait=0)
            result.acquire_ms.append((time.perf_counter() - before) * 1000)
            assert lease.token > last_token, "a token did not rise"
            last_token = lease.token
            await lease.release()

    await asyncio.gather(*(caller(number) for number in range(callers)))
    result.seconds = time.monotonic() - start
    return result
