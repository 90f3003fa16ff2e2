"""Faults of limits and clocks: connections, memory or files run out; clocks jump, stop or run slowly."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from harness.chaos.fault_injection import (
    FaultInjection,
    FaultInjector,
    lock_of_network,
    lock_of_node,
    lock_of_server,
    locks_of_everything,
    names,
    some_node,
    some_server,
    wait_until_seen_by_all,
)
from harness.chaos.recorder import now_s
from harness.chaos.services import ServerProcess
from harness.doubles.lua_node import Database
from harness.processes.servers import new_lease_id, until

CLOCK_STEPPED = "clock stepped"
SERVER_CLOCK = "server clock wrong"
_STANDARD_FILES = 3
_STEP_MS = 30_000.0
_CLIENTS_DEFAULT = 10_000
# The share of time that a slow clock loses; a lease allows for 0.01.
_SLOW_RATIO = 0.015
# The servers with a true clock may grant nothing for as long as a new connection may take.
_NO_GRANT_S = 1.5
_TRY_S = 0.05
# An earlier fault may keep the nodes from voting for this long.
_GRANTS_S = 10.0


def clients_limited(injector: FaultInjector, random: Random) -> FaultInjection:
    """Let a node accept no new connection, and reset its connections to all servers."""
    index = some_node(injector, random)
    opened: list[Database] = []

    async def limit(count: int) -> None:
        await asyncio.to_thread(opened[0].call, "CONFIG", "SET", "maxclients", count)

    async def begin() -> None:
        # Only a connection that is already open can take the limit back.
        opened.append(await asyncio.to_thread(Database, injector.cluster.nodes[index].url))
        await limit(1)
        for server in injector.cluster.servers:
            server.proxies[index].reset()

    async def end() -> None:
        if opened:
            await limit(_CLIENTS_DEFAULT)
            opened[0].close()

    return FaultInjection(
        lock_of_node(index),
        random.uniform(0.5, 4.0),
        begin=begin,
        end=end,
        locks={lock_of_node(index), lock_of_network(index)},
    )


def memory_limited(injector: FaultInjector, random: Random) -> FaultInjection:
    """Take all memory from a node that evicts nothing, so that it refuses every write."""
    index = some_node(injector, random)

    async def limit(byte_count: int) -> None:
        await injector.cluster.nodes[index].call("CONFIG", "SET", "maxmemory", byte_count)

    return FaultInjection(
        lock_of_node(index),
        random.uniform(0.5, 4.0),
        begin=partial(limit, 1),
        end=partial(limit, 0),
        locks={lock_of_node(index)},
    )


def files_limited(injector: FaultInjector, random: Random) -> FaultInjection:
    """Let a server open no more files, and reset its connections to one node or to all nodes."""
    index = some_server(injector, random)
    server = injector.cluster.servers[index]
    count = random.choice((1, len(injector.cluster.nodes)))
    lost = random.sample(range(len(injector.cluster.nodes)), count)
    before: list[tuple[int, tuple[int, int]]] = []

    async def begin() -> None:
        # A server that has just been started would die of it.
        await server.until_serving()
        pid = server.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        before.append((pid, (soft, hard)))
        # The limit applies to the number of a new file, and a lost connection leaves a low number free.
        # So only the numbers of the standard files may be below the limit. Open files stay open.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_STANDARD_FILES, hard))
        for node in lost:
            server.proxies[node].reset()

    def end() -> None:
        for pid, limits in before:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    return FaultInjection(
        f"{lock_of_server(index)}, {names(lost)} lost",
        random.uniform(0.5, 4.0),
        begin=begin,
        end=end,
        locks={lock_of_server(index), *map(lock_of_network, lost)},
    )


def clock_stepped(injector: FaultInjector, random: Random) -> FaultInjection:
    """Set a node's clock half a minute forward or back, and then right again."""
    index = some_node(injector, random)
    node = injector.cluster.nodes[index]
    step_ms = random.choice((-_STEP_MS, _STEP_MS))
    stepped: list[float] = []

    async def begin() -> None:
        stepped.append(step_ms)
        await node.step_clock(step_ms)

    async def end() -> None:
        for each in stepped:
            await node.step_clock(-each)

    return FaultInjection(
        f"{lock_of_node(index)} by {step_ms / 1000:+g} s",
        random.uniform(0.5, 5.0),
        begin=begin,
        end=end,
        locks={lock_of_node(index)},
        moves_clocks=True,
    )


def server_clock_wrong(injector: FaultInjector, random: Random) -> FaultInjection:
    """Stop one server's clock for a moment, or slow it for some seconds; the other servers go on granting."""
    cluster = injector.cluster
    index = some_server(injector, random)
    server = cluster.servers[index]
    wrong_s = random.choice((random.uniform(0.1, 0.5), random.uniform(2.0, 4.0)))
    loss_s = wrong_s if wrong_s < 1.0 else wrong_s * _SLOW_RATIO
    others = {lock_of_server(each): other for each, other in enumerate(cluster.servers) if each != index}
    probes: list[asyncio.Task[None]] = []

    async def begin() -> None:
        assert server.clock is not None, "this server has the machine's clock"
        await wait_until_seen_by_all(injector, *range(len(cluster.nodes)))
        for name, other in others.items():
            await until(partial(other.grants, f"probe/{new_lease_id()}", ttl_ms=100), timeout_s=_GRANTS_S)
            probes.append(asyncio.create_task(_probe(injector, other, name)))
        server.clock.lag(loss_s * 1000, over_ms=wrong_s * 1000)

    async def end() -> None:
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        assert server.clock is not None
        server.clock.lag(0.0, over_ms=1.0)
        injector.broken += await cluster.set_right()

    how = "stands still" if loss_s == wrong_s else "is slow"
    return FaultInjection(
        f"{lock_of_server(index)} {how} for {wrong_s * 1000:.0f} ms",
        # A server compares its clock with the nodes' clocks twice a second.
        wrong_s + random.uniform(1.0, 2.0),
        begin=begin,
        end=end,
        # No other fault may keep the other servers from granting.
        locks=locks_of_everything(injector),
    )


async def _probe(injector: FaultInjector, server: ServerProcess, name: str) -> None:
    """Acquire new resources again and again; report once that the server granted nothing for too long."""
    granted_s = now_s()
    while now_s() - granted_s < _NO_GRANT_S:
        if await server.grants(f"probe/{new_lease_id()}", ttl_ms=100):
            granted_s = now_s()
        await asyncio.sleep(_TRY_S)
    injector.broken.append(f"{name}, whose clock is true, granted nothing for {_NO_GRANT_S:g} s")


LIMIT_FAULTS: Mapping[str, Callable[[FaultInjector, Random], FaultInjection]] = {
    "maxclients": clients_limited,
    "maxmemory noeviction": memory_limited,
    "no more files": files_limited,
    CLOCK_STEPPED: clock_stepped,
    SERVER_CLOCK: server_clock_wrong,
}
