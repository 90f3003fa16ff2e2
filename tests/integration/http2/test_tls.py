"""TLS of the fast transport: a connection counts and costs from its first byte, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import pytest

from harness.processes.certificates import Authority, Certificate, protection
from harness.processes.ports import HOST
from harness.time.eventually import eventually
from redfence_server.api.serving import LIMITS
from redfence_server.http2.connection import Connection
from redfence_server.http2.server import Server
from redfence_server.sharing.budget import Budget
from redfence_server.sharing.shares import ConnectionShares

PLACES = 8
OTHER_HOST = "127.0.0.2"


@asynccontextmanager
async def serving(
    certificate: Certificate, authority: Authority, *, handshake_s: float = 10.0
) -> AsyncIterator[tuple[int, Budget]]:
    """Serve nothing to clients with a certificate of the authority; give the port and the places."""
    shares = ConnectionShares.of(PLACES)
    settings = replace(LIMITS, liveness=replace(LIMITS.liveness, handshake_s=handshake_s))
    server = Server(settings, adapt=lambda _, handler: handler, shares=shares)
    found = protection(f"{HOST}:0", certificate, client_ca=authority.file)
    assert found is not None
    port = server.add_secure_port(f"{HOST}:0", found.for_fast())
    await server.start()
    try:
        yield port, shares.places
    finally:
        await server.stop(0)


async def _ended(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(1024):
            pass


async def connect(port: int, context: ssl.SSLContext) -> None:
    """Open a connection, and end it after the server's first bytes or the server's end."""
    with suppress(ConnectionError, ssl.SSLError):
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
        await reader.read(1)
        writer.transport.abort()


async def send(port: int, first: bytes, *, leave: bool = False) -> None:
    """Send bytes that are no whole handshake; then leave, or wait until the server ends the connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(first)
    if leave:
        await writer.drain()
        writer.transport.abort()
    await _ended(reader)
    writer.transport.abort()


@pytest.mark.parametrize("end", ["served", "refused", "no TLS", "left", "silent"])
async def test_an_ended_connection_leaves_memory_without_the_garbage_collector(
    certificate: Certificate, authority: Authority, other_authority: Authority, end: str
) -> None:
    """The collector runs rarely, and a connection has 100 KB."""
    context = authority.client_context()
    issuer = other_authority if end == "refused" else authority
    caller = issuer.issue("caller.example")
    context.load_cert_chain(caller.certificate, caller.key)
    gc.collect()
    gc.disable()
    try:
        async with serving(certificate, authority, handshake_s=0.2 if end == "silent" else 10.0) as site:
            port, places = site
            for _ in range(3):
                match end:
                    case "served" | "refused":
                        await connect(port, context)
                    case "no TLS":
                        await send(port, b"GET / HTTP/1.1\r\n\r\n")
                    case "left":
                        await send(port, b"\x16\x03\x01", leave=True)
                    case "silent":
                        await send(port, b"")
            await eventually(lambda: not places.taken)
            await eventually(lambda: not _kept())
    finally:
        gc.enable()
        gc.collect()


def _kept() -> list[object]:
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, Connection) or (isinstance(each, ssl.SSLObject) and each.server_side)
    ]


async def test_a_peer_gets_its_part_of_the_connections_before_any_handshake(
    certificate: Certificate, authority: Authority
) -> None:
    """A handshake may take 10 s, so silent connections could otherwise take every file of the server."""
    async with serving(certificate, authority) as (port, places), AsyncExitStack() as ends:
        readers = []
        for _ in range(PLACES):
            reader, writer = await asyncio.open_connection(HOST, port, local_addr=(OTHER_HOST, 0))
            ends.callback(writer.close)
            readers.append(reader)
        await eventually(lambda: places.taken + places.refusals == PLACES)
        assert places.taken == PLACES // 2
        await eventually(lambda: sum(reader.at_eof() for reader in readers) == places.refusals)
        context = authority.client_context()
        caller = authority.issue("caller.example")
        context.load_cert_chain(caller.certificate, caller.key)
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
        ends.callback(writer.close)
        assert await reader.read(1)
        await ends.aclose()
        await eventually(lambda: not places.taken)
