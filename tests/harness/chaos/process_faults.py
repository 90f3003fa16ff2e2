"""Faults of processes: holders, servers, nodes and the storage that stand still or die."""

from __future__ import annotations

import asyncio
from random import Random

from harness.chaos import client
from harness.chaos.cluster import TTL_MS_MAX
from harness.chaos.strike import (
    STORAGE,
    Stage,
    Strike,
    client_of,
    every_server,
    node_of,
    server_of,
    until_seen,
)

_TTL_S = TTL_MS_MAX / 1000
# Mostly those whose late write the storage must refuse.
_PAUSED = ("append", "append", "sdk", *client.WORKLOADS)


def holder_paused(stage: Stage, random: Random) -> Strike:
    """Draw: a client is stopped in mid-thought for longer than its lease lasts."""
    place = stage.crowd.random_place(random, [random.choice(_PAUSED)])

    async def heal() -> None:
        stage.crowd.resume(place)

    return Strike(
        "holder paused",
        stage.crowd.name_of(place),
        random.uniform(1.5, 3.0) * _TTL_S,
        begin=lambda: stage.crowd.stop_in_thought(place),
        heal=heal,
        takes={client_of(place)},
    )


def holder_killed(stage: Stage, random: Random) -> Strike:
    """Draw: a client is killed in mid-thought, and a new one comes in its place."""
    place = stage.crowd.random_place(random, [random.choice(_PAUSED)])

    async def begin() -> None:
        await stage.crowd.stop_in_thought(place)
        stage.crowd.kill(place)

    return Strike(
        "holder killed",
        stage.crowd.name_of(place),
        random.uniform(0.0, 1.0),
        begin=begin,
        heal=lambda: stage.crowd.follow(place),
        takes={client_of(place)},
    )


def server_paused(stage: Stage, random: Random) -> Strike:
    """Draw: a server stands still, shorter or longer than a lease lasts."""
    place = random.randrange(len(stage.cluster.servers))
    server = stage.cluster.servers[place]

    async def begin() -> None:
        server.pause()

    async def heal() -> None:
        server.resume()

    return Strike(
        "server paused",
        server_of(place),
        random.uniform(0.3, 2.0) * _TTL_S,
        begin=begin,
        heal=heal,
        takes={server_of(place)},
    )


def server_killed(stage: Stage, random: Random) -> Strike:
    """Draw: a server is killed, and started again a little later."""
    place = random.randrange(len(stage.cluster.servers))
    server = stage.cluster.servers[place]

    async def begin() -> None:
        server.kill()

    async def heal() -> None:
        server.start()

    return Strike(
        "server killed",
        server_of(place),
        random.uniform(0.0, 1.5) * _TTL_S,
        begin=begin,
        heal=heal,
        takes={server_of(place)},
    )


def server_drained(stage: Stage, random: Random) -> Strike:
    """Draw: a server is told to end in good order (SIGTERM), and started again a little later."""
    place = random.randrange(len(stage.cluster.servers))
    server = stage.cluster.servers[place]

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
            stage.broken.append(f"{server_of(place)} was told to end and did with {status}")

    async def heal() -> None:
        server.start()

    return Strike(
        "server drained",
        server_of(place),
        random.uniform(0.0, 0.5) * _TTL_S,
        begin=begin,
        heal=heal,
        takes={server_of(place)},
    )


def storage_paused(stage: Stage, random: Random) -> Strike:
    """Draw: the storage stands still, for longer than its callers wait or not."""
    storage = stage.cluster.storage

    async def begin() -> None:
        storage.pause()

    async def heal() -> None:
        storage.resume()

    return Strike(
        "storage paused", STORAGE, random.uniform(0.2, 4.0), begin=begin, heal=heal, takes={STORAGE}
    )


def storage_killed(stage: Stage, random: Random) -> Strike:
    """Draw: the storage is killed, and started again with its database a little later."""
    storage = stage.cluster.storage

    async def begin() -> None:
        storage.kill()

    async def heal() -> None:
        storage.start()
        await storage.until_serving()

    return Strike(
        "storage killed", STORAGE, random.uniform(0.0, 1.0), begin=begin, heal=heal, takes={STORAGE}
    )


def node_paused(stage: Stage, random: Random) -> Strike:
    """Draw: one node, or now and then more than a minority, stands still."""
    count = stage.cluster.minority + 1 if random.random() < 0.2 else 1
    places = random.sample(range(len(stage.cluster.nodes)), count)

    async def begin() -> None:
        for place in places:
            stage.cluster.nodes[place].pause()

    async def heal() -> None:
        for place in places:
            stage.cluster.nodes[place].resume()

    return Strike(
        "node paused",
        ", ".join(map(node_of, places)),
        random.uniform(0.1, 1.5) * _TTL_S,
        begin=begin,
        heal=heal,
        takes=set(map(node_of, places)),
    )


def node_killed(stage: Stage, random: Random) -> Strike:
    """Draw: one node is killed and restarted with what it has on disk; with durable nodes now and then more than a minority."""
    aof = stage.cluster.plan.aof
    durable = aof == "always"
    count = stage.cluster.minority + 1 if durable and random.random() < 0.2 else 1
    places = random.sample(range(len(stage.cluster.nodes)), count)
    nodes = [stage.cluster.nodes[place] for place in places]

    async def begin() -> None:
        if aof == "off":
            await until_seen(stage, *places)
        for node in nodes:
            node.kill()

    async def heal() -> None:
        await asyncio.gather(*(node.start() for node in nodes if not node.is_running))

    return Strike(
        "node killed",
        f"{', '.join(map(node_of, places))} (aof {aof})",
        random.uniform(0.0, 1.5) * _TTL_S,
        begin=begin,
        heal=heal,
        # Without its file it comes back as one that was wiped does.
        takes={*map(node_of, places), *(every_server(stage) if aof == "off" else ())},
        # One that syncs every write proves that it has forgotten nothing.
        forgets=() if durable else places,
    )
