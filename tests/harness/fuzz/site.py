"""The fuzzed processes: a lock server and a storage over three real nodes, without an event loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from harness.doubles.lua_node import Database
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.redis_nodes import NodeSet, RedisNode
from harness.processes.servers import form
from redfence_proto.v1 import lock_pb2_grpc
from redfence_server.embedded.binary import RedisBinary
from redfence_server.embedded.process import AppendFsync

NODE_COUNT = 3
_START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class FuzzSite:
    databases: tuple[Database, ...]
    server: CommandProcess
    server_address: str
    storage: CommandProcess
    storage_address: str

    @contextmanager
    def stub(self) -> Iterator[lock_pb2_grpc.LockServiceStub]:
        with grpc.insecure_channel(self.server_address) as channel:
            yield lock_pb2_grpc.LockServiceStub(channel)

    def complaints(self) -> list[str]:
        """Return the logged tracebacks, defects and errors, which no caller may cause."""
        return [
            f"{process}: {line}"
            for process, text in (("server", self.server.stderr), ("storage", self.storage.stderr))
            for line in text.splitlines()
            if is_complaint(line)
        ]


def is_complaint(line: str) -> bool:
    """Tell whether a line of a log tells of a defect or of something lost, and not of an ordinary event.

    A line that is no event is a traceback, or a library's message about something unexpected.
    """
    if not line.strip():
        return False
    try:
        event = json.loads(line)
    except ValueError:
        return True
    return not isinstance(event, dict) or event.get("level") in {"error", "critical"} or "exception" in event


@contextmanager
def fuzz_site(
    folder: Path, *, binary: RedisBinary, appendfsync: AppendFsync = "everysec"
) -> Iterator[FuzzSite]:
    """Start everything and yield it; nothing is left afterwards."""
    nodes, commands = NodeSet(folder / "nodes"), CommandProcesses(folder / "commands")
    databases: list[Database] = []
    try:
        running = asyncio.run(_formed(nodes, binary, appendfsync))
        node_flags = [flag for node in running for flag in ("--node", node.url)]
        server = commands.start_redfence("serve", *node_flags, "--listen", "127.0.0.1:0")
        storage = commands.start_redfence(
            "storage", "--db", str(folder / "storage.db"), "--listen", "127.0.0.1:0"
        )
        addresses = asyncio.run(_addresses(server, storage))
        databases += [Database(node.url) for node in running]
        yield FuzzSite(tuple(databases), server, addresses[0], storage, addresses[1])
    finally:
        for database in databases:
            database.close()
        commands.close()
        nodes.close()


async def _formed(nodes: NodeSet, binary: RedisBinary, appendfsync: AppendFsync) -> list[RedisNode]:
    running = await nodes.start(NODE_COUNT, binary=binary, appendfsync=appendfsync)
    await form(running)
    return running


async def _addresses(server: CommandProcess, storage: CommandProcess) -> tuple[str, str]:
    found: list[re.Match[str]] = [
        await server.wait_for_line(r"serving on (127\.0\.0\.1:\d+)", timeout_s=_START_TIMEOUT_S),
        await storage.wait_for_line(r"ready on (127\.0\.0\.1:\d+)", timeout_s=_START_TIMEOUT_S),
    ]
    return found[0][1], found[1][1]
