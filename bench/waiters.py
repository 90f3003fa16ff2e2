"""Measures the cost of waiters to the server: 10,000 on as many held locks, and 1,000 on one lock.

The operating system reports the CPU time and the memory of the server's process. There are 3 nodes
with fsync on every write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from bench import cluster, raw_session
from bench.processes import memory_bytes
from bench.raw_session import RawSession

IDLE_COUNT = 10_000
SESSION_COUNT = 4
SECONDS = 15.0
QUEUED_COUNT = 1_000
FOREVER_S = 3_600


def _chunks(session_index: int) -> Iterator[range]:
    """Yield the numbers of one session's resources, in chunks that do not overload the nodes."""
    numbers = range(session_index, IDLE_COUNT, SESSION_COUNT)
    for first in range(0, len(numbers), 250):
        yield numbers[first : first + 250]


def _lease_id(number: int) -> str:
    return f"{number:032x}"


class _Usage:
    """Reads the CPU time and the memory of a process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def memory_mib(self) -> float:
        return memory_bytes(self._pid) / 2**20

    async def cores(self) -> float:
        """Return the share of a core that the process uses from now on for `SECONDS`."""
        before = self.cpu_s()
        await asyncio.sleep(SECONDS)
        return (self.cpu_s() - before) / SECONDS


async def _idle(server: cluster.ServerProcess, *, ttl_s: int, renew_every_s: float | None) -> None:
    """Measure idle waiters, with holders that renew every `renew_every_s` seconds, or never if it is None."""
    usage = _Usage(server.pid)
    prefix = f"idle-{ttl_s}"
    async with AsyncExitStack() as stack:
        holders = [
            await stack.enter_async_context(raw_session.raw_session(server.address))
            for _ in range(SESSION_COUNT)
        ]
        await asyncio.gather(
            *(_hold(each, session_index, prefix, ttl_s) for session_index, each in enumerate(holders))
        )
        if renew_every_s is not None:
            renewing = asyncio.create_task(_renew(holders, prefix, renew_every_s))
            stack.callback(renewing.cancel)
        alone_cores, alone_mib = await usage.cores(), usage.memory_mib()
        async with AsyncExitStack() as inner:
            waiting = []
            for session_index in range(SESSION_COUNT):
                session = await inner.enter_async_context(raw_session.raw_session(server.address))
                for numbers in _chunks(session_index):
                    waiting += await session.send(
                        raw_session.acquire(
                            *(f"{prefix}/{number}", _lease_id(IDLE_COUNT + number)),
                            ttl_s=ttl_s,
                            wait_s=FOREVER_S,
                        )
                        for number in numbers
                    )
                    await asyncio.sleep(0.1)
            await asyncio.sleep(5)
            waiting_cores, waiting_mib = await usage.cores(), usage.memory_mib()
            done = sum(each.done() for each in waiting)
        print(
            f"waiters        {IDLE_COUNT:,} idle on as many locks held for {ttl_s} s"
            f"{'' if renew_every_s is None else f', renewed every {renew_every_s:g} s'}: "
            f"{waiting_cores - alone_cores:6.1%} of a core more than without ({alone_cores:.1%}), "
            f"{waiting_mib - alone_mib:5.1f} MiB more ({alone_mib:.0f} MiB)"
            f"{f'; {done} WERE ANSWERED' if done else ''}"
        )
        for session_index, each in enumerate(holders):
            await _release(each, session_index, prefix)


async def _hold(session: RawSession, session_index: int, prefix: str, ttl_s: int) -> None:
    for numbers in _chunks(session_index):
        results = await session.send(
            raw_session.acquire(f"{prefix}/{number}", _lease_id(number), ttl_s=ttl_s, wait_s=0)
            for number in numbers
        )
        for result in await asyncio.gather(*results):
            assert result.acquire.HasField("lease"), result


async def _release(session: RawSession, session_index: int, prefix: str) -> None:
    for numbers in _chunks(session_index):
        await asyncio.gather(
            *await session.send(
                raw_session.release(f"{prefix}/{number}", _lease_id(number)) for number in numbers
            )
        )


async def _renew(holders: list[RawSession], prefix: str, every_s: float) -> None:
    """Renew every lease once in `every_s` seconds, evenly spread, until cancelled."""
    ticks = max(1, int(every_s * 20))
    tick = 0
    while True:
        await asyncio.sleep(every_s / ticks)
        tick = (tick + 1) % ticks
        for session_index, session in enumerate(holders):
            numbers = range(session_index, IDLE_COUNT, SESSION_COUNT)
            await session.send(
                raw_session.renew(f"{prefix}/{number}", _lease_id(number))
                for number in numbers
                if number // SESSION_COUNT % ticks == tick
            )


async def _queued(server: cluster.ServerProcess) -> None:
    """Measure how fast a queue of waiters is granted, and whether the order is that of arrival."""
    resource = "queued"
    order: list[int] = []
    async with raw_session.raw_session(server.address) as session:
        (held,) = await session.send([raw_session.acquire(resource, _lease_id(0), ttl_s=60, wait_s=0)])
        await held
        results = await session.send(
            raw_session.acquire(resource, _lease_id(number), ttl_s=60, wait_s=FOREVER_S)
            for number in range(1, QUEUED_COUNT + 1)
        )
        await asyncio.sleep(1)
        began = time.monotonic()
        await session.send([raw_session.release(resource, _lease_id(0))])

        async def next_in_line(number: int, result: asyncio.Future[raw_session.Result]) -> None:
            granted = await result
            assert granted.acquire.HasField("lease"), granted
            order.append(number)
            (released,) = await session.send([raw_session.release(resource, _lease_id(number))])
            await released

        await asyncio.gather(*(next_in_line(number, result) for number, result in enumerate(results, 1)))
        seconds = time.monotonic() - began
    verdict = "in the order of arrival" if order == sorted(order) else "OUT OF ORDER"
    print(
        f"waiters        {QUEUED_COUNT:,} on one lock: granted {verdict}, "
        f"{QUEUED_COUNT / seconds:,.0f} grants/s"
    )


async def main() -> None:
    """Measure and print."""
    async with cluster.formed_nodes(3) as nodes, cluster.served_process(nodes) as server:
        await _queued(server)
        await _idle(server, ttl_s=300, renew_every_s=None)
        await _idle(server, ttl_s=12, renew_every_s=4)
