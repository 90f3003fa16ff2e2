"""Speaks as much of HTTP/2 as an attack needs, from an address of its own."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Final

import ngh2

from harness.http2.raw_client import RawClient

SOURCE: Final = "127.0.0.66"
HOST: Final = "127.0.0.1"
SERVICE: Final = "/redfence.v1.LockService/"
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
_PAUSE_S: Final = 0.001


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream_id.to_bytes(4) + payload


def text(value: bytes) -> bytes:
    """Return a string of HPACK without Huffman's code."""
    if len(value) < 127:
        return bytes((len(value),)) + value
    rest, digits = len(value) - 127, bytearray((127,))
    while rest >= 128:
        digits.append(rest % 128 | 128)
        rest //= 128
    return bytes((*digits, rest)) + value


def request_block(method: str, *more: tuple[bytes, bytes]) -> bytes:
    """Return the header block of a call."""
    pairs = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", (SERVICE + method).encode()),
        (b":authority", b"attack"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    )
    return b"".join(b"\0" + text(name) + text(value) for name, value in pairs)


class Wire:
    """A TCP connection that speaks as much of HTTP/2 as the attack needs; counts what comes back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.received = 0
        self._told = asyncio.Event()
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def open(cls, port: int, *, greets: bool = True, tls: ssl.SSLContext | None = None) -> Wire:
        """Connect, and begin HTTP/2 unless the connection is to be silent."""
        streams = await asyncio.open_connection(HOST, port, local_addr=(SOURCE, 0), ssl=tls)
        wire = cls(*streams)
        if greets:
            wire.writer.write(_PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
        return wire

    @property
    def ended(self) -> bool:
        """Whether the server has closed the connection."""
        return self._reading.done()

    async def press(self, data: bytes) -> bool:
        """Send; return whether the server still takes it."""
        if self.ended:
            return False
        self.writer.write(data)
        with suppress(ConnectionError):
            await self.writer.drain()
            await asyncio.sleep(_PAUSE_S)
        return not self.ended

    async def until_told(self) -> None:
        """Return once the server has sent something or closed the connection."""
        await self._told.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                self.received += len(data)
                self._told.set()
        self.writer.close()
        self._told.set()


class CountingClient(RawClient):
    """Counts answers instead of keeping them."""

    def __init__(self, port: int) -> None:
        super().__init__(port, source=SOURCE)
        self.body_bytes = 0
        self.endings: Counter[str] = Counter()
        self.results: dict[int, int] = {}

    def _note(self, event: ngh2.Event) -> None:
        match event:
            case ngh2.DataReceived(stream_id=stream_id, data=data):
                self.body_bytes += len(data)
                self.results[stream_id] = self.results.get(stream_id, 0) + len(data)
            case ngh2.TrailersReceived(headers=headers) | ngh2.ResponseReceived(headers=headers):
                if status := dict(headers).get(b"grpc-status"):
                    self.endings[f"status {status.decode()}"] += 1
            case ngh2.StreamReset(error_code=code):
                self.endings[f"reset {code}"] += 1


class Attack:
    """Tells an attack the port of the server, how many seconds it lasts, and secrets by name."""

    def __init__(self, port: int, seconds: float, known: dict[str, Any]) -> None:
        self.port = port
        self.seconds = seconds
        self.known = known
        self._stop_at = 0.0

    def begin(self) -> None:
        """Tell that the attack presses from now on."""
        self._stop_at = time.monotonic() + self.seconds
        print("begun", flush=True)

    @property
    def goes_on(self) -> bool:
        """Whether the time is not over."""
        return time.monotonic() < self._stop_at

    async def hold(self) -> None:
        """Return when the time is over."""
        await asyncio.sleep(self._stop_at - time.monotonic())
