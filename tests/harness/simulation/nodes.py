"""The nodes of a simulated cluster: which process stands at each index, and what it has lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from harness.doubles.node_state import FakeNodeState
from harness.simulation.network import NodeHost
from harness.simulation.processes import Chance, ProcessClock
from harness.simulation.redis import SimulatedRedis
from harness.simulation.servers import ServerHost
from redfence_server.membership import fence
from redfence_server.membership.examination import Phase


class Nodes:
    """The machines of the nodes, by index.

    Attributes:
        lost: indices at which a process was lost, or forgot something.
        newcomers: by index, another process beside the one there.
        left_out: indices whose node missed a recovery or a resize.
    """

    def __init__(
        self,
        chance: Chance,
        *,
        count: int,
        durability: str,
        ttl_ms_max: int,
        new_state: Callable[[], FakeNodeState],
    ) -> None:
        self._chance = chance
        self._new_state = new_state
        self.lost: set[int] = set()
        self.newcomers: dict[int, NodeHost] = {}
        self.left_out: set[int] = set()
        self._disks: dict[NodeHost, FakeNodeState] = {}
        self.clocks = [
            ProcessClock(offset_ms=1e12 + chance.uniform(0, 1e6), rate=chance.uniform(0.995, 1.005))
            for _ in range(count)
        ]
        durability = durability or chance.choice(("always", "everysec", "never", "mixed"))
        self.hosts: list[NodeHost] = []
        for index in range(count):
            appendfsync = chance.choice(("always", "never")) if durability == "mixed" else durability
            host = self._new_host(index, f"node-{index}", appendfsync)
            self.hosts.append(host.form(index, count, ttl_ms_max))

    def add(self) -> None:
        """Start another node, empty and durable."""
        index = len(self.hosts)
        self.clocks.append(ProcessClock(offset_ms=1e12 + self._chance.uniform(0, 1e6)))
        host = self._new_host(index, f"node-{index}", "always")
        host.redis.state.wipe()
        self.hosts.append(host)

    def _new_host(self, index: int, name: str, appendfsync: str) -> NodeHost:
        redis = SimulatedRedis(clock_ms=self.clocks[index].now_ms, appendfsync=appendfsync, name=name)
        redis.state = self._new_state()
        return NodeHost(redis, name)

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

    def begin_double(self, index: int, number: int, *, copied: bool) -> NodeHost:
        """Start a newcomer beside the process at an index: empty, or as a new run with a copy of its data."""
        old = self.hosts[index].redis
        newcomer = self._new_host(index, f"node-{index}-{number}", old.appendfsync)
        newcomer.redis.restart(old.state if copied else None)
        self.newcomers[index] = newcomer
        return newcomer

    def end_double(self, index: int, servers: Sequence[ServerHost]) -> None:
        """Let the index lead every server to one of the two processes; the other one dies."""
        self.lost.add(index)
        both = [self.hosts[index], self.newcomers.pop(index)]
        self.hosts[index] = stays = self._chance.choice(both)
        for server in servers:
            server.routed.pop(index, None)
        for each in both:
            if each is not stays:
                each.kill()

    async def write_to_disk(self) -> None:
        """Write once a second what a node of appendfsync everysec remembers, until cancelled."""
        while True:
            for host in self.hosts:
                if host.redis.appendfsync == "everysec" and host.process.alive:
                    self._disks[host] = host.redis.state.save()
            await asyncio.sleep(1.0)

    def left_to_an_operator(self, servers: Sequence[ServerHost]) -> set[int]:
        """Return the nodes that docs/guarantees.md leaves to an operator, as the world knows.

        The newest process at an index was lost, with every run of a server that knew it. Or too few
        others are left for a node that waits for its fence.
        """
        lost = self.left_out | {index for index in self.lost if self._is_unknown(index, servers)}
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

    def _is_unknown(self, index: int, servers: Sequence[ServerHost]) -> bool:
        """Tell whether a newer process was at an index, and no running server has known that one."""
        state = self.hosts[index].redis.state
        newest = max(floors.get(index, -1) for server in servers for floors in server.floors)
        is_old = not state.admission or state.floor < newest
        return is_old and all(server.floors[-1].get(index, -1) < newest for server in servers)
