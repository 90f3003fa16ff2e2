"""A world in which an operator changes the number of nodes under faults, and breaks off at times."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from harness.simulation.network import NodeHost
from harness.simulation.processes import Chance, Process, ProcessClock
from harness.simulation.servers import ServerHost
from harness.simulation.world import Rules, World
from redfence_server.errors import StartupError
from redfence_server.membership.admin import AdminSettings, connect_all
from redfence_server.membership.fence import wait_ms
from redfence_server.operations import recovery_plan, resize_plan
from redfence_server.operations.recovery import ClusterRecovery
from redfence_server.operations.resizing import ClusterResize
from redfence_server.redis_io.dial import DialledNode, NodeUrl
from redfence_server.redis_io.scripts import Keyspace

# A clock that is ahead of every token of a simulation.
_WALL_US = 2**51


def _kinds(chance: Chance) -> list[str]:
    """Return kinds of faults in which no node forgets. Servers are restarted by the operator."""
    usual = ["callers lose messages", "connection reset", "partition", "server paused", "slow network"]
    nodes = ["node paused", "node restarted"]
    return [
        "holder paused",
        "holder killed",
        *chance.sample(usual, 3),
        *chance.sample(nodes, chance.randint(0, 2)),
    ]


class ResizedWorld(World):
    """The operator gives the cluster another number of nodes, and each server the new list."""

    def __init__(self, seed: int, rules: Rules) -> None:
        super().__init__(seed, rules, profile=_kinds)
        self._operator = Process("operator")
        self._admin = AdminSettings(Keyspace(), 2_000, ProcessClock(), self._dial)
        self._before = len(self.nodes.hosts)
        self._after = self.chance.choice([count for count in (1, 3, 5) if count != self._before])
        self._hosts: list[NodeHost] = []
        self._operation: asyncio.Task[None] | None = None

    def _begin_operation(self) -> None:
        self._operation = asyncio.create_task(self._resize())

    async def _end_operation(self) -> None:
        assert self._operation is not None, "it was begun"
        await self._operation

    async def _resize(self) -> None:
        chance, nodes = self.chance, self.nodes
        await asyncio.sleep(chance.uniform(0.2, 3.0))
        while len(nodes.hosts) < self._after:
            nodes.add()
        self._hosts = list(nodes.hosts)
        # The last one with the old list brings old nodes back, if they restart before they retire.
        early = [server for server in self.servers[1:] if chance.random() < 0.2]
        for server in early:
            self._restart(server)
        while not await self._is_done():  # noqa: ASYNC110  (it is on virtual time)
            await asyncio.sleep(chance.uniform(0.01, 0.3))
        self.history.event("resized", f"{self._before} to {self._after}")
        self.struck["resized"] += 1
        for server in self.servers:
            if server not in early:
                await asyncio.sleep(chance.uniform(0.0, 1.0))
                self._restart(server)
        for host in nodes.hosts[self._after :]:
            host.process.resume()
        nodes.hosts = nodes.hosts[: self._after]
        floors = [host.redis.state.floor for host in nodes.hosts]
        nodes.left_out = {index for index, floor in enumerate(floors) if floor < max(floors)}
        for index in nodes.left_out:
            # As the command says: a server does not start while a node shows the old cluster.
            if not nodes.hosts[index].redis.state.predecessor:
                nodes.hosts[index].redis.state.wipe()

    def _restart(self, server: ServerHost) -> None:
        server.kill()
        server.give_list(self._hosts, self._after)
        server.start()

    async def _is_done(self) -> bool:
        """Run the command once; tell whether it has come to its end."""
        try:
            async with AsyncExitStack() as stack:
                old = await stack.enter_async_context(connect_all(_urls(self._before), self._admin))
                new = await stack.enter_async_context(connect_all(_urls(self._after), self._admin))
                looks = [node.snapshot for node in new]
                planned = resize_plan.plan([node.snapshot for node in old], looks, assume_durable=False)
                if planned.is_done:
                    return True
                resize = ClusterResize(planned, _urls(self._after), admin=self._admin, randomness=self.chance)
                # Ctrl-C, or a crash of the operator's machine.
                async with asyncio.timeout(self.chance.choice((0.01, 0.1, 0.5, 30.0, 30.0))):
                    await resize.take_out(old, new)
                    await asyncio.sleep(wait_ms(planned.ttl_ms_max) / 1000)
                await resize.give_back()
        except TimeoutError:
            return False
        except StartupError as error:
            return "came to its end" in str(error) and await self._is_recovered()
        return True

    async def _is_recovered(self) -> bool:
        """Recover the successor, as the refusal of the resize says; tell whether a quorum votes."""
        request = recovery_plan.Request(floor=None, ttl_ms_max=None)
        try:
            async with connect_all(_urls(self._after), self._admin) as nodes:
                looks = [node.snapshot for node in nodes]
                planned = recovery_plan.plan(looks, request, wall_us=_WALL_US, new_cluster_id="")
                recovery = ClusterRecovery(
                    planned, _urls(self._after), admin=self._admin, randomness=self.chance
                )
                await recovery.take_out(nodes)
                await asyncio.sleep(wait_ms(planned.ttl_ms_max) / 1000)
                await recovery.give_back()
        except StartupError as error:
            return "nothing to recover: a quorum votes" in str(error)
        return True

    async def _dial(self, node: NodeUrl, *, timeout_ms: int) -> DialledNode:
        del timeout_ms
        index = int(node.address.removeprefix("node-").partition(":")[0])
        return await self.network.dial(self._operator, self._operator, self._hosts[index], {})


def _urls(count: int) -> list[NodeUrl]:
    return [NodeUrl(f"redis://node-{index}:6379") for index in range(count)]
