"""Real TLS in front of a node, as an operator's proxy, with a certificate made for the test."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from harness.processes.ports import HOST

_CHUNK_BYTES = 64 * 1024


class NoOpensslError(Exception):
    """This machine has no `openssl`, which makes certificates."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files of a certificate for this machine, which is its own authority."""

    certificate: Path
    key: Path


def make_certificate(folder: Path) -> Certificate:
    """Make one in a folder.

    Raises:
        NoOpensslError: there is nothing to make it with.
    """
    program = shutil.which("openssl")
    if program is None:
        raise NoOpensslError("no openssl on PATH")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    name = ("-subj", "/CN=a test of redfence", "-addext", f"subjectAltName=IP:{HOST}")
    subprocess.run(
        [program, "req", "-x509", *curve, "-days", "1", *name, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return Certificate(certificate, key)


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
        yield f"rediss://{login}@{HOST}:{port}?ssl_ca_certs={certificate.certificate}"
    finally:
        server.close()
        await server.wait_closed()
