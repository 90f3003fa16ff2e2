"""Runs one chaos run: starts everything, injects faults, repairs everything, and returns the records."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from harness.chaos import storage_calls
from harness.chaos.client_pool import MIX, ClientPool
from harness.chaos.cluster import ChaosCluster, Plan
from harness.chaos.fault_injection import FaultInjector
from harness.chaos.faults import inject_faults
from harness.chaos.left_behind import left_behind
from harness.chaos.lock_calls import Held, LockCalls, Renewals
from harness.chaos.recorder import Recorder, now_s, settled
from harness.chaos.services import Installation
from harness.chaos.workloads import TTL_S
from harness.history.records import History, Operation, in_order, read_operations
from harness.processes.servers import new_lease_id
from redfence import RedfenceError
from redfence_server.embedded.binary import find_redis_binary

_CALM_S = 4.0
_LAST = "last"
# A refused client tries again. After this time a client must have been granted.
_LAST_TRIES_S = 3.0 * TTL_S
_LAST_PAUSE_S = 0.05
_BEAT_S = 0.05
_LOGGED_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """The clients and faults of one run.

    Attributes:
        seed: of the clients and the faults.
        lasts_s: for how long faults begin.
        faults: their names.
        asked: the faults without which the run is invalid.
        client_count: the number of client processes.
        mix: their workloads, in turn.
        clients: the versions that they run, in turn.
        tail_s: for how long clients go on after the healing; it should exceed every lease from before.
    """

    seed: int
    lasts_s: float
    faults: Sequence[str]
    asked: Sequence[str] = ()
    client_count: int = 10
    mix: Sequence[str] = MIX
    clients: Sequence[Installation] = (Installation(),)
    tail_s: float = 4.0 * TTL_S


@dataclass(frozen=True, slots=True)
class Run:
    """The records of one run.

    Attributes:
        history: for the checker.
        wrong: what the harness could not do; such a run is invalid.
        defects: defects of redfence outside of the history: internal errors in logs, processes that ended by
            themselves, nodes or servers that did not recover, and what was left behind.
        late_s: the greatest delay of this process, which carries all traffic between servers and nodes.
        logged: the last warnings of the servers.
    """

    history: History
    wrong: Sequence[str]
    defects: Sequence[str]
    late_s: float
    logged: Sequence[str]


async def _measure_lateness(late_s: list[float]) -> None:
    """Append how late this event loop was, again and again."""
    while True:
        before_s = now_s()
        await asyncio.sleep(_BEAT_S)
        late_s.append(now_s() - before_s - _BEAT_S)


async def run(
    plan: Plan,
    schedule: Schedule,
    *,
    folder: Path,
    say: Callable[[str], None],
    disturb: Callable[[FaultInjector], Awaitable[None]] | None = None,
) -> Run:
    """Return the records of a run. It leaves no process behind, and files only in `folder`.

    With `disturb`, this function takes the place of the faults that the schedule names.
    """
    async with ChaosCluster(plan, folder, find_redis_binary()) as cluster:
        say(f"{plan.node_count} nodes (aof {plan.aof}), {plan.server_count} servers and the storage are up")
        began_s = now_s()
        client_pool = ClientPool(
            cluster,
            seed=str(schedule.seed),
            began_s=began_s,
            mix=schedule.mix,
            count=schedule.client_count,
            installations=schedule.clients,
        )
        injector = FaultInjector(
            cluster,
            client_pool,
            on_begin=lambda injection: say(
                f"  {now_s() - began_s:7.1f} s  {injection.kind}: {injection.target}"
            ),
        )
        await client_pool.start()
        # The throughput counts from here on: before, only some clients worked.
        began_s = now_s()
        say(f"{len(client_pool)} clients work; faults begin in {_CALM_S:g} s")
        await asyncio.sleep(_CALM_S)
        late_s = [0.0]
        lateness = asyncio.create_task(_measure_lateness(late_s))
        try:
            if disturb is not None:
                await disturb(injector)
            else:
                seed = f"{schedule.seed}/faults"
                await inject_faults(injector, schedule.faults, seed=seed, lasts_s=schedule.lasts_s)
        finally:
            lateness.cancel()
        say(f"{len(injector.faults)} faults are over; everything is repaired")
        broken = [*injector.broken, *await cluster.set_right()]
        healed_s = now_s()
        await asyncio.sleep(schedule.tail_s)
        broken += client_pool.ended_early()
        broken += await client_pool.end()
        say("the clients have ended; every resource is acquired once more")
        # In a thread, because a blocked event loop would stop the proxies and so all nodes.
        operations = await asyncio.to_thread(client_pool.operations)
        last = await _last_acquires(cluster, operations, folder / "last.jsonl")
        ended_s = now_s()
        kept = {}
        for name in sorted({each.resource for each in operations if each.resource.startswith("list/")}):
            try:
                kept[name] = await storage_calls.kept(cluster.storage.address, name)
            except RedfenceError as error:
                broken.append(f"the storage does not show {name}: {error}")
        history = History(
            seed=schedule.seed,
            operations=in_order((*operations, *last)),
            faults=tuple(sorted(injector.faults, key=lambda fault: fault.began_s)),
            began_s=began_s,
            healed_s=healed_s,
            ended_s=ended_s,
            kept=kept,
            asked=tuple(schedule.asked),
            node_count=len(cluster.nodes),
        )
        broken += await left_behind(
            cluster, clocks_were_set=any(fault.moves_clocks for fault in injector.faults)
        )
        defects = [*broken, *cluster.ended_early(), *cluster.defects()]
        return Run(history, injector.unhealed, defects, max(late_s), cluster.logged()[-_LOGGED_MAX:])


async def _last_acquires(
    cluster: ChaosCluster, operations: Sequence[Operation], path: Path
) -> list[Operation]:
    """Acquire, renew and release every resource that clients used, through each server."""
    with Recorder(path, client=_LAST) as recorder:
        for address in cluster.addresses:
            calls = LockCalls([address], recorder=recorder, random=Random(_LAST))
            try:
                for resource in sorted({each.resource for each in operations}):
                    await _acquire_once_more(calls, recorder, resource)
            finally:
                await calls.close()
    return settled(read_operations(path))


async def _acquire_once_more(calls: LockCalls, recorder: Recorder, resource: str) -> None:
    ends_s = now_s() + _LAST_TRIES_S
    got = None
    while not isinstance(got, Held) and now_s() < ends_s:
        lease = new_lease_id()
        got = await calls.acquire(resource, lease, ttl_s=TTL_S, wait_s=TTL_S)
        if isinstance(got, Held):
            renewals = Renewals(calls, recorder, got)
            await renewals.renew()
            await renewals.close()
        await calls.release(resource, lease, token=got.token if isinstance(got, Held) else 0)
        if not isinstance(got, Held):
            await asyncio.sleep(_LAST_PAUSE_S)
