"""Measures the memory that nodes need for a million resources that were locked once.

It prints the memory of each node before the load, at its peak, and after the nodes dropped the
counters. There are 3 nodes with fsync on every write. Here a node drops a counter after two idle
seconds; the default is a day.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from bench import cluster, raw_session
from bench.raw_session import RawSession
from redfence_proto.v1 import lock_pb2
from redfence_server.redis_io.dial import NodeUrl, dial

RESOURCE_COUNT = 1_000_000
SESSION_COUNT = 4
# How many commands of one session are unanswered at a time.
BATCH = 200
COUNTER_IDLE_MS = 2_000
_SAMPLE_INTERVAL_S = 0.5
_TIMEOUT_S = 120.0
_DIAL_TIMEOUT_MS = 10_000
_KEPT_KEYS = 2  # the node's identity and its greatest token


@dataclass(frozen=True, slots=True)
class _Memory:
    """The memory and the number of keys of one node."""

    used_bytes: int
    keys: int


async def _memory(url: str) -> _Memory:
    node = await dial(NodeUrl(url), timeout_ms=_DIAL_TIMEOUT_MS)
    info, keys = await node.commands(("INFO", "memory"), ("DBSIZE",))
    await node.close()
    return _Memory(int(info.partition(b"used_memory:")[2].split()[0]), keys)


async def memories(urls: tuple[str, ...]) -> list[_Memory]:
    return list(await asyncio.gather(*map(_memory, urls)))


async def _hold_each_once(session: RawSession, numbers: Iterator[int]) -> None:
    """Lock and release the resource of each number, until no number is left."""
    while batch := list(islice(numbers, BATCH)):
        leases = {f"bench/once/{number}": f"{number:032x}" for number in batch}
        acquires = [
            raw_session.acquire(name, lease_id, ttl_s=30, wait_s=0) for name, lease_id in leases.items()
        ]
        for answer in await _answers(session, acquires):
            assert answer.acquire.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED, answer
        await _answers(session, [raw_session.release(name, lease_id) for name, lease_id in leases.items()])


async def _answers(session: RawSession, commands: list[lock_pb2.SessionCommand]) -> list[raw_session.Result]:
    """Send commands and return their answers; repeat those that the server asks to retry."""
    answers = []
    while commands:
        results = [await each for each in await session.send(commands)]
        answers += [result for result in results if not result.HasField("error")]
        failed = [result.HasField("error") for result in results]
        for result in results:
            assert not result.HasField("error") or result.error.HasField("retry_after"), result.error
        commands = [command for command, again in zip(commands, failed, strict=True) if again]
    return answers


class _Peak:
    """Samples the nodes and keeps the peak of each."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self._urls = urls
        self.most = [_Memory(0, 0)] * len(urls)

    async def watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.observe(await memories(self._urls))
            await asyncio.sleep(_SAMPLE_INTERVAL_S)

    def observe(self, found: list[_Memory]) -> None:
        """Add one sample to the peaks."""
        self.most = [
            _Memory(max(a.used_bytes, b.used_bytes), max(a.keys, b.keys))
            for a, b in zip(self.most, found, strict=True)
        ]


async def _until_dropped(urls: tuple[str, ...]) -> list[_Memory]:
    """Wait until every counter is gone and memory no longer falls; return the memory of the nodes."""
    smallest: list[int] = []
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            found = await memories(urls)
            used = [each.used_bytes for each in found]
            if all(each.keys <= _KEPT_KEYS for each in found) and smallest and used >= smallest:
                return found
            smallest = used
            await asyncio.sleep(_SAMPLE_INTERVAL_S)


async def main() -> None:
    """Measure and print."""
    async with (
        cluster.formed_nodes(3) as nodes,
        cluster.served(nodes, arguments=["--counter-idle-ms", str(COUNTER_IDLE_MS)]) as address,
        raw_session.raw_session(address) as warm_up_session,
    ):
        # The first commands make nodes allocate scripts and buffers, which do not depend on the resources.
        await _hold_each_once(warm_up_session, iter(range(RESOURCE_COUNT, RESOURCE_COUNT + 10 * BATCH)))
        before = await _until_dropped(nodes.urls)
        peak = _Peak(nodes.urls)
        watching = asyncio.create_task(peak.watch())
        began = time.monotonic()
        numbers = iter(range(RESOURCE_COUNT))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SESSION_COUNT):
                tasks.create_task(_in_own_session(address, numbers))
        seconds = time.monotonic() - began
        watching.cancel()
        after = await _until_dropped(nodes.urls)
        print(
            f"idle_counters  N=3  {RESOURCE_COUNT:,} resources locked once and released in {seconds:.0f} s"
            f" ({RESOURCE_COUNT / seconds:,.0f} pairs/s),"
            f" counters dropped when idle for {COUNTER_IDLE_MS / 1000:g} s"
        )
        for index, (first, most, last_seen) in enumerate(zip(before, peak.most, after, strict=True)):
            growth = last_seen.used_bytes / first.used_bytes - 1
            print(
                f"  node {index}  used memory before {_mib(first)}  peak {_mib(most)} ({most.keys:,} keys)"
                f"  after {_mib(last_seen)} ({last_seen.keys} keys, {growth:+.1%})"
            )


def _mib(memory: _Memory) -> str:
    return f"{memory.used_bytes / 2**20:6.2f} MiB"


async def _in_own_session(address: str, numbers: Iterator[int]) -> None:
    async with raw_session.raw_session(address) as session:
        await _hold_each_once(session, numbers)
