"""Measures the memory that each lock, waiter, Session and connection takes, for docs/maintenance.md.

Each figure has a cluster of its own. The program opens a tenth first, which makes the server allocate what
does not depend on the number. It then opens the rest, and divides the growth by their number. The memory of
a server is what the system counts as resident; that of a node is its `used_memory`.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import trustme

from bench import cluster, raw_session
from bench.idle_counters import memories
from bench.processes import memory_bytes
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc

# Calls and Sessions on one connection.
SHARED_BY = 100
TTL_S = 300
_BATCH = 250
_SETTLE_S = 3.0
_TRANSPORTS = ("grpcio", "fast")
# The preface of HTTP/2, empty settings, and the acknowledgement of the server's settings.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\4\1\0\0\0\0"


class _Client:
    """Opens what is counted, and keeps it open until the stack is closed.

    Attributes:
        waiting: the acquires that wait.
    """

    def __init__(self, address: str, stack: AsyncExitStack, tls: ssl.SSLContext) -> None:
        self._address = address
        self._stack = stack
        self._tls = tls
        self._last = 0
        self.waiting: list[asyncio.Future[Any]] = []
        self._stubs: list[lock_pb2_grpc.LockServiceAsyncStub] = []

    def _next(self) -> tuple[str, str]:
        """Return another resource, with a name of 20 bytes, and a lease id."""
        self._last += 1
        return f"capacity/{self._last:011}", f"{self._last:032x}"

    async def _stub(self) -> lock_pb2_grpc.LockServiceAsyncStub:
        """Return a stub on a new connection."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(self._address, options=options)
        self._stubs.append(lock_pb2_grpc.LockServiceStub(await self._stack.enter_async_context(channel)))
        return self._stubs[-1]

    async def hold(self, count: int) -> list[tuple[str, str]]:
        """Hold locks, and return their resources with the lease ids."""
        session = await self._stack.enter_async_context(raw_session.raw_session(self._address))
        held = [self._next() for _ in range(count)]
        for first in range(0, count, _BATCH):
            batch = [
                raw_session.acquire(*each, ttl_s=TTL_S, wait_s=0) for each in held[first : first + _BATCH]
            ]
            for result in await asyncio.gather(*await session.send(batch)):
                assert result.acquire.HasField("lease"), result
        return held

    async def wait(self, count: int) -> None:
        """Wait on a Session, for as many held locks."""
        held = await self.hold(count)
        session = await self._stack.enter_async_context(raw_session.raw_session(self._address))
        for first in range(0, count, _BATCH):
            waits = [
                raw_session.acquire(name, self._next()[1], ttl_s=TTL_S, wait_s=TTL_S)
                for name, _ in held[first : first + _BATCH]
            ]
            self.waiting += await session.send(waits)
            await asyncio.sleep(0.1)

    async def wait_in_calls(self, count: int) -> None:
        """Wait in unary calls, for as many held locks."""
        held = await self.hold(count)
        for first in range(0, count, SHARED_BY):
            stub = await self._stub()
            for name, _ in held[first : first + SHARED_BY]:
                command = raw_session.acquire(name, self._next()[1], ttl_s=TTL_S, wait_s=TTL_S)
                waiting = asyncio.ensure_future(stub.Acquire(command.acquire))
                self._stack.callback(waiting.cancel)
                self.waiting.append(waiting)
            await asyncio.sleep(0.1)

    async def open_sessions(self, count: int) -> None:
        """Open Sessions that have had one answer."""
        for number in range(count):
            stub = self._stubs[-1] if number % SHARED_BY else await self._stub()
            stream = stub.Session()
            self._stack.callback(stream.cancel)
            probe = lock_pb2.SessionCommand(id=1, cancel=lock_pb2.CancelCommand(id=1))
            await stream.write(lock_pb2.SessionRequest(commands=[probe]))
            assert await stream.read() is not grpc.aio.EOF

    async def connect(self, count: int, *, encrypted: bool = False) -> None:
        """Open connections of HTTP/2 without a call."""
        host, _, port = self._address.rpartition(":")
        for _ in range(count):
            tls = self._tls if encrypted else None
            reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
            # It also keeps the streams, which end their connection when they are dropped.
            self._stack.callback(writer.close)
            writer.write(_GREETING)
            assert await reader.read(9), "the server ended the connection"


def _certificate(folder: Path) -> tuple[list[str], ssl.SSLContext]:
    """Return the flags of a server with a new certificate, and the settings of a client that trusts it."""
    authority, context = trustme.CA(), ssl.create_default_context()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    authority.configure_trust(context)
    context.set_alpn_protocols(["h2"])
    flags = ["--tls-cert", f"{folder}/certificate.pem", "--tls-key", f"{folder}/key.pem"]
    return flags, context


async def _measure(
    begin: Callable[[_Client, int], Awaitable[object]], count: int, tls: ssl.SSLContext, flags: list[str]
) -> tuple[float, float]:
    """Return the bytes that each of `count` takes of a server, and of a node."""

    async def memory() -> tuple[float, float]:
        await asyncio.sleep(_SETTLE_S)
        used = [each.used_bytes for each in await memories(nodes.urls)]
        return memory_bytes(server.pid), sum(used) / len(used)

    async with (
        cluster.formed_nodes(3) as nodes,
        cluster.served_process(nodes, arguments=[*flags, "--new-resources-per-second", "0"]) as server,
        AsyncExitStack() as stack,
    ):
        client = _Client(server.address, stack, tls)
        await begin(client, count // 10)
        before = await memory()
        await begin(client, count)
        after = await memory()
        assert not any(each.done() for each in client.waiting), "the server answered a waiter"
    return (after[0] - before[0]) / count, (after[1] - before[1]) / count


async def main() -> None:
    """Measure and print."""
    print("capacity  bytes for each; 3 nodes, names of 20 bytes")
    print(f"| for each | node | {' | '.join(_TRANSPORTS)} |\n|{' --- |' * (2 + len(_TRANSPORTS))}")
    with tempfile.TemporaryDirectory() as folder:
        tls_flags, tls = _certificate(Path(folder))
        for name, count, begin, flags in (
            ("held lock, with its counter", 20_000, _Client.hold, []),
            ("waiter on a Session, and its held lock", 5_000, _Client.wait, []),
            ("waiter in a unary call, and its held lock", 2_000, _Client.wait_in_calls, []),
            ("idle Session", 1_000, _Client.open_sessions, []),
            ("idle connection", 1_000, _Client.connect, []),
            ("idle connection with TLS", 1_000, partial(_Client.connect, encrypted=True), tls_flags),
        ):
            found = [await _measure(begin, count, tls, [*flags, "--transport", each]) for each in _TRANSPORTS]
            node = max(0.0, sum(each[1] for each in found) / len(found))
            print(f"| {name} | {node:,.0f} | {' | '.join(f'{each[0]:,.0f}' for each in found)} |", flush=True)
