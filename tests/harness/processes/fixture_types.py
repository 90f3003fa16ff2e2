"""What the fixtures of `tests/conftest.py` hand to a test, for annotations."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from harness.processes.redis_nodes import RedisNode
from harness.processes.tcp_proxy import TcpProxy
from redfence_server.embedded.binary import RedisBinary
from redfence_server.embedded.process import AppendFsync


class FlushedNodes(Protocol):
    """Lends running, empty nodes."""

    async def __call__(self, count: int, *, binary: RedisBinary | None = None) -> list[RedisNode]: ...


class FreshNodes(Protocol):
    """Starts nodes for this test alone."""

    async def __call__(
        self, count: int, *, binary: RedisBinary | None = None, appendfsync: AppendFsync = "always"
    ) -> list[RedisNode]: ...


class StartProxy(Protocol):
    """Puts a proxy before a node."""

    def __call__(self, node: RedisNode) -> Awaitable[TcpProxy]: ...
