"""C: finds what a run left behind on nodes and servers after every client has ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import hiredis

from harness.chaos.cluster import TTL_MS_MAX, ChaosCluster
from harness.chaos.services import ServerProcess
from harness.processes.process_look import look_at_process
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import locks_left, until, until_no_locks
from redfence_server.redis_io.scripts import Keyspace

# Every lease has ended by then.
_GONE_S = TTL_MS_MAX / 1000 + 3.0
# A node's clock may have been half a minute ahead when it took a hold.
_CLOCK_S = 30.0
# The other side of a closed connection closes a moment later.
_CLOSED_S = 10.0
_KEYS = Keyspace()


async def left_behind(
    cluster: ChaosCluster, *, clocks_were_set: bool = False, gone_s: float = _GONE_S
) -> list[str]:
    """Return holds that do not end, keys without an expiry, and files that a server opened and never closed.

    Args:
        cluster: repaired, and without clients.
        clocks_were_set: whether a node's clock was moved.
        gone_s: how long holds may last, if no clock was moved.
    """
    gone_s += _CLOCK_S if clocks_were_set else 0.0
    told = await asyncio.gather(
        *(_keys_left(node, f"node {number}", gone_s) for number, node in enumerate(cluster.nodes)),
        *(_files_left(server, f"server {number}") for number, server in enumerate(cluster.servers)),
    )
    return [each for some in told for each in some]


async def _files_left(server: ServerProcess, name: str) -> list[str]:
    pid, idle = server.process.pid, server.files_when_idle

    async def closed() -> bool:
        return look_at_process(pid).fd_count <= idle

    try:
        await until(closed, timeout_s=_CLOSED_S)
    except AssertionError:
        return [f"{name} has {look_at_process(pid).fd_count} files open, and had {idle} when it began"]
    except FileNotFoundError as error:
        return [f"{name}: {error}"]
    return []


async def _keys_left(node: RedisNode, name: str, gone_s: float) -> list[str]:
    try:
        keys = await node.call("KEYS", "*")
        assert isinstance(keys, list)
        own = (_KEYS.node.encode(), _KEYS.high.encode())
        endless = [key for key in keys if key not in own and await node.call("PTTL", key) == -1]
        with suppress(AssertionError):
            await until_no_locks([node], timeout_s=gone_s)
        holds = await locks_left([node])
    except (OSError, hiredis.HiredisError) as error:
        return [f"{name} cannot be asked what it has kept: {error!r}"]
    return [
        *(f"{name} keeps {key.decode()!r}, which has no end" for key in endless),
        *(
            f"{name} holds {key.decode()!r}, though no client has had a lease for {gone_s:g} s"
            for key in holds
        ),
    ]
