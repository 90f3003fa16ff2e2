"""Real TLS in front of a node, as an operator's proxy."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from harness.processes.certificates import Certificate
from harness.processes.ports import HOST

_CHUNK_BYTES = 64 * 1024


@asynccontextmanager
async def tls_front(node_url: str, certificate: Certificate) -> AsyncIterator[str]:
    """Yield a URL by which the node is reached over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    node = urlsplit(node_url)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one end has gone, and the other is told by the close
        finally:
            writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(node.hostname, node.port)
        await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))

    server = await asyncio.start_server(meet, HOST, 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    login = node.netloc.rpartition("@")[0]
    try:
        yield f"rediss://{login}@{HOST}:{port}?ssl_ca_certs={certificate.authority}"
    finally:
        server.close()
        await server.wait_closed()
