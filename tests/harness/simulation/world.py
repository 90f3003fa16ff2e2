"""One seeded run: nodes, servers, callers and a network; some seconds of faults, then peace and recovery."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final
from unittest.mock import patch

from harness.doubles.node_state import FakeNodeState
from harness.doubles.waiting import counts_no_waiter, keeps_no_waiter
from harness.simulation import faults
from harness.simulation.history import FencedStorage, History
from harness.simulation.holders import Holder, Operator, Surroundings
from harness.simulation.living import live
from harness.simulation.network import Network
from harness.simulation.nodes import Nodes
from harness.simulation.processes import Chance, now_ms
from harness.simulation.servers import START_TIMEOUT_MS, ServerHost
from redfence_server.locking.node import NodeState
from redfence_server.model import LeaseId

TROUBLE_S: Final = 8.0
# How long recovery may take: a quarantine, and the longest pause between two examinations of a node.
_RECOVERY_S: Final = 8.0
_PROBE_TTLS: Final = 3
# Every fourth world has an operator.
_OPERATED: Final = 2
# Two of eight have lock delays, one of them with an operator; those with a profile have none.
_DELAYED: Final = (2, 3)
# No run takes so long.
_HANG_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a run. Another one than these is a mutant.

    Attributes:
        fenced: without it the storage ignores tokens.
        counts_from_answer: holders count validity from the answer, and not from their call.
        node: the scripts.
        patches: of the product: where, what, and what stands for it.
        breaks: the letters of the promises of which a mutant breaks one.
    """

    fenced: bool = True
    counts_from_answer: bool = False
    node: type[FakeNodeState] = FakeNodeState
    patches: tuple[tuple[object, str, object], ...] = ()
    breaks: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    problems: tuple[str, ...]
    trace_hash: str
    counts: Counter[str]


class World:
    """One world of faults. A `profile` chooses their kinds, over durable nodes; without one, chance does."""

    def __init__(self, seed: int, rules: Rules, *, profile: faults.Profile | None = None) -> None:
        chance = self.chance = Chance(seed)
        self.history = History()
        self.clock_set_at_ms: dict[int, float] = {}
        self.kinds = (profile or chance.choice(faults.PROFILES))(chance)
        self.watches: list[asyncio.Task[None]] = []
        is_doubled = faults.DOUBLING & set(self.kinds)
        self.storage = FencedStorage(self.history, fenced=rules.fenced)
        self.struck: Counter[str] = Counter()
        self.resources = ("a", "b")[: chance.choice((1, 2))]
        self.ttl_ms_max = chance.choice((600, 1_000))
        latency_ms = chance.choice(((0.05, 0.3), (0.1, 2.0), (0.1, 20.0)))
        self.network = Network(chance, latency_ms=latency_ms)
        self.nodes = Nodes(
            chance,
            count=chance.choice((3, 3, 5) if is_doubled else (1, 3, 3, 3, 5)),
            durability="always" if profile or faults.DURABLE & set(self.kinds) else "",
            ttl_ms_max=self.ttl_ms_max,
            new_state=rules.node,
        )
        self.servers = [
            ServerHost(f"server-{index}", self.nodes.hosts, self.network, chance)
            for index in range(chance.choice((2, 2, 3) if is_doubled else (1, 2, 2, 3)))
        ]
        # Short leases end while they are being granted.
        ttls_ms = chance.choice(((200, 400, self.ttl_ms_max), (10, 30, 100)))
        around = Surroundings(
            *(self.servers, self.history, self.storage, chance, self.resources, ttls_ms),
            call_timeout_s=chance.choice((1.0, 0.1, 0.03)),
            counts_from_answer=rules.counts_from_answer,
            delays_ms=(0, 60, 300) if seed % 8 in _DELAYED and not profile else (0,),
        )
        self.holders = [
            Holder(f"holder-{index}", around, latency_ms=latency_ms) for index in range(chance.randint(2, 6))
        ]
        self._probe = Holder("probe", around, latency_ms=latency_ms)
        # Chance of its own, so that the worlds without an operator stay as they are.
        by_operator = replace(around, chance=Chance(-seed))
        self._operators = [
            Operator("operator", by_operator, latency_ms=latency_ms) for _ in range(seed % 4 == _OPERATED)
        ]

    async def run(self) -> None:
        """Live through it; what must not be is in the history."""
        disks = asyncio.create_task(self.nodes.write_to_disk())
        async with asyncio.timeout(START_TIMEOUT_MS / 1000):
            for server in self.servers:
                await server.until_serving()
        for holder in (*self.holders, *self._operators):
            holder.start()
        self._begin_operation()
        trouble = asyncio.create_task(faults.strike(self, self.kinds))
        await asyncio.sleep(TROUBLE_S)
        trouble.cancel()
        await asyncio.wait([trouble])
        self._heal()
        await self._end_operation()
        for holder in (*self.holders, *self._operators):
            holder.rest()
        await asyncio.sleep(_RECOVERY_S)
        await self._check_progress()
        self.storage.check()
        for watch in (disks, *self.watches):
            watch.cancel()
        await self._end()

    def _begin_operation(self) -> None:
        """Let an operator do something in the time of the faults."""

    async def _end_operation(self) -> None:
        """Return once the operator has done it."""

    def _heal(self) -> None:
        """Peace: whatever is down starts, whatever is stopped goes on, every message arrives."""
        for index in list(self.nodes.newcomers):
            self.nodes.end_double(index, self.servers)
        for host in self.nodes.hosts:
            if not host.process.alive:
                self.nodes.start(host)
            host.process.resume()
        for clock in (server.clock for server in self.servers):
            clock.go_at(clock.usual_rate)
        for server in self.servers:
            if not server.process.alive:
                server.start()
            server.process.resume()
        for holder in self.holders:
            if not holder.process.alive:
                holder.restart()
            holder.process.resume()
            holder.wire.loss = holder.wire.duplicates = 0.0
        for route in self.network.routes.values():
            route.latency_ms = (0.1, 1.0)
            route.unblock()

    async def _check_progress(self) -> None:
        """P: somebody is granted each lock within three times its ttl, and every node votes again."""
        left = self.nodes.left_to_an_operator(self.servers)
        if len(left) > (len(self.nodes.hosts) - 1) // 2:
            return
        for server in self.servers:
            assert server.cluster is not None
            for index, node in enumerate(server.cluster.view().nodes):
                if node.state is not NodeState.READY and index not in left:
                    self.history.problem(f"P: {server.name} is left without node {index}: {node.detail}")
        for resource in self.resources:
            lease = LeaseId(f"{self.chance.getrandbits(128):032x}")
            began_at_ms = now_ms()
            wait_ms = _PROBE_TTLS * self.ttl_ms_max
            acquiring = self._probe.process.spawn(
                self._probe.acquire(resource, lease, ttl_ms=self.ttl_ms_max, wait_ms=wait_ms)
            )
            await asyncio.wait([acquiring], timeout=2 * wait_ms / 1000)
            taken_ms = now_ms() - began_at_ms
            granted = self.history.grants.get(resource, [])
            # A hold on a node whose clock was set back lasts as much longer.
            if (not granted or granted[-1].lease != lease.digest) and not self.history.clocks_were_set_back:
                self.history.problem(f"P: no server granted {resource} within {taken_ms:.0f} ms of peace")

    async def _end(self) -> None:
        """C: nothing is left of anybody."""
        await asyncio.sleep(2 * self.ttl_ms_max / 1000)
        for holder in (*self.holders, *self._operators, self._probe):
            await holder.process.end()
        for server in self.servers:
            if server.service is not None:
                queues = server.service._queues
                # A hold on a node whose clock was set back is remembered as much longer.
                was_set_back = self.history.clocks_were_set_back
                if not (counts_no_waiter(queues.limiter) if was_set_back else keeps_no_waiter(queues)):
                    self.history.problem(f"C: {server.name} keeps a queue")
            await server.end()
            if server.process.tasks:
                self.history.problem(f"C: {server.name} leaves tasks: {list(server.process.tasks)}")
        for host in self.nodes.hosts:
            held = [name for name in self.resources if host.redis.state._hold(name, host.redis._clock_ms())]
            if held and not self.history.clocks_were_set_back:
                self.history.problem(f"C: {host.process.name} still holds {held}")


def replay_command(seed: int, mutant: str = "") -> str:
    return f'make sim SEED={seed} MUTANT="{mutant}"' if mutant else f"make sim SEED={seed}"


def simulate(seed: int, rules: Rules | None = None, *, make: Callable[[int, Rules], World] = World) -> Report:
    rules = rules or Rules()
    with ExitStack() as stack:
        # Settings of the product that somebody has made for this machine are not for this world.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("REDFENCE_")}
        stack.enter_context(patch.dict(os.environ, ours, clear=True))
        for where, what, instead in rules.patches:
            stack.enter_context(patch.object(where, what, instead))
        world = live(lambda: make(seed, rules), hang_s=_HANG_S)
    counts = Counter({"grants": sum(map(len, world.history.grants.values())), "stale": world.storage.refused})
    counts["forced"] = sum(operator.ended for operator in world._operators)
    counts["closed"] = world.history.lost_with_delay
    counts["acknowledged"] = len(world.storage.acknowledged)
    counts.update(world.struck)
    return Report(seed, tuple(world.history.problems), world.history.trace_hash, counts)
