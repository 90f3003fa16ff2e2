"""A client that sends whatever a test likes over HTTP/2, and hides nothing of what comes back."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

import ngh2

from harness.processes.ports import HOST
from redfence_server.http2.wire import framed

TIMEOUT_S = 10.0


@dataclass
class Answer:
    """Collects the server's answer on one stream; trailers count as headers."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    reset: int | None = None
    closed: bool = False

    @property
    def status(self) -> str:
        """The number and the text of the gRPC status."""
        return f"{self.headers[b'grpc-status'].decode()} {self.headers.get(b'grpc-message', b'').decode()}"


class RawClient:
    """One connection. `async with RawClient(port) as client`."""

    def __init__(
        self,
        port: int,
        *,
        settings: Mapping[ngh2.Setting, int] | None = None,
        source: str = HOST,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._port = port
        self._tls = tls
        self._source = source
        self._settings = dict(settings or {})
        self.http2 = ngh2.Connection(ngh2.Role.CLIENT)
        self._changed = asyncio.Event()
        self.answers: dict[int, Answer] = {}
        self.goaways: list[ngh2.GoAwayReceived] = []
        self.ended = False

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(
            HOST, self._port, local_addr=(self._source, 0), ssl=self._tls
        )
        self.http2.initiate_connection(self._settings)
        self._reading = asyncio.create_task(self._read())
        self.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    def begin(
        self,
        path: str,
        *headers: tuple[bytes, bytes],
        content_type: bytes = b"application/grpc",
        method: bytes = b"POST",
    ) -> int:
        """Send the headers of a call and return its stream."""
        stream_id = self.http2.send_request(
            [
                (b":method", method),
                (b":authority", b"test"),
                *(() if method == b"CONNECT" else ((b":scheme", b"http"), (b":path", path.encode()))),
                (b"te", b"trailers"),
                (b"content-type", content_type),
                *headers,
            ]
        )
        self.answers[stream_id] = Answer()
        self.flush()
        return stream_id

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Send bytes of a body."""
        self.http2.send_data(stream_id, data, end_stream=end)
        self.flush()

    def send_raw(self, data: bytes) -> None:
        """Send bytes that need not be HTTP/2."""
        self._writer.write(data)

    def reset(self, stream_id: int) -> None:
        """Cancel a call."""
        self.http2.reset_stream(stream_id)
        self.flush()

    def open_windows(self, stream_id: int) -> None:
        """Let the server send whatever it has."""
        for each in (stream_id, 0):
            self.http2.set_local_window_size(10_000_000, stream_id=each)
        self.flush()

    def stop_reading(self) -> None:
        """Read and answer no more, but keep the socket open."""
        self._reading.cancel()

    def read_on(self) -> None:
        """Read and answer again."""
        self._reading = asyncio.create_task(self._read())

    def unsent(self, stream_id: int) -> int:
        """Return how many bytes of a body the server's windows do not let out."""
        return self.http2.queued_body_size(stream_id)

    async def call(self, path: str, message: bytes, *headers: tuple[bytes, bytes]) -> Answer:
        """Send one message; return the answer once the stream is closed."""
        stream_id = self.begin(path, *headers)
        self.send(stream_id, framed(message), end=True)
        return await self.closed(stream_id)

    async def closed(self, stream_id: int) -> Answer:
        """Return the answer of a stream that both ends have closed."""
        await self.until(lambda: self.answers[stream_id].closed)
        return self.answers[stream_id]

    async def until(self, true: Callable[[], bool]) -> None:
        """Return once this holds; it is asked after each batch of bytes."""
        async with asyncio.timeout(TIMEOUT_S):
            while not true():
                self._changed.clear()
                await self._changed.wait()

    def flush(self) -> None:
        """Send what is queued."""
        self._writer.write(self.http2.data_to_send())

    async def _read(self) -> None:
        try:
            while data := await self._reader.read(65_536):
                self.http2.receive_data(data)
                for event in self.http2.events():
                    self._note(event)
                self.flush()
                self._changed.set()
        except ConnectionError:
            pass  # as good as an end
        self.ended = True
        self._changed.set()

    def _note(self, event: ngh2.Event) -> None:
        match event:
            case ngh2.ResponseReceived(stream_id=stream_id, headers=headers):
                self.answers[stream_id].headers.update(headers)
            case ngh2.TrailersReceived(stream_id=stream_id, headers=headers):
                self.answers[stream_id].headers.update(headers)
            case ngh2.DataReceived(stream_id=stream_id, data=data):
                self.answers[stream_id].body += data
            case ngh2.StreamReset(stream_id=stream_id, error_code=code):
                self.answers[stream_id].reset = code
            case ngh2.StreamClosed(stream_id=stream_id):
                self.answers[stream_id].closed = True
            case ngh2.GoAwayReceived():
                self.goaways.append(event)
