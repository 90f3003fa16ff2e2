"""Measures what one good client suffers while another client attacks the server, and what the attacker gets.

The good client acquires and releases at a fixed pace, on an address and a connection of its own. A pair
counts from the instant at which it was due, so a stall counts for every pair that it delays. It also holds
one lock all the time, which no attack may end. There are three nodes with fsync on every write, and a new
server for each attack. If the attack is on a storage, each pair also writes there under its lock.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench import cluster
from bench.attack_guesses import HELD, SUCCEEDED
from bench.attack_site import WITH_STORAGE, Site, site_of
from bench.attackers import ATTACKS
from bench.load import percentile
from redfence_proto.storage.v1 import storage_pb2, storage_pb2_grpc
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc

_PAIRS_PER_S = 40
_CALL_TIMEOUT_S = 10.0
_FILES_MAX = 12_000
# The longest ttl that a server allows by default.
_HOLD_S = 300
# Freed memory is given back every 5 s.
_SETTLE_S = 7.0


@dataclass
class _Pairs:
    """The latencies of pairs in milliseconds, and how many failed."""

    ms: list[float] = field(default_factory=list)
    failed: int = 0

    def p(self, percent: float) -> float:
        return percentile(self.ms, percent) if self.ms else float("nan")


@dataclass
class _Client:
    """The good client on connections of its own; without a storage it writes nothing."""

    locks: lock_pb2_grpc.LockServiceAsyncStub
    storage: storage_pb2_grpc.StorageServiceAsyncStub | None
    more: Any

    async def write(self, lease: lock_pb2.Lease) -> None:
        """Write to the storage under a lease.

        Raises:
            grpc.aio.AioRpcError: the write was refused, or lost.
        """
        if self.storage is not None:
            token = lease.fencing_token
            put = storage_pb2.PutRequest(resource=lease.resource, fencing_token=token, key="k", value=b"v")
            await self.storage.Put(put, **self.more)


@asynccontextmanager
async def _client(address: str, site: Site) -> AsyncIterator[_Client]:
    more = {"timeout": _CALL_TIMEOUT_S, "metadata": site.metadata}
    async with AsyncExitStack() as stack:
        locks = await stack.enter_async_context(site.channel(address))
        storage: storage_pb2_grpc.StorageServiceAsyncStub | None = None
        if site.storage:
            channel = await stack.enter_async_context(site.channel(site.storage))
            storage = storage_pb2_grpc.StorageServiceStub(channel)
        yield _Client(lock_pb2_grpc.LockServiceStub(locks), storage, more)


async def _pair(client: _Client, number: int, due: float, pairs: _Pairs) -> None:
    resource, lease_id = f"good/{number % 50}", f"{number:032x}"
    request = lock_pb2.AcquireRequest(resource=resource, lease_id=lease_id)
    request.ttl.seconds = 30
    request.wait_timeout.seconds = 5
    try:
        await client.write((await client.locks.Acquire(request, **client.more)).lease)
        release = lock_pb2.ReleaseRequest(resource=resource, lease_id=lease_id)
        await client.locks.Release(release, **client.more)
    except grpc.aio.AioRpcError:
        pairs.failed += 1
    pairs.ms.append((time.perf_counter() - due) * 1000)


async def _good_client(address: str, seconds: float, site: Site, *, first: int) -> _Pairs:
    """Return what pairs took on a new connection; failed ones count with the time until they failed."""
    pairs = _Pairs()
    async with _client(address, site) as client:
        await _pair(client, first, time.perf_counter(), _Pairs())
        begun_at = time.perf_counter()
        tasks = []
        for number in range(int(seconds * _PAIRS_PER_S)):
            due = begun_at + number / _PAIRS_PER_S
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(_pair(client, first + 1 + number, due, pairs)))
        await asyncio.gather(*tasks)
    return pairs


class AttackError(Exception):
    """An attack ended the good client's lock or its writes, got what it must not, or had no result."""


@asynccontextmanager
async def _held_lock(address: str, site: Site) -> AsyncIterator[None]:
    """Hold a lock within the `with`; raise an error at its exit if another lease or none holds it.

    The holder writes at the start, and with the same token at the exit.
    """
    async with _client(address, site) as client:
        request = lock_pb2.AcquireRequest(resource=HELD, lease_id=site.lease_id, holder="good")
        # An attack may last longer than its seconds; the lease must not end by itself.
        request.ttl.seconds = _HOLD_S
        lease = (await client.locks.Acquire(request, **client.more)).lease
        await client.write(lease)
        yield
        seen = await client.locks.GetLock(lock_pb2.GetLockRequest(resource=HELD), **client.more)
        if (seen.current.holder, seen.current.fencing_token) != ("good", lease.fencing_token):
            raise AttackError(f"the lock {HELD!r} with token {lease.fencing_token} ended: {seen.current}")
        try:
            await client.write(lease)
        except grpc.aio.AioRpcError as error:
            raise AttackError(f"the holder of {HELD!r} can no longer write: {error.details()}") from error


def _rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000


@dataclass
class _Memory:
    pid: int
    peak: float = 0.0

    async def watch(self) -> None:
        while True:
            self.peak = max(self.peak, _rss_mb(self.pid))
            await asyncio.sleep(0.05)


async def _measure(
    address: str, attacked: cluster.ServerProcess, name: str, seconds: float, *, site: Site, known: Path
) -> str:
    """Return the row of an attack on a process; `address` is that of the lock server."""
    port = attacked.address.rpartition(":")[2]
    await _good_client(address, 1, site, first=1)
    rest = await _good_client(address, seconds, site, first=10_000)
    before = _rss_mb(attacked.pid)
    memory = _Memory(attacked.pid, before)
    watching = asyncio.create_task(memory.watch())
    attacker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.attackers", name, "--port", port, "--seconds", str(seconds + 2)),
        *("--known", str(known)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,  # asyncio tells of each write to a connection that has ended
    )
    assert attacker.stdout is not None
    try:
        async with _held_lock(address, site):
            await attacker.stdout.readline()
            await asyncio.sleep(0.5)
            under = await _good_client(address, seconds, site, first=100_000)
            got = (await attacker.stdout.readline()).decode().strip()
            if not got or got.startswith(SUCCEEDED):
                raise AttackError(f"{name}: {got or 'the attacker ended without a result'}")
            if site.storage and under.failed:
                raise AttackError(f"{name}: {under.failed} of {len(under.ms)} writes failed")
            await asyncio.sleep(_SETTLE_S)
    finally:
        with suppress(ProcessLookupError):
            attacker.kill()
        await attacker.wait()
        watching.cancel()
    after = _rss_mb(attacked.pid)
    failed = f", {under.failed} failed" if under.failed else ""
    return (
        f"| {name.replace('_', ' ')} | {rest.p(50):.1f} / {rest.p(99):.1f} | {under.p(50):.1f} / "
        f"{under.p(99):.1f}{failed} | {under.p(99) / rest.p(99):.1f} | {before:.0f} / {memory.peak:.0f} / "
        f"{after:.0f} | {got} |"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--only", action="append", choices=ATTACKS, help="repeat it for several attacks")
    parser.add_argument("--transport", action="append", choices=("grpcio", "fast"))
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each attack is measured")


async def run(names: Sequence[str], transports: Sequence[str], seconds: float) -> None:
    """Print a table for each transport."""
    for transport in transports:
        print(f"\n{transport}\n")
        print("| attack | at rest p50 / p99 ms | under attack | ratio | RSS MB before / peak / after | got |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for name in names:
            print(await _row(name, transport, seconds), flush=True)


async def _row(name: str, transport: str, seconds: float) -> str:
    """Return the row of an attack on a new server, or on a new storage beside one."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        site = site_of(name, folder)
        nodes = await stack.enter_async_context(cluster.formed_nodes(3))
        arguments = ("--transport", transport, *site.arguments)
        attacked = server = await stack.enter_async_context(
            cluster.served_process(nodes, arguments=arguments, files_max=_FILES_MAX)
        )
        if name in WITH_STORAGE:
            attacked = await stack.enter_async_context(cluster.served_storage(arguments=site.arguments))
            site.storage = attacked.address
        return await _measure(server.address, attacked, name, seconds, site=site, known=folder / "known.json")


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.attack")
    add_arguments(parser)
    options = parser.parse_args()
    try:
        await run(options.only or list(ATTACKS), options.transport or ["grpcio", "fast"], options.seconds)
    except AttackError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    asyncio.run(main())
