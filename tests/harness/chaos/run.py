"""One chaos run: start everything, let it work in peace, injection it, set it right, let it work again, end it, and return what was recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from harness.chaos import storage_calls
from harness.chaos.client_pool import MIX, ClientPool
from harness.chaos.cluster import ChaosCluster, Plan
from harness.chaos.fault_injection import FaultInjector
from harness.chaos.faults import inject_faults
from harness.chaos.left_behind import left_behind
from harness.chaos.lock_calls import Held, LockCalls, Renewals
from harness.chaos.recorder import Recorder, now_s, settled
from harness.chaos.workloads import TTL_S
from harness.history.records import History, Operation, in_order, read_operations
from harness.processes.servers import new_lease_id
from redfence import RedfenceError
from redfence_server.embedded.binary import find_redis_binary

_CALM_S = 4.0
_LAST = "last"
# Whoever is refused tries again, for as long as somebody must have been granted by then.
_LAST_TRIES_S = 3.0 * TTL_S
_LAST_PAUSE_S = 0.05
_BEAT_S = 0.05
_LOGGED_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one run is to be.

    Attributes:
        seed: of the clients and the faults.
        lasts_s: for how long faults come.
        faults: their names.
        asked: those of them without which the run proves nothing.
        client_count: how many processes call.
        mix: their workloads, in turn.
        tail_s: for how long they go on after everything is set right; it should be longer than every lease of before.
    """

    seed: int
    lasts_s: float
    faults: Sequence[str]
    asked: Sequence[str] = ()
    client_count: int = 10
    mix: Sequence[str] = MIX
    tail_s: float = 4.0 * TTL_S


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it.

    Attributes:
        history: for the checker.
        wrong: what is wrong with the run itself: it proves nothing.
        defects: what is wrong with redfence beside the history: what servers wrote in their logs as defects of their own, processes that ended
            by themselves, what did not come right again after the faults, and what was left behind.
        late_s: by how much this process, through which all goes between servers and nodes, was late at most while faults came.
        logged: the last warnings of the servers, for whoever looks into a violation.
    """

    history: History
    wrong: Sequence[str]
    defects: Sequence[str]
    late_s: float
    logged: Sequence[str]


class _Lateness:
    """Within `async with`, how late this event loop comes round.

    Attributes:
        most_s: the latest it was.
    """

    def __init__(self) -> None:
        self.most_s = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            before_s = now_s()
            await asyncio.sleep(_BEAT_S)
            self.most_s = max(self.most_s, now_s() - before_s - _BEAT_S)


async def run(plan: Plan, schedule: Schedule, *, folder: Path, say: Callable[[str], None]) -> Run:
    """Return what was recorded. Nothing is left running, and of files only what is in `folder`."""
    async with ChaosCluster(plan, folder, find_redis_binary()) as cluster:
        say(f"{plan.node_count} nodes (aof {plan.aof}), {plan.server_count} servers and the storage are up")
        began_s = now_s()
        client_pool = ClientPool(
            cluster, seed=str(schedule.seed), began_s=began_s, mix=schedule.mix, count=schedule.client_count
        )
        injector = FaultInjector(
            cluster,
            client_pool,
            on_begin=lambda injection: say(
                f"  {now_s() - began_s:7.1f} s  {injection.kind}: {injection.target}"
            ),
        )
        await client_pool.start()
        # Counted from here on: before, only some of them worked.
        began_s = now_s()
        say(f"{len(client_pool)} clients work; faults begin in {_CALM_S:g} s")
        await asyncio.sleep(_CALM_S)
        async with _Lateness() as lateness:
            await inject_faults(
                injector, schedule.faults, seed=f"{schedule.seed}/faults", lasts_s=schedule.lasts_s
            )
        say(f"{len(injector.faults)} faults are over; everything is set right")
        broken = [*injector.broken, *await cluster.set_right()]
        healed_s = now_s()
        await asyncio.sleep(schedule.tail_s)
        broken += client_pool.ended_early()
        broken += await client_pool.end()
        say("the clients have ended; every resource is acquired once more")
        # Not here, where the proxies are: the servers would see all nodes stand still.
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
        )
        broken += await left_behind(
            cluster, clocks_were_set=any(fault.moves_clocks for fault in injector.faults)
        )
        defects = [*broken, *cluster.ended_early(), *cluster.defects()]
        return Run(history, injector.unhealed, defects, lateness.most_s, cluster.logged()[-_LOGGED_MAX:])


async def _last_acquires(
    cluster: ChaosCluster, operations: Sequence[Operation], path: Path
) -> list[Operation]:
    """Acquire every resource that anybody has acquired, renew it and give it back: through each server."""
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
