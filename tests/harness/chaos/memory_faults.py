"""Faults of what nodes remember: wiped, cut at the end of the log, on a full disk, changed settings, and a majority that has forgotten everything."""

from __future__ import annotations

import asyncio
from random import Random

from harness.chaos.fault_injection import (
    STORAGE,
    FaultInjection,
    FaultInjector,
    every_server,
    network_of,
    node_of,
    until_seen,
)
from harness.chaos.recorder import now_s
from harness.history.records import MAJORITY_WIPED, Fault
from harness.processes.node_data import repair_log
from harness.processes.redis_nodes import RedisNode

_CUT_BYTES_MAX = 4_000
# By so many bytes a node has too much memory in use; a few keys have 1,000 and all of them much less than the last.
_TOO_MUCH_BYTES = (0, 1_000, 10_000, 1_000_000_000)


def node_wiped(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a node loses all its data, with a new process or by a command in the running one."""
    place = random.randrange(len(injector.cluster.nodes))
    node = injector.cluster.nodes[place]
    by_command = random.random() < 0.3

    async def begin() -> None:
        await until_seen(injector, place)
        if by_command:
            await node.call("FLUSHALL")
        else:
            node.kill()
            node.wipe()

    async def heal() -> None:
        if not node.is_running:
            await node.start()

    return FaultInjection(
        "node wiped",
        f"{node_of(place)} by {'FLUSHALL' if by_command else 'a new disk'}",
        random.uniform(0.0, 2.0),
        begin=begin,
        heal=heal,
        # One that starts meanwhile would not have seen this place.
        takes={node_of(place), *every_server(injector)},
        forgets=[place],
    )


def log_cut(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a node is killed, loses the end of its log, and is started after the log was repaired."""
    place = random.randrange(len(injector.cluster.nodes))
    node = injector.cluster.nodes[place]
    byte_count = random.randrange(1, _CUT_BYTES_MAX)

    async def begin() -> None:
        # That a durable node has lost its last half second is noticed only by a server that was there.
        await until_seen(injector, place)
        node.kill()
        node.cut_aof(byte_count)

    async def heal() -> None:
        if not node.is_running:
            await asyncio.to_thread(repair_log, node)
            await node.start()

    return FaultInjection(
        "log cut",
        f"{node_of(place)}, {byte_count} bytes",
        random.uniform(0.0, 2.0),
        begin=begin,
        heal=heal,
        takes={node_of(place), *every_server(injector)},
        forgets=[place],
    )


def disk_full(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: the disk of the first node is full, which ends a node that syncs every write; its log is repaired then."""
    node, disk = injector.cluster.nodes[0], injector.cluster.disks[0]

    async def begin() -> None:
        await asyncio.to_thread(disk.fill)

    async def heal() -> None:
        disk.clear()
        if not node.is_running:
            await asyncio.to_thread(repair_log, node)
            await node.start()

    return FaultInjection(
        "disk full",
        node_of(0),
        random.uniform(1.0, 4.0),
        begin=begin,
        heal=heal,
        takes={node_of(0)},
        forgets=() if injector.cluster.plan.aof == "always" else [0],
    )


def settings_changed(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a node that runs gets settings by which it forgets: at once, or at its next crash. It is mended while it runs or by that crash.

    Where it evicts keys, some server has no more than a quorum with it, and so needs each of its holds.
    """
    cluster = injector.cluster
    everybody = range(len(cluster.nodes))
    place, server = random.randrange(len(everybody)), random.choice(cluster.servers)
    node, aof = cluster.nodes[place], cluster.plan.aof
    ways = {"off": ["evicts"], "always": ["evicts", "appendonly no", "appendfsync everysec"]}
    way = random.choice(ways.get(aof, ["evicts", "appendonly no"]))
    too_much, crashes = random.choice(_TOO_MUCH_BYTES), random.random() < 0.5
    others = random.sample([each for each in everybody if each != place], cluster.minority)
    cut = others if way == "evicts" else []

    async def begin() -> None:
        await until_seen(injector, place)
        for each in cut:
            server.proxies[each].hold()
        if way == "evicts":
            await _set(node, "maxmemory-policy", "allkeys-lru")
            await _set(node, "maxmemory", max(1, await _used_bytes(node) - too_much))
        else:
            await _set(node, *way.split())

    async def heal() -> None:
        for each in cut:
            await server.proxies[each].heal()
        if crashes:
            # Its file has the settings of before.
            node.kill()
            await node.start()
        else:
            await _set(node, "maxmemory", 0)
            await _set(node, "maxmemory-policy", "noeviction")
            if aof != "off":
                await _set(node, "appendonly", "yes")
                await _set(node, "appendfsync", aof)
        if not await node.call("EXISTS", "redfence:node"):
            # A node that has lost its identity alone is for an operator to empty.
            await node.call("FLUSHALL")

    how = f"{way} ({too_much} bytes)" if way == "evicts" else way
    return FaultInjection(
        "settings changed",
        f"{node_of(place)}: {how}, mended {'by a crash' if crashes else 'while it runs'}",
        random.uniform(0.3, 4.0),
        begin=begin,
        heal=heal,
        takes={node_of(place), *map(network_of, cut), *every_server(injector)},
        forgets=[place],
    )


async def _set(node: RedisNode, name: str, value: str | int) -> None:
    assert await node.call("CONFIG", "SET", name, value) == b"OK"


async def _used_bytes(node: RedisNode) -> int:
    told = await node.call("INFO", "memory")
    assert isinstance(told, bytes)
    return int(told.partition(b"used_memory:")[2].split()[0])


def majority_wiped(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: more than a minority lose all data at once; nothing may be granted until an operator recovers the cluster.

    It is recorded from the last wipe to the start of the recovery.
    """
    cluster = injector.cluster
    everybody = range(len(cluster.nodes))
    places = random.sample(everybody, cluster.minority + 1)
    nodes = [cluster.nodes[place] for place in places]
    wiped_s: list[float] = []

    async def begin() -> None:
        for node in nodes:
            node.kill()
            node.wipe()
        wiped_s.append(now_s())
        await asyncio.gather(*(node.start() for node in nodes))

    async def heal() -> None:
        for node in nodes:
            if not node.is_running:
                await node.start()
        if wiped_s:
            injector.note(Fault(MAJORITY_WIPED, ", ".join(map(node_of, places)), wiped_s[0], now_s()))
        await cluster.recover()
        injector.broken += await cluster.set_right()

    return FaultInjection(
        MAJORITY_WIPED,
        ", ".join(map(node_of, places)),
        random.uniform(1.0, 5.0),
        begin=begin,
        heal=heal,
        takes={
            *map(node_of, everybody),
            *map(network_of, everybody),
            *every_server(injector),
            # To set everything right concerns it as well.
            STORAGE,
        },
        forgets=(),
        tells=False,
    )
