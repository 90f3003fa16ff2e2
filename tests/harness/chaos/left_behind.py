"""C: what must be gone from nodes and servers once every client has ended."""

from __future__ import annotations

import asyncio

from harness.chaos.cluster import ChaosCluster
from harness.process_look import look_at_process
from harness.redis_nodes import RedisNode
from harness.servers import until
from redfence_server.scripts import Keyspace

# Every ttl is over after a few seconds; but a hold that was taken while a node's clock was half a minute ahead lasts as much longer.
GONE_S = 45.0
_KEYS = Keyspace()
# A connection that was closed is gone from the other side a moment later.
_CLOSED_S = 10.0


async def left_behind(cluster: ChaosCluster, *, gone_s: float = GONE_S) -> list[str]:
    """Return holds that do not end, keys without an end that are not a node's own, and files that a server did not have when it began.

    Args:
        cluster: set right, and with no client.
        gone_s: how long holds may last.
    """
    left = await asyncio.gather(
        *(_keys_left(node, f"node {number}", gone_s) for number, node in enumerate(cluster.nodes))
    )
    told = [each for keys in left for each in keys]
    for number, server in enumerate(cluster.servers):

        async def closed(pid: int = server.process.pid, idle: int = server.files_when_idle) -> bool:
            return look_at_process(pid).fd_count <= idle

        try:
            await until(closed, timeout_s=_CLOSED_S)
        except AssertionError:
            count = look_at_process(server.process.pid).fd_count
            told.append(
                f"server {number} has {count} files open, and had {server.files_when_idle} when it began"
            )
    return told


async def _keys_left(node: RedisNode, name: str, gone_s: float) -> list[str]:
    keys = {key: await node.call("PTTL", key) for key in await _keys(node)}
    endless = [key for key, ttl_ms in keys.items() if ttl_ms == -1 and key not in (_KEYS.node, _KEYS.high)]
    told = [f"{name} keeps {key!r}, which has no end" for key in endless]

    async def holds_are_gone() -> bool:
        return not await _holds(node)

    try:
        await until(holds_are_gone, timeout_s=gone_s)
    except AssertionError:
        told += [
            f"{name} holds {key!r}, though nobody has had a lease for {gone_s:g} s"
            for key in await _holds(node)
            if key not in endless
        ]
    return told


async def _holds(node: RedisNode) -> list[str]:
    return [key for key in await _keys(node) if key.startswith(_KEYS.lock(""))]


async def _keys(node: RedisNode) -> list[str]:
    keys = await node.call("KEYS", "*")
    assert isinstance(keys, list)
    return [key.decode() for key in keys]
