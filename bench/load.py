"""Runs SDK callers that acquire and release as fast as they get answers, and records their latencies.

`python -m bench.load` loads a server as the Go program `pairs` does, with the same arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field

import redfence


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
    client: redfence.AsyncClient, *, callers: int, seconds: float, wait: float = 0, shared: bool = False
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
            assert lease.token > last_token, "a token did not rise"
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
    parser.add_argument("--addr", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--resource", choices=("own", "one"), default="own")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--warm-up", type=float, default=0.5)
    options = parser.parse_args()
    shared = options.resource == "one"
    async with redfence.AsyncClient(options.addr.partition(",")[0]) as client:
        await pairs(client, callers=options.workers, seconds=options.warm_up, wait=60, shared=shared)
        print("begin", flush=True)
        load = pairs(client, callers=options.workers, seconds=options.seconds, wait=60, shared=shared)
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
