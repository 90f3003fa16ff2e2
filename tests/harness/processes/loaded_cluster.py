"""A cluster with short quarantines under the load of two servers; a history judges it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from harness.history.vote_watch import VoteWatch
from harness.load.lock_load import LockLoad
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import LockServer, Serve, form, until, until_all_ready, until_no_locks
from harness.processes.tcp_proxy import TcpProxy
from redfence_proto.v1.lock_pb2 import NODE_STATE_READY

TTL_MS = 1_000
"""The greatest that the cluster allows, and so about how long a quarantine lasts."""
# So many grants of each server meet a node that must not vote.
_GRANTS = 10


@dataclass(frozen=True, slots=True)
class LoadedCluster:
    """Sixteen callers of two servers, and a look at the nodes behind their backs."""

    nodes: Sequence[RedisNode]
    servers: Sequence[LockServer]
    load: LockLoad
    watch: VoteWatch

    async def until_quarantined(self, *places: int, times: int = 1) -> None:
        """Return once the watch has seen these nodes in so many quarantines each."""

        async def seen() -> bool:
            return all(len(self.watch.quarantines[place]) >= times for place in places)

        await until(seen, timeout_s=10)

    async def until_ready(self, count: int) -> None:
        """Return once so many nodes vote, for both servers."""

        async def seen() -> bool:
            for server in self.servers:
                states = [node.state for node in (await server.status()).nodes]
                if states.count(NODE_STATE_READY) < count:
                    return False
            return True

        await until(seen, timeout_s=15)

    async def until_served(self) -> None:
        """Return once each server has gone on granting."""
        await self.load.until_granted_by_each(_GRANTS)

    def proxies(self, place: int) -> list[TcpProxy]:
        """Return what stands between the servers and a node."""
        return [server.proxies[place] for server in self.servers]


@asynccontextmanager
async def loaded_cluster(
    nodes: Sequence[RedisNode], serve: Serve, *, proxied: bool = False
) -> AsyncIterator[LoadedCluster]:
    """Form the nodes and put them under load.

    In the end all nodes have to vote again, and everything that callers were told has to be as promised.
    """
    await form(nodes, ttl_ms_max=TTL_MS)
    servers = [await serve(nodes, proxied=proxied), await serve(nodes, proxied=proxied)]
    await until_all_ready(*servers)
    load = LockLoad(*servers, ttl_ms=TTL_MS)
    async with VoteWatch(nodes) as watch, load:
        cluster = LoadedCluster(nodes, servers, load, watch)
        await cluster.until_served()
        yield cluster
        await until_all_ready(*servers)
        await cluster.until_served()
    load.check()
    await until_no_locks(nodes)
