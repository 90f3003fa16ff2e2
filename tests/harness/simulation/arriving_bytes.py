"""How a transport hands a protocol what has arrived, for the transports of tests."""

from __future__ import annotations

import asyncio


def deliver(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    """Put bytes into the protocol's buffer and tell it, in as many pieces as that takes."""
    while data:
        buffer = memoryview(protocol.get_buffer(len(data)))
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        protocol.buffer_updated(size)
        data = data[size:]
