"""The log of a server whose callers vanish or send garbage, line by line as a program reads it."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import redfence
from harness.processes.certificates import Authority, Certificate
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.ports import HOST
from harness.processes.servers import FormedNodes
from harness.processes.tcp_proxy import TcpProxy
from harness.time.eventually import eventually
from redfence_server.http2.settings import Transport

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("transport", list(Transport))]

# It has a call and a stream of each kind open. Then it sends commands, and reads none of the answers, so that
# the system resets its connection when it is killed.
CLIENT = """
import asyncio, sys
import grpc
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc

def acquire(name, lease_id, wait_s=0):
    request = lock_pb2.AcquireRequest(resource=name, lease_id=f"{lease_id:032x}")
    request.ttl.seconds, request.wait_timeout.seconds = 30, wait_s
    return request

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        locks, admin = lock_pb2_grpc.LockServiceStub(channel), lock_pb2_grpc.AdminServiceStub(channel)
        await locks.Acquire(acquire("held", 1))
        calls = [locks.Acquire(acquire("held", number, 60)) for number in (2, 3)]
        watch = admin.WatchLocks(lock_pb2.WatchLocksRequest())
        await watch.read()
        renewals = locks.KeepAlive()
        await renewals.write(lock_pb2.KeepAliveRequest(resource="held", lease_id=f"{1:032x}", sequence=1))
        await renewals.read()
        session = locks.Session()
        await session.write(lock_pb2.SessionRequest(commands=[{"id": 1, "acquire": acquire("held", 4, 60)}]))
        while (await locks.GetLock(lock_pb2.GetLockRequest(resource="held"))).waiters < 3:
            pass
        print("open", flush=True)
        for first in range(10, 10_000, 100):
            numbers = range(first, first + 100)
            commands = [{"id": each, "acquire": acquire(f"name/{each}", each)} for each in numbers]
            await session.write(lock_pb2.SessionRequest(commands=commands))
        await asyncio.sleep(60)

asyncio.run(main())
"""


def events(server: CommandProcess) -> list[dict[str, Any]]:
    """Return the events of the log; every whole line of it is one."""
    lines = server.stderr.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("how", ["killed", "reset"])
async def test_a_caller_that_vanishes_is_no_warning(
    commands: CommandProcesses, formed_nodes: FormedNodes, transport: Transport, how: str
) -> None:
    flags = ("--transport", transport, "--log-level", "debug")
    server, address = await commands.start_serve(await formed_nodes(3), *flags)
    async with TcpProxy(int(address.rpartition(":")[2])) as proxy:
        target = f"{HOST}:{proxy.port}" if how == "reset" else address
        client = commands.start(sys.executable, "-c", CLIENT, target)
        await client.wait_for_line("open")
        if how == "reset":
            proxy.reset()
        client.kill()

        def ended() -> Counter[str]:
            found = [each for each in events(server) if each["event"] in {"request", "stream_ended"}]
            return Counter(each["method"] for each in found)

        # The first acquire was granted, and the others were waiting.
        await eventually(lambda: ended() >= Counter(["Acquire"] * 3 + ["KeepAlive", "Session", "WatchLocks"]))
    assert await server.stop() == 0
    assert [each for each in events(server) if each["level"] not in {"debug", "info"}] == []
    assert "Traceback" not in server.stderr


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=HOST).do_handshake()
    return outgoing.read()


GARBAGE = (
    *(b"\0" * 100, b"\xff" * 300, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    *(client_hello(), client_hello()[:40], b"\x16\x03\x01\x00\x05hello"),
    *(PREFACE[:10], PREFACE + b"\xff" * 200, PREFACE + SETTINGS + b"\x7f\xff\xff\0\0\0\0\0\1"),
    # A header block that HPACK does not know, and a ping of one byte.
    *(PREFACE + SETTINGS + b"\0\0\5\1\5\0\0\0\1" + b"\xff" * 5, PREFACE + SETTINGS + b"\0\0\1\6\0\0\0\0\0x"),
)


async def send_and_vanish(port: int, data: bytes, *, tls: ssl.SSLContext | None = None) -> None:
    """Send bytes, wait a moment for the server's reaction, and reset the connection."""
    with suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(HOST, port, ssl=tls)
        try:
            writer.write(data)
            async with asyncio.timeout(0.2):
                await reader.read()
        finally:
            writer.transport.abort()


def contexts(own: Certificate, stranger: Certificate) -> Iterator[ssl.SSLContext]:
    """Yield clients whose handshakes fail: each lacks something that the server or the client asks for."""
    for authority, shown, protocols in (
        (stranger.authority, own, ["h2"]),
        (own.authority, None, ["h2"]),
        (own.authority, stranger, ["h2"]),
        (own.authority, own, []),
        (own.authority, own, ["http/1.1"]),
    ):
        context = ssl.create_default_context(cafile=authority)
        if shown is not None:
            context.load_cert_chain(shown.certificate, shown.key)
        if protocols:
            context.set_alpn_protocols(protocols)
        yield context


async def test_garbage_and_failed_handshakes_leave_no_line_that_is_no_event(
    commands: CommandProcesses,
    formed_nodes: FormedNodes,
    certificate: Certificate,
    other_authority: Authority,
    transport: Transport,
) -> None:
    """The core of gRPC writes lines of its own, unless it is told not to."""
    nodes = await formed_nodes(3)
    files = {"cert": certificate.certificate, "key": certificate.key, "client-ca": certificate.authority}
    own = redfence.Tls(ca=certificate.authority, cert=certificate.certificate, key=certificate.key)
    for tls, processes in ((None, "1"), (own, "1"), (own, "2")):
        flags = [word for name, file in files.items() for word in (f"--tls-{name}", str(file)) if tls]
        flags += ["--transport", transport, "--processes", processes]
        server, address = await commands.start_serve(nodes, *flags)
        port = int(address.rpartition(":")[2])
        await asyncio.gather(*(send_and_vanish(port, each) for each in GARBAGE))
        for context in contexts(certificate, other_authority.issue(HOST)):
            await send_and_vanish(port, PREFACE + SETTINGS, tls=context)
        async with redfence.AsyncClient(address, tls=tls) as client:
            assert (await client.cluster_status()).ready
        assert await server.stop() == 0
        assert [each for each in events(server) if each["level"] not in {"debug", "info"}] == []
        assert server.stderr.endswith("\n")
