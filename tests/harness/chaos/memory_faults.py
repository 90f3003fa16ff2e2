"""Faults of what nodes remember: wiped nodes, a cut log, a full disk, changed settings, a wiped majority."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random

from harness.chaos.fault_injection import (
    FaultInjection,
    FaultInjector,
    lock_of_network,
    lock_of_node,
    locks_of_everything,
    locks_of_servers,
    names,
    some_node,
    wait_until_seen,
    wait_until_seen_by_all,
)
from harness.chaos.recorder import now_s
from harness.history.records import MAJORITY_WIPED, Fault
from harness.processes.node_data import repair_log
from harness.processes.redis_nodes import RedisNode

LOG_CUT = "log cut"
DISK_FULL = "disk full"
_CUT_BYTES_MAX = 4_000
# A node may use this much memory more than its limit. The last value leaves room for no key at all.
_TOO_MUCH_BYTES = (0, 1_000, 10_000, 1_000_000_000)


async def _start_if_ended(*nodes: RedisNode) -> None:
    for node in nodes:
        if not node.is_running:
            await node.start()


async def _repair_and_start(node: RedisNode) -> None:
    if not node.is_running:
        await asyncio.to_thread(repair_log, node)
        await node.start()


def node_wiped(injector: FaultInjector, random: Random) -> FaultInjection:
    """Delete all data of a node, with its process or by a command in the running process."""
    index = some_node(injector, random)
    node = injector.cluster.nodes[index]
    by_command = random.random() < 0.3

    async def begin() -> None:
        await wait_until_seen(injector, index)
        if by_command:
            await node.call("FLUSHALL")
        else:
            node.kill()
            node.wipe()

    return FaultInjection(
        f"{lock_of_node(index)} by {'FLUSHALL' if by_command else 'a new disk'}",
        random.uniform(0.0, 2.0),
        begin=begin,
        end=lambda: _start_if_ended(node),
        # A server that starts meanwhile has never seen this node.
        locks={lock_of_node(index), *locks_of_servers(injector)},
        forgets=[index],
    )


def log_cut(injector: FaultInjector, random: Random) -> FaultInjection:
    """Kill a node, cut the end of its log, and start it after a repair of the log."""
    index = some_node(injector, random)
    node = injector.cluster.nodes[index]
    byte_count = random.randrange(1, _CUT_BYTES_MAX)

    async def begin() -> None:
        # Only a server that ran before notices that a durable node has lost its last half second.
        await wait_until_seen(injector, index)
        node.kill()
        node.cut_aof(byte_count)

    return FaultInjection(
        f"{lock_of_node(index)}, {byte_count} bytes",
        random.uniform(0.0, 2.0),
        begin=begin,
        end=lambda: _repair_and_start(node),
        locks={lock_of_node(index), *locks_of_servers(injector)},
        forgets=[index],
    )


def disk_full(injector: FaultInjector, random: Random) -> FaultInjection:
    """Fill the disk of the first node, and restart the node with a repaired log."""
    node, disk = injector.cluster.nodes[0], injector.cluster.disks[0]
    syncs_every_write = injector.cluster.plan.aof == "always"

    async def end() -> None:
        disk.clear()
        # A node that syncs every write has ended. Another one runs on, and Redis 7.0.15 then leaves a log
        # that it cannot read again, if the log was switched off and on before.
        if not syncs_every_write:
            node.kill()
        await _repair_and_start(node)

    return FaultInjection(
        lock_of_node(0),
        random.uniform(1.0, 4.0),
        begin=lambda: asyncio.to_thread(disk.fill),
        end=end,
        locks={lock_of_node(0)},
        forgets=() if syncs_every_write else [0],
    )


def settings_changed(injector: FaultInjector, random: Random) -> FaultInjection:
    """Give a running node settings by which it forgets, now or at its next crash; then restore them.

    If the node evicts keys, one server reaches no more than a quorum with it, and so needs its holds.
    """
    cluster = injector.cluster
    indices = range(len(cluster.nodes))
    index, server = random.randrange(len(indices)), random.choice(cluster.servers)
    node, aof = cluster.nodes[index], cluster.plan.aof
    ways = {"off": ["evicts"], "always": ["evicts", "appendonly no", "appendfsync everysec"]}
    way = random.choice(ways.get(aof, ["evicts", "appendonly no"]))
    too_much, crashes = random.choice(_TOO_MUCH_BYTES), random.random() < 0.5
    others = random.sample([each for each in indices if each != index], cluster.minority)
    cut = others if way == "evicts" else []

    async def begin() -> None:
        # A server that starts refuses a node with such settings, and ends.
        await wait_until_seen_by_all(injector, index)
        for each in cut:
            server.proxies[each].hold()
        if way == "evicts":
            await _set(node, "maxmemory-policy", "allkeys-lru")
            await _set(node, "maxmemory", max(1, await _used_bytes(node) - too_much))
        else:
            await _set(node, *way.split())

    async def end() -> None:
        for each in cut:
            await server.proxies[each].heal()
        if crashes:
            # The file of the node has the earlier settings.
            node.kill()
            await node.start()
        else:
            await _set(node, "maxmemory", 0)
            await _set(node, "maxmemory-policy", "noeviction")
            if aof != "off":
                await _set(node, "appendonly", "yes")
                await _set(node, "appendfsync", aof)
        if not await node.call("EXISTS", "redfence:node"):
            # An operator must empty a node that has lost only its identity.
            await node.call("FLUSHALL")

    how = f"{way} ({too_much} bytes)" if way == "evicts" else way
    return FaultInjection(
        f"{lock_of_node(index)}: {how}, mended {'by a crash' if crashes else 'while it runs'}",
        random.uniform(0.3, 4.0),
        begin=begin,
        end=end,
        locks={lock_of_node(index), *map(lock_of_network, cut), *locks_of_servers(injector)},
        forgets=[index],
    )


async def _set(node: RedisNode, name: str, value: str | int) -> None:
    assert await node.call("CONFIG", "SET", name, value) == b"OK"


async def _used_bytes(node: RedisNode) -> int:
    info = await node.call("INFO", "memory")
    assert isinstance(info, bytes)
    return int(info.partition(b"used_memory:")[2].split()[0])


def majority_wiped(injector: FaultInjector, random: Random) -> FaultInjection:
    """Wipe more than a minority at once; no server may grant until an operator recovers the cluster.

    The recorded fault lasts from the last wipe to the start of the recovery.
    """
    cluster = injector.cluster
    indices = random.sample(range(len(cluster.nodes)), cluster.minority + 1)
    nodes = [cluster.nodes[index] for index in indices]
    wiped_s: list[float] = []

    async def begin() -> None:
        for node in nodes:
            node.kill()
            node.wipe()
        wiped_s.append(now_s())
        await asyncio.gather(*(node.start() for node in nodes))

    async def end() -> None:
        await _start_if_ended(*nodes)
        if wiped_s:
            injector.record(Fault(MAJORITY_WIPED, names(indices), wiped_s[0], now_s()))
        await cluster.recover()
        injector.broken += await cluster.set_right()

    return FaultInjection(
        names(indices),
        random.uniform(1.0, 5.0),
        begin=begin,
        end=end,
        locks=locks_of_everything(injector),
        records_itself=True,
    )


MEMORY_FAULTS: Mapping[str, Callable[[FaultInjector, Random], FaultInjection]] = {
    "node wiped": node_wiped,
    LOG_CUT: log_cut,
    DISK_FULL: disk_full,
    "settings changed": settings_changed,
    MAJORITY_WIPED: majority_wiped,
}
