"""Runs Python callers that acquire and release as fast as they get answers, and records their latencies.

`python -m bench.load` loads redfence by its SDK, or nodes by aioredlock, with the arguments and the output
of the Go program `pairs`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

# Each client is imported where it is used: the environment of aioredlock does not have redfence.
_WAIT_S = 60


class Held(Protocol):
    """A lock that is held."""

    @property
    def token(self) -> int:
        """The fencing token, or 0 if the service has none."""

    async def release(self) -> object:
        """Release the lock."""


class Locks(Protocol):
    """A client of a lock service."""

    async def acquire(self, resource: str, /, *, ttl: float, wait: float) -> Held:
        """Wait for the lock, seconds at most."""


@dataclass
class LoadResult:
    """The latencies in milliseconds, the hand-overs, and the length of the run."""

    acquire_ms: list[float] = field(default_factory=list)
    pair_ms: list[float] = field(default_factory=list)
    hand_overs: int = 0
    seconds: float = 0.0

    @property
    def pairs_per_second(self) -> float:
        """How many pairs of acquire and release finished per second."""
        return len(self.pair_ms) / self.seconds

    def percentile(self, percent: float) -> float:
        """Return the latency that this percentage of the acquires did not exceed."""
        return percentile(self.acquire_ms, percent)


def percentile(values: list[float], percent: float) -> float:
    """Return the value that this percentage of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def pairs(
    client: Locks, *, callers: int, seconds: float, wait: float = 0, shared: bool = False
) -> LoadResult:
    """Let each caller lock its own resource, or one for all, again and again; fail if a token does not rise.

    A grant counts as a hand-over if the previous holder was another caller.
    """
    result = LoadResult()
    start = time.monotonic()
    holder = -1

    async def caller(number: int) -> None:
        nonlocal holder
        resource, last_token = "bench/one" if shared else f"bench/{number}", 0
        while time.monotonic() - start < seconds:
            before = time.perf_counter()
            lease = await client.acquire(resource, ttl=30, wait=wait)
            granted_at = time.perf_counter()
            assert lease.token > last_token or not lease.token, "a token did not rise"
            last_token = lease.token
            is_hand_over, holder = holder != number, number
            await lease.release()
            if time.monotonic() - start < seconds:
                result.hand_overs += is_hand_over
                result.acquire_ms.append((granted_at - before) * 1000)
                result.pair_ms.append((time.perf_counter() - before) * 1000)

    await asyncio.gather(*(caller(number) for number in range(callers)))
    result.seconds = seconds
    return result


class _HeldByAioredlock:
    token = 0

    def __init__(self, locks: Any, lock: Any) -> None:
        self._locks, self._lock = locks, lock

    async def release(self) -> None:
        await self._locks.unlock(self._lock)


class _Aioredlock:
    """It polls with its default delay of 100 to 300 ms."""

    def __init__(self, urls: list[str], *, tries: int) -> None:
        from aioredlock import Aioredlock

        self._locks = Aioredlock(urls, retry_count=tries)

    async def acquire(self, resource: str, /, *, ttl: float, wait: float) -> Held:
        async with asyncio.timeout(wait):
            return _HeldByAioredlock(self._locks, await self._locks.lock(resource, lock_timeout=ttl))

    async def close(self) -> None:
        await self._locks.destroy()


@asynccontextmanager
async def _connected(target: str, addresses: list[str]) -> AsyncIterator[Locks]:
    if target == "aioredlock":
        locks = _Aioredlock(addresses, tries=int(_WAIT_S / 0.1))
        yield locks
        await locks.close()
    else:
        import redfence

        async with redfence.AsyncClient(addresses[0]) as client:
            yield client


def _latency(values: list[float]) -> dict[str, float]:
    return {
        "p50_ms": percentile(values, 50),
        "p99_ms": percentile(values, 99),
        "p99_9_ms": percentile(values, 99.9),
        "max_ms": max(values),
    }


async def _announce_end(seconds: float) -> float:
    """Return the CPU seconds of this process until the end."""
    before = time.process_time()
    await asyncio.sleep(seconds)
    print("end", flush=True)
    return time.process_time() - before


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", choices=("sdk", "aioredlock"), default="sdk")
    parser.add_argument("--addr", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--resource", choices=("own", "one"), default="own")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--warm-up", type=float, default=0.5)
    options = parser.parse_args()
    shared = options.resource == "one"
    async with _connected(options.target, options.addr.split(",")) as client:
        await pairs(client, callers=options.workers, seconds=options.warm_up, wait=_WAIT_S, shared=shared)
        print("begin", flush=True)
        load = pairs(client, callers=options.workers, seconds=options.seconds, wait=_WAIT_S, shared=shared)
        result, cpu_s = await asyncio.gather(load, _announce_end(options.seconds))
    report = {
        "seconds": result.seconds,
        "pairs": len(result.pair_ms),
        "hand_overs": result.hand_overs,
        "cpu_s": cpu_s,
        "pair": _latency(result.pair_ms),
        "acquire": _latency(result.acquire_ms),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(_main())
