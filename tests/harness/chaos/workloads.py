"""Workloads over the generated stubs: fenced appends, fast acquires, and leases that are renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from harness.chaos.lock_calls import Held, LockCalls, Renewals
from harness.chaos.recorder import Recorder, now_s
from harness.chaos.storage_calls import StorageCalls
from harness.history.records import Outcome
from harness.processes.servers import new_lease_id

TTL_S = 2.0
# Some end before many faults do.
_RACED_TTLS_S = (0.3, 1.0, TTL_S)
# After this time clients go on with a new list, so that no list exceeds the size of a value.
_EPOCH_S = 60.0
_APPENDED = 3
_RACED = 3
_KEPT = 2
_REPEATS_MAX = 3
# The share of tries that an observation follows.
_SEEN_SHARE = 0.1
# The pause after a refusal. A dozen clients without a pause would delay a starting server for half a minute.
_REFUSED_S = 0.02


@dataclass(frozen=True, slots=True)
class Work:
    """The parts that one worker uses.

    Attributes:
        began_s: since when lists are counted, the same for all clients.
        stopping: tells whether to begin nothing more.
    """

    locks: LockCalls
    storage: StorageCalls
    recorder: Recorder
    random: Random
    began_s: float
    stopping: Callable[[], bool]


def list_name(random: Random, began_s: float) -> str:
    """Return a list of the present epoch."""
    return f"list/{random.randrange(_APPENDED)}/{int((now_s() - began_s) / _EPOCH_S)}"


async def append(work: Work) -> None:
    """Append to lists under their locks; only the storage stops a write that comes too late."""
    while not work.stopping():
        resource, lease = list_name(work.random, work.began_s), new_lease_id()
        got = await work.locks.acquire(resource, lease, ttl_s=TTL_S, wait_s=TTL_S)
        if isinstance(got, Held):
            before = await work.storage.read(resource, lease, got.token)
            if before is not None:
                await asyncio.sleep(work.random.uniform(0.0, 0.04))
                await work.storage.append(resource, lease, got.token, before)
        else:
            await asyncio.sleep(_REFUSED_S)
        if got is not Outcome.FAILED:
            await work.locks.release(resource, lease, token=got.token if isinstance(got, Held) else 0)


async def race(work: Work) -> None:
    """Acquire and release as fast as possible, and observe now and then; mostly repeat an unknown Acquire."""
    while not work.stopping():
        resource, lease = f"raced/{work.random.randrange(_RACED)}", new_lease_id()
        ttl_s = work.random.choice(_RACED_TTLS_S)
        wait_s = work.random.choice((0.0, 0.0, 0.5, TTL_S))
        got = await work.locks.acquire(resource, lease, ttl_s=ttl_s, wait_s=wait_s)
        for _ in range(_REPEATS_MAX):
            if got is not Outcome.UNKNOWN or work.random.random() < 0.3:
                break
            await asyncio.sleep(_REFUSED_S)
            got = await work.locks.acquire(resource, lease, ttl_s=ttl_s, wait_s=0.5)
        if not isinstance(got, Held):
            await asyncio.sleep(_REFUSED_S)
        if isinstance(got, Held) and work.random.random() < 0.2:
            # A repeat of an Acquire whose answer arrived.
            await work.locks.acquire(resource, lease, ttl_s=ttl_s, wait_s=0.0)
        if isinstance(got, Held) and work.random.random() < _SEEN_SHARE:
            await work.locks.check(resource, lease, got.token)
        if isinstance(got, Held) and work.random.random() < 0.01:
            continue  # a holder that never releases: the lease ends by itself
        # Also after a refused repeat: the first Acquire may have been granted.
        await work.locks.release(resource, lease, token=got.token if isinstance(got, Held) else 0)
        if isinstance(got, Held) and work.random.random() < _SEEN_SHARE:
            # The same server would send the check behind the release, on the same connections.
            work.locks.go_elsewhere()
            await work.locks.check(resource, lease, got.token)
        if work.random.random() < _SEEN_SHARE:
            await work.locks.look(resource)


async def keep(work: Work) -> None:
    """Hold a lock for up to several ttls over a keepalive stream, exactly as long as the answers allow."""
    while not work.stopping():
        resource, lease = f"kept/{work.random.randrange(_KEPT)}", new_lease_id()
        got = await work.locks.acquire(resource, lease, ttl_s=TTL_S, wait_s=2 * TTL_S)
        if isinstance(got, Held):
            await _hold(work, got, ends_s=now_s() + work.random.uniform(0.1, 3.0) * TTL_S)
        else:
            await asyncio.sleep(_REFUSED_S)
        if got is not Outcome.FAILED:
            await work.locks.release(resource, lease, token=got.token if isinstance(got, Held) else 0)


async def _hold(work: Work, held: Held, *, ends_s: float) -> None:
    until_s = held.until_s
    renewals = Renewals(work.locks, work.recorder, held)
    try:
        while now_s() < min(until_s, ends_s) and not work.stopping():
            await asyncio.sleep(work.random.uniform(0.1, 0.3) * TTL_S)
            renewed_s = await renewals.renew()
            if renewed_s is None:
                return
            until_s = max(until_s, renewed_s)
    finally:
        await renewals.close()
