"""Faults of processes: clients, servers, nodes and the storage stand still or die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from random import Random

from harness.chaos import client
from harness.chaos.fault_injection import (
    STORAGE,
    TTL_S,
    FaultInjection,
    FaultInjector,
    for_each,
    lock_of_client,
    lock_of_node,
    lock_of_server,
    locks_of_servers,
    names,
    some_server,
    wait_until_seen,
)
from harness.chaos.services import ServerProcess, Service
from harness.processes.redis_nodes import RedisNode

# Mostly the workloads whose late write the storage must refuse.
_PAUSED = ("append", "append", "sdk", *client.WORKLOADS)


def holder_paused(injector: FaultInjector, random: Random) -> FaultInjection:
    """Stop a client between its read and its write, for longer than its lease lasts."""
    clients = injector.client_pool
    index = clients.random_index(random, [random.choice(_PAUSED)])
    return FaultInjection(
        clients.name_of(index),
        random.uniform(1.5, 3.0) * TTL_S,
        begin=lambda: clients.stop_before_write(index),
        end=lambda: clients.resume(index),
        locks={lock_of_client(index)},
    )


def holder_killed(injector: FaultInjector, random: Random) -> FaultInjection:
    """Kill a client between its read and its write; a new client replaces it."""
    clients = injector.client_pool
    index = clients.random_index(random, [random.choice(_PAUSED)])

    async def begin() -> None:
        await clients.stop_before_write(index)
        clients.kill(index)

    return FaultInjection(
        clients.name_of(index),
        random.uniform(0.0, 1.0),
        begin=begin,
        end=lambda: clients.replace(index),
        locks={lock_of_client(index)},
    )


def _server_fault(
    begin: Callable[[FaultInjector, ServerProcess], Awaitable[None] | None],
    end: Callable[[ServerProcess], None],
    lasts_ttls: tuple[float, float],
    injector: FaultInjector,
    random: Random,
) -> FaultInjection:
    index = some_server(injector, random)
    server = injector.cluster.servers[index]
    return FaultInjection(
        lock_of_server(index),
        random.uniform(*lasts_ttls) * TTL_S,
        begin=lambda: begin(injector, server),
        end=lambda: end(server),
        locks={lock_of_server(index)},
    )


async def _drain(injector: FaultInjector, server: ServerProcess) -> None:
    """Ask a server to end by SIGTERM; another exit status than 0 is a defect."""
    # A process that has just been started does not handle SIGTERM yet.
    served = server.is_serving
    status: object
    try:
        status = await server.drain()
    except AssertionError as error:
        status = str(error)
        server.kill()
    if served and status != 0:
        index = injector.cluster.servers.index(server)
        injector.broken.append(f"server {index} was told to end and did with {status}")


def _storage_fault(
    begin: Callable[[Service], None],
    end: Callable[[Service], Awaitable[None] | None],
    lasts_s: tuple[float, float],
    injector: FaultInjector,
    random: Random,
) -> FaultInjection:
    storage = injector.cluster.storage
    return FaultInjection(
        STORAGE,
        random.uniform(*lasts_s),
        begin=lambda: begin(storage),
        end=lambda: end(storage),
        locks={STORAGE},
    )


async def _start_storage(storage: Service) -> None:
    storage.start()
    await storage.until_serving()


def node_paused(injector: FaultInjector, random: Random) -> FaultInjection:
    """Stop one node, or now and then more than a minority."""
    count = injector.cluster.minority + 1 if random.random() < 0.2 else 1
    indices = random.sample(range(len(injector.cluster.nodes)), count)
    nodes = [injector.cluster.nodes[index] for index in indices]
    return FaultInjection(
        names(indices),
        random.uniform(0.1, 1.5) * TTL_S,
        begin=for_each(RedisNode.pause, nodes),
        end=for_each(RedisNode.resume, nodes),
        locks=set(map(lock_of_node, indices)),
    )


def node_killed(injector: FaultInjector, random: Random) -> FaultInjection:
    """Kill one node and restart it with its file; of durable nodes now and then more than a minority."""
    aof = injector.cluster.plan.aof
    durable = aof == "always"
    count = injector.cluster.minority + 1 if durable and random.random() < 0.2 else 1
    indices = random.sample(range(len(injector.cluster.nodes)), count)
    nodes = [injector.cluster.nodes[index] for index in indices]

    async def begin() -> None:
        if aof == "off":
            await wait_until_seen(injector, *indices)
        for node in nodes:
            node.kill()

    async def end() -> None:
        await asyncio.gather(*(node.start() for node in nodes if not node.is_running))

    return FaultInjection(
        f"{names(indices)} (aof {aof})",
        random.uniform(0.0, 1.5) * TTL_S,
        begin=begin,
        end=end,
        # Without a file it comes back empty, and a server that starts meanwhile has never seen it.
        locks={*map(lock_of_node, indices), *(locks_of_servers(injector) if aof == "off" else ())},
        # A node that syncs every write proves that it has forgotten nothing.
        forgets=() if durable else indices,
    )


PROCESS_FAULTS: Mapping[str, Callable[[FaultInjector, Random], FaultInjection]] = {
    "holder paused": holder_paused,
    "holder killed": holder_killed,
    "server paused": partial(
        _server_fault, lambda _, server: server.pause(), ServerProcess.resume, (0.3, 2.0)
    ),
    "server killed": partial(_server_fault, lambda _, server: server.kill(), ServerProcess.start, (0.0, 1.5)),
    "server drained": partial(_server_fault, _drain, ServerProcess.start, (0.0, 0.5)),
    "storage paused": partial(_storage_fault, Service.pause, Service.resume, (0.2, 4.0)),
    "storage killed": partial(_storage_fault, Service.kill, _start_storage, (0.0, 1.0)),
    "node paused": node_paused,
    "node killed": node_killed,
}
