"""One node answers at the address of another, or becomes its replica."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import until
from harness.processes.tcp_proxy import TcpProxy

_IN_STEP = (
    b"master_link_status:up",
    b"aof_rewrite_in_progress:0",
    b"aof_rewrite_scheduled:0",
    b"aof_last_bgrewrite_status:ok",
)


async def lead_to(node: RedisNode, proxies: Sequence[TcpProxy], *, instead_of: RedisNode) -> None:
    """Let one node answer at another's address and take its password. The other lives on."""
    await node.call("ACL", "SETUSER", "default", f">{urlsplit(instead_of.url).password}")
    for proxy in proxies:
        proxy.forward_to(node.port)


async def follow(replica: RedisNode, primary: RedisNode) -> None:
    """Make one node a replica of another; return when it has all the data, also on its disk."""
    await replica.follow(primary)

    async def in_step() -> bool:
        info = await replica.call("INFO")
        assert isinstance(info, bytes)
        return all(b"\r\n" + each + b"\r\n" in info for each in _IN_STEP)

    await until(in_step, timeout_s=15)
