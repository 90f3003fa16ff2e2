"""One seeded run: nodes, servers, callers and a network; some seconds of faults, then peace and recovery."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, TypeVar
from unittest.mock import patch

import structlog

from harness.doubles.node_state import FakeNodeState
from harness.doubles.waiting import counts_no_waiter, keeps_no_waiter
from harness.simulation import faults
from harness.simulation.history import FencedStorage, History
from harness.simulation.holders import Holder, Surroundings
from harness.simulation.network import Network, NodeHost
from harness.simulation.processes import Chance, ProcessClock, ProcessLoop, now_ms
from harness.simulation.redis import SimulatedRedis
from harness.simulation.servers import START_TIMEOUT_MS, ServerHost
from redfence_server.locking.node import NodeState
from redfence_server.membership import fence
from redfence_server.membership.examination import Phase
from redfence_server.model import LeaseId

TROUBLE_S: Final = 8.0
# How long recovery may take: a quarantine, and the longest pause between two examinations of a node.
_RECOVERY_S: Final = 8.0
_PROBE_TTLS: Final = 3
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
    def __init__(self, seed: int, rules: Rules) -> None:
        chance = self.chance = Chance(seed)
        self.history = History()
        self.clock_set_at_ms: dict[int, float] = {}
        self.kinds = chance.choice(faults.PROFILES)(chance)
        self.servers_die = "server killed" in self.kinds
        # Indices at which a process was lost, or forgot something.
        self.lost: set[int] = set()
        # By node index, a newcomer beside the process there.
        self.newcomers: dict[int, NodeHost] = {}
        self.watches: list[asyncio.Task[None]] = []
        is_doubled = faults.DOUBLING & set(self.kinds)
        self.storage = FencedStorage(self.history, fenced=rules.fenced)
        self._node_state = rules.node
        self.struck: Counter[str] = Counter()
        self.resources = ("a", "b")[: chance.choice((1, 2))]
        self.ttl_ms_max = chance.choice((600, 1_000))
        latency_ms = chance.choice(((0.05, 0.3), (0.1, 2.0), (0.1, 20.0)))
        self.network = Network(chance, latency_ms=latency_ms)
        count = chance.choice((3, 3, 5) if is_doubled else (1, 3, 3, 3, 5))
        self.clocks = [
            ProcessClock(offset_ms=1e12 + chance.uniform(0, 1e6), rate=chance.uniform(0.995, 1.005))
            for _ in range(count)
        ]
        needs_disk = faults.DURABLE & set(self.kinds)
        durability = "always" if needs_disk else chance.choice(("always", "everysec", "never", "mixed"))
        self.hosts = [self._new_host(index, count, durability) for index in range(count)]
        self._disks: dict[NodeHost, FakeNodeState] = {}
        self.servers = [
            ServerHost(f"server-{index}", self.hosts, self.network, chance)
            for index in range(chance.choice((2, 2, 3) if is_doubled else (1, 2, 2, 3)))
        ]
        # Short leases end while they are being granted.
        ttls_ms = chance.choice(((200, 400, self.ttl_ms_max), (10, 30, 100)))
        around = Surroundings(
            *(self.servers, self.history, self.storage, chance, self.resources, ttls_ms),
            call_timeout_s=chance.choice((1.0, 0.1, 0.03)),
            counts_from_answer=rules.counts_from_answer,
        )
        self.holders = [
            Holder(f"holder-{index}", around, latency_ms=latency_ms) for index in range(chance.randint(2, 6))
        ]
        self._probe = Holder("probe", around, latency_ms=latency_ms)

    def _new_host(self, index: int, count: int, durability: str) -> NodeHost:
        name = f"node-{index}"
        appendfsync = self.chance.choice(("always", "never")) if durability == "mixed" else durability
        redis = self._new_redis(index, name, appendfsync)
        return NodeHost(redis, name).form(index, count, self.ttl_ms_max)

    def _new_redis(self, index: int, name: str, appendfsync: str) -> SimulatedRedis:
        redis = SimulatedRedis(clock_ms=self.clocks[index].now_ms, appendfsync=appendfsync, name=name)
        redis.state = self._node_state()
        return redis

    @property
    def now_ms(self) -> float:
        return now_ms()

    # --- nodes ------------------------------------------------------------------------------------

    def may_forget(self, host: NodeHost) -> bool:
        """Tell whether only a minority has forgotten if this node does now: more is not promised."""
        indices = range(len(self.hosts))
        forgetful = {index for index in indices if not self._remembers(index)} | {self.hosts.index(host)}
        return len(forgetful) <= (len(self.hosts) - 1) // 2

    def _remembers(self, index: int) -> bool:
        """Tell whether the node votes, or will vote with all that it knew in the present run."""
        host = self.hosts[index]
        state, redis = host.redis.state, host.redis
        if host.wiped or state.phase not in {Phase.READY, Phase.RESTARTED} or state.high is None:
            return False
        floors = [each.redis.state.known_floors.get(index, 0) for each in self.hosts]
        if index in self.newcomers or state.floor < max(floors):
            return False
        return redis.appendfsync == "always" or (host.process.alive and state.run_id == redis.run_id)

    def start(self, host: NodeHost) -> None:
        """Start the process of a node that was killed, with what its disk has kept."""
        if host not in self.hosts:
            return  # another process has its index since
        disk = host.redis.appendfsync
        remembered: FakeNodeState | None = host.redis.state
        if host.wiped or disk == "never":
            remembered = None
        elif disk == "everysec":
            remembered = self._disks.get(host)
        if remembered is not host.redis.state:
            self.lost.add(self.hosts.index(host))
        host.redis.restart(remembered)
        host.start()

    def begin_double(self, index: int, *, copied: bool) -> NodeHost:
        """Start a newcomer beside the process at an index: empty, or as a new run with a copy of its data."""
        old = self.hosts[index]
        name = f"node-{index}-{self.struck.total()}"
        redis = self._new_redis(index, name, old.redis.appendfsync)
        redis.restart(old.redis.state if copied else None)
        self.newcomers[index] = NodeHost(redis, name)
        return self.newcomers[index]

    def end_double(self, index: int) -> None:
        """Let the index lead every server to one of the two processes; the other one dies."""
        self.lost.add(index)
        both = [self.hosts[index], self.newcomers.pop(index)]
        stays = self.chance.choice(both)
        self.hosts[index] = stays
        for server in self.servers:
            server.routed.pop(index, None)
        for each in both:
            if each is not stays:
                each.kill()

    async def _write_to_disk(self) -> None:
        while True:
            for host in self.hosts:
                if host.redis.appendfsync == "everysec" and host.process.alive:
                    self._disks[host] = host.redis.state.save()
            await asyncio.sleep(1.0)

    # --- one run ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live through it; what must not be is in the history."""
        disks = asyncio.create_task(self._write_to_disk())
        await self._until_serving()
        for holder in self.holders:
            holder.start()
        trouble = asyncio.create_task(faults.strike(self, self.kinds))
        await asyncio.sleep(TROUBLE_S)
        trouble.cancel()
        await asyncio.wait([trouble])
        self._heal()
        for holder in self.holders:
            holder.rest()
        await asyncio.sleep(_RECOVERY_S)
        await self._check_progress()
        self.storage.check(now_ms())
        for watch in (disks, *self.watches):
            watch.cancel()
        await self._end()

    async def _until_serving(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_MS / 1000):
            for server in self.servers:
                await server.until_serving()

    def _heal(self) -> None:
        """Peace: whatever is down starts, whatever is stopped goes on, every message arrives."""
        for index in list(self.newcomers):
            self.end_double(index)
        for host in self.hosts:
            if not host.process.alive:
                self.start(host)
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
        left = self._left_to_an_operator()
        if len(left) > (len(self.hosts) - 1) // 2:
            return
        for server in self.servers:
            assert server.cluster is not None
            for index, node in enumerate(server.cluster.view().nodes):
                if node.state is not NodeState.READY and index not in left:
                    self.history.problem(
                        now_ms(), f"P: {server.name} is left without node {index}: {node.detail}"
                    )
        for resource in self.resources:
            lease = LeaseId(f"{self.chance.getrandbits(128):032x}")
            began_at_ms = now_ms()
            wait_ms = _PROBE_TTLS * self.ttl_ms_max
            acquiring = self._probe.process.spawn(self._acquire(resource, lease, wait_ms))
            await asyncio.wait([acquiring], timeout=2 * wait_ms / 1000)
            taken_ms = now_ms() - began_at_ms
            granted = self.history.grants.get(resource, [])
            # A hold on a node whose clock was set back lasts as much longer.
            if (not granted or granted[-1].lease != lease.digest) and not self.history.clocks_were_set_back:
                self.history.problem(
                    now_ms(), f"P: nobody is granted {resource} after {taken_ms:.0f} ms of peace"
                )

    def _left_to_an_operator(self) -> set[int]:
        """Return the nodes that docs/guarantees.md leaves to an operator, as the world knows.

        The newest process at an index was lost, with every run of a server that knew it. Or too few
        others are left for a node that waits for its fence.
        """
        lost = {index for index in self.lost if self._is_unknown(index)}
        out = {
            i for i, host in enumerate(self.hosts) if i in lost or host.redis.state.phase is not Phase.READY
        }
        proven = {i for i in out - lost if self.hosts[i].redis.state.phase is Phase.RESTARTED}
        # A fence with fewer peers takes every other node, and a lost one cannot take the floor.
        needed = fence.fence_size(len(self.hosts)) - (not lost)
        back = {-1}
        while back:
            votes = len(self.hosts) - len(out)
            enough = {i for i in proven if votes + len(proven) - 1 >= needed}
            back = enough or {i for i in out - lost - proven if votes >= fence.fence_size(len(self.hosts))}
            out, proven = out - back, proven - back
        return out

    def _is_unknown(self, index: int) -> bool:
        """Tell whether a newer process was at an index, and no running server has known that one."""
        state = self.hosts[index].redis.state
        newest = max(floors.get(index, -1) for server in self.servers for floors in server.floors)
        is_old = not state.admission or state.floor < newest
        return is_old and all(server.floors[-1].get(index, -1) < newest for server in self.servers)

    async def _acquire(self, resource: str, lease: LeaseId, wait_ms: int) -> None:
        await self._probe.acquire(resource, lease, ttl_ms=self.ttl_ms_max, wait_ms=wait_ms)

    async def _end(self) -> None:
        """C: nothing is left of anybody."""
        await asyncio.sleep(2 * self.ttl_ms_max / 1000)
        for holder in (*self.holders, self._probe):
            await holder.process.end()
        for server in self.servers:
            if server.service is not None:
                queues = server.service._queues
                # A hold on a node whose clock was set back is remembered as much longer.
                was_set_back = self.history.clocks_were_set_back
                if not (counts_no_waiter(queues.limiter) if was_set_back else keeps_no_waiter(queues)):
                    self.history.problem(now_ms(), f"C: {server.name} keeps a queue")
            await server.end()
            if server.process.tasks:
                self.history.problem(now_ms(), f"C: {server.name} leaves tasks: {list(server.process.tasks)}")
        for host in self.hosts:
            held = [name for name in self.resources if host.redis.state._hold(name, host.redis._clock_ms())]
            if held and not self.history.clocks_were_set_back:
                self.history.problem(now_ms(), f"C: {host.process.name} still holds {held}")


def replay_command(seed: int, mutant: str = "") -> str:
    return f'make sim SEED={seed} MUTANT="{mutant}"' if mutant else f"make sim SEED={seed}"


def simulate(seed: int, rules: Rules | None = None) -> Report:
    rules = rules or Rules()
    with ExitStack() as stack:
        # Settings of the product that somebody has made for this machine are not for this world.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("REDFENCE_")}
        stack.enter_context(patch.dict(os.environ, ours, clear=True))
        for where, what, instead in rules.patches:
            stack.enter_context(patch.object(where, what, instead))
        return _simulate(seed, rules)


def _simulate(seed: int, rules: Rules) -> Report:
    world = live(lambda: World(seed, rules), hang_s=_HANG_S)
    counts = Counter({"grants": sum(map(len, world.history.grants.values())), "stale": world.storage.refused})
    counts["acknowledged"] = len(world.storage.acknowledged)
    counts.update(world.struck)
    return Report(seed, tuple(world.history.problems), world.history.trace_hash, counts)


class Living(Protocol):
    """A world that can be lived through."""

    history: History

    async def run(self) -> None: ...


W = TypeVar("W", bound=Living)


def live(make: Callable[[], W], *, hang_s: float) -> W:
    """Make a world on a loop of its own and live through it; defects of the product are in its history."""
    loop = ProcessLoop()
    asyncio.set_event_loop(loop)
    defects: list[str] = []
    loop.set_exception_handler(lambda _, about: defects.append(f"defect: {about.get('exception') or about}"))

    def note_defect(_: Any, __: str, event: MutableMapping[str, Any]) -> NoReturn:
        if event["event"] == "internal_error":
            defects.append(f"defect: {event}")
        raise structlog.DropEvent

    async def run() -> W:
        world = make()
        try:
            async with asyncio.timeout(hang_s):
                await world.run()
        except TimeoutError:
            world.history.problem(now_ms(), "P: something hangs")
        return world

    structlog.configure(processors=[note_defect], cache_logger_on_first_use=False)
    # The collection at the end looks at this world only, and not at every module.
    gc.disable()
    gc.freeze()
    try:
        world = loop.run_until_complete(run())
    finally:
        loop.bury()
        loop.close()
        asyncio.set_event_loop(None)
        # A world is large, and most of it is in reference cycles.
        gc.collect()
        gc.unfreeze()
        gc.enable()
        structlog.reset_defaults()
    world.history.problems += defects
    return world
