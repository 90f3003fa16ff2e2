"""Faults of processes: holders, servers, nodes and the storage that stand still or die."""

from __future__ import annotations

import asyncio
from random import Random

from harness.chaos import client
from harness.chaos.cluster import TTL_MS_MAX
from harness.chaos.fault_injection import (
    STORAGE,
    FaultInjection,
    FaultInjector,
    client_of,
    every_server,
    node_of,
    server_of,
    until_seen,
)

_TTL_S = TTL_MS_MAX / 1000
# Mostly those whose late write the storage must refuse.
_PAUSED = ("append", "append", "sdk", *client.WORKLOADS)


def holder_paused(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a client is stopped in mid-thought for longer than its lease lasts."""
    place = injector.client_pool.random_place(random, [random.choice(_PAUSED)])

    async def heal() -> None:
        injector.client_pool.resume(place)

    return FaultInjection(
        "holder paused",
        injector.client_pool.name_of(place),
        random.uniform(1.5, 3.0) * _TTL_S,
        begin=lambda: injector.client_pool.stop_in_thought(place),
        heal=heal,
        takes={client_of(place)},
    )


def holder_killed(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a client is killed in mid-thought, and a new one comes in its place."""
    place = injector.client_pool.random_place(random, [random.choice(_PAUSED)])

    async def begin() -> None:
        await injector.client_pool.stop_in_thought(place)
        injector.client_pool.kill(place)

    return FaultInjection(
        "holder killed",
        injector.client_pool.name_of(place),
        random.uniform(0.0, 1.0),
        begin=begin,
        heal=lambda: injector.client_pool.follow(place),
        takes={client_of(place)},
    )


def server_paused(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a server stands still, shorter or longer than a lease lasts."""
    place = random.randrange(len(injector.cluster.servers))
    server = injector.cluster.servers[place]

    async def begin() -> None:
        server.pause()

    async def heal() -> None:
        server.resume()

    return FaultInjection(
        "server paused",
        server_of(place),
        random.uniform(0.3, 2.0) * _TTL_S,
        begin=begin,
        heal=heal,
        takes={server_of(place)},
    )


def server_killed(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a server is killed, and started again a little later."""
    place = random.randrange(len(injector.cluster.servers))
    server = injector.cluster.servers[place]

    async def begin() -> None:
        server.kill()

    async def heal() -> None:
        server.start()

    return FaultInjection(
        "server killed",
        server_of(place),
        random.uniform(0.0, 1.5) * _TTL_S,
        begin=begin,
        heal=heal,
        takes={server_of(place)},
    )


def server_drained(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a server is told to end in good order (SIGTERM), and started again a little later."""
    place = random.randrange(len(injector.cluster.servers))
    server = injector.cluster.servers[place]

    async def begin() -> None:
        # One that has just been started does not know yet what SIGTERM means.
        served = server.is_serving
        status: object
        try:
            status = await server.drain()
        except AssertionError as error:
            status = str(error)
            server.kill()
        if served and status != 0:
            injector.broken.append(f"{server_of(place)} was told to end and did with {status}")

    async def heal() -> None:
        server.start()

    return FaultInjection(
        "server drained",
        server_of(place),
        random.uniform(0.0, 0.5) * _TTL_S,
        begin=begin,
        heal=heal,
        takes={server_of(place)},
    )


def storage_paused(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: the storage stands still, for longer than its callers wait or not."""
    storage = injector.cluster.storage

    async def begin() -> None:
        storage.pause()

    async def heal() -> None:
        storage.resume()

    return FaultInjection(
        "storage paused", STORAGE, random.uniform(0.2, 4.0), begin=begin, heal=heal, takes={STORAGE}
    )


def storage_killed(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: the storage is killed, and started again with its database a little later."""
    storage = injector.cluster.storage

    async def begin() -> None:
        storage.kill()

    async def heal() -> None:
        storage.start()
        await storage.until_serving()

    return FaultInjection(
        "storage killed", STORAGE, random.uniform(0.0, 1.0), begin=begin, heal=heal, takes={STORAGE}
    )


def node_paused(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: one node, or now and then more than a minority, stands still."""
    count = injector.cluster.minority + 1 if random.random() < 0.2 else 1
    places = random.sample(range(len(injector.cluster.nodes)), count)

    async def begin() -> None:
        for place in places:
            injector.cluster.nodes[place].pause()

    async def heal() -> None:
        for place in places:
            injector.cluster.nodes[place].resume()

    return FaultInjection(
        "node paused",
        ", ".join(map(node_of, places)),
        random.uniform(0.1, 1.5) * _TTL_S,
        begin=begin,
        heal=heal,
        takes=set(map(node_of, places)),
    )


def node_killed(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: one node is killed and restarted with what it has on disk; with durable nodes now and then more than a minority."""
    aof = injector.cluster.plan.aof
    durable = aof == "always"
    count = injector.cluster.minority + 1 if durable and random.random() < 0.2 else 1
    places = random.sample(range(len(injector.cluster.nodes)), count)
    nodes = [injector.cluster.nodes[place] for place in places]

    async def begin() -> None:
        if aof == "off":
            await until_seen(injector, *places)
        for node in nodes:
            node.kill()

    async def heal() -> None:
        await asyncio.gather(*(node.start() for node in nodes if not node.is_running))

    return FaultInjection(
        "node killed",
        f"{', '.join(map(node_of, places))} (aof {aof})",
        random.uniform(0.0, 1.5) * _TTL_S,
        begin=begin,
        heal=heal,
        # Without its file it comes back as one that was wiped does.
        takes={*map(node_of, places), *(every_server(injector) if aof == "off" else ())},
        # One that syncs every write proves that it has forgotten nothing.
        forgets=() if durable else places,
    )
