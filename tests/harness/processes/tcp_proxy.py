"""A TCP proxy for one pair of server and node, whose network can be broken and healed while it runs.

TCP delivers bytes in order or breaks the connection. So does the proxy: a connection that has lost a byte
carries nothing more in that direction, and is reset when the network heals. Bytes that a partition only holds
back arrive late, as TCP would send them again.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from harness.processes.ports import HOST, free_port
from harness.processes.tcp_direction import MARK_BYTES_MAX, Direction, Flow

_CHUNK_BYTES = 64 * 1024
# Chunks under way in one direction of one connection; beyond, the sender feels it, as it would in a network.
_CHUNKS_MAX = 256
# An RST instead of an orderly end: linger for zero seconds.
_LINGER_RST = struct.pack("ii", 1, 0)


# The instant of its arrival, and the bytes; none are the end of the stream.
_Chunk = tuple[float, bytes]


@dataclass(slots=True, eq=False)
class _Stream:
    """One direction of one connection; it is lossy once it has lost a byte."""

    direction: Direction
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    lossy: bool = False
    under_way: asyncio.Queue[_Chunk] = field(default_factory=lambda: asyncio.Queue(_CHUNKS_MAX))

    async def take(self) -> None:
        """Put every chunk on its way, the end of the stream as well."""
        loop = asyncio.get_running_loop()
        chunk = b"-"
        while chunk:
            try:
                chunk = await self.reader.read(_CHUNK_BYTES)
            except OSError:
                chunk = b""
            self.direction.taken_bytes += len(chunk)
            await self.under_way.put((loop.time() + self.direction.delay_ms / 1000, chunk))

    async def deliver(self, reset: Callable[[], None]) -> None:
        """Deliver, hold back or lose every chunk, in order."""
        loop = asyncio.get_running_loop()
        direction = self.direction
        before = b""
        while True:
            arrives_at, chunk = await self.under_way.get()
            await asyncio.sleep(max(0.0, arrives_at - loop.time()))
            direction.look_for_mark(before, chunk)
            before = (before + chunk)[-MARK_BYTES_MAX:]
            if direction.flow is not Flow.PASS:
                direction.kept_bytes += len(chunk)
            await direction.until_not_held()
            if direction.flow is Flow.DROP or self.lossy:
                self.lossy = True
            elif not chunk:
                return
            elif direction.chunks_to_lose:
                direction.chunks_to_lose -= 1
                direction.kept_bytes += len(chunk)
                reset()
            else:
                await self._write(chunk)

    async def _write(self, chunk: bytes) -> None:
        size = self.direction.slice_bytes or len(chunk)
        for start in range(0, len(chunk), size):
            piece = chunk[start : start + size]
            try:
                self.writer.write(piece)
                await self.writer.drain()
                # Let the receiver see this piece on its own.
                await asyncio.sleep(0)
            except OSError:
                # The receiver is gone, which its own direction finds out.
                return
            self.direction.passed_bytes += len(piece)


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    streams: tuple[_Stream, _Stream]
    carrier: asyncio.Task[None]

    async def carry(self) -> None:
        """Carry bytes both ways until one side ends, or until `reset`."""
        takes = [asyncio.create_task(stream.take()) for stream in self.streams]
        delivers = [asyncio.create_task(stream.deliver(self.reset)) for stream in self.streams]
        try:
            # An orderly end of one side ends both: no node and no client goes on with half a connection.
            done, _ = await asyncio.wait(delivers, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.CancelledError:
            pass  # by reset
        finally:
            for each in (*takes, *delivers):
                each.cancel()

    def reset(self) -> None:
        """Break both ends at once; what was under way is gone."""
        for stream in self.streams:
            _break(stream.writer)
        self.carrier.cancel()


class TcpProxy:
    """Listens on a port of its own, which stays the same until `stop`, and forwards to one node.

    `requests` flow to the node, `replies` from it. Faults stay until `heal`; a new one adds to those before.
    """

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self.requests = Direction()
        self.replies = Direction()
        self._target_port = target_port
        self._listener: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._carriers: set[asyncio.Task[None]] = set()

    @property
    def connection_count(self) -> int:
        """How many connections are open through the proxy."""
        return len(self._connections)

    def url(self, node_url: str) -> str:
        """Return the node's address with the proxy's port in place of the node's."""
        parts = urlsplit(node_url)
        return parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{self.port}").geturl()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen."""
        self._listener = await asyncio.start_server(self._accept, HOST, self.port)

    async def stop(self) -> None:
        """Return when nothing listens, no connection is open and no task runs. Harmless to repeat."""
        self.refuse()
        carriers = tuple(self._carriers)
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)

    def hold(self, *, requests: bool = True, replies: bool = True) -> None:
        """Partition the pair: it takes connections, but nothing arrives before `heal`."""
        self._set_flow(Flow.HOLD, requests=requests, replies=replies)

    def drop(self, *, requests: bool = True, replies: bool = True) -> None:
        """Swallow bytes: connections stay, also new ones are taken, and nothing arrives, ever."""
        self._set_flow(Flow.DROP, requests=requests, replies=replies)

    def delay(self, *, requests_ms: float = 0.0, replies_ms: float = 0.0) -> None:
        """Let bytes that are sent from now on arrive later; they still overlap on their way."""
        self.requests.delay_ms, self.replies.delay_ms = requests_ms, replies_ms

    def slice(self, *, slice_bytes: int) -> None:
        """Let bytes arrive in pieces, both ways."""
        self.requests.slice_bytes = self.replies.slice_bytes = slice_bytes

    def hold_before(self, text: bytes) -> asyncio.Event:
        """Hold requests back from the one with `text` on; the event is set when it was sent."""
        return self.requests.watch_for(text, lambda: self.hold(replies=False))

    def hold_after(self, text: bytes) -> asyncio.Event:
        """Let the request with `text` arrive, but no reply after it; the event is set when it was sent."""
        return self.requests.watch_for(text, lambda: self.hold(requests=False))

    def forward_to(self, target_port: int) -> None:
        """Break every open connection and lead new ones to another node, as after a failover."""
        self._target_port = target_port
        self.reset()

    def lose_replies(self, count: int) -> None:
        """Swallow the next `count` chunks of replies and reset their connections. Requests arrive."""
        self.replies.chunks_to_lose = count

    def reset(self) -> None:
        """Break every open connection with an RST; new ones are taken."""
        for connection in tuple(self._connections):
            connection.reset()

    def refuse(self) -> None:
        """Break every open connection and refuse new ones, as a node that is down does."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.reset()

    async def heal(self) -> None:
        """End every fault; what was held back arrives now, and connections that lost bytes are reset."""
        for connection in tuple(self._connections):
            if any(stream.lossy for stream in connection.streams):
                connection.reset()
        self.requests.heal()
        self.replies.heal()
        if self._listener is None:
            await self.start()

    def _set_flow(self, flow: Flow, *, requests: bool, replies: bool) -> None:
        if requests:
            self.requests.set_flow(flow)
        if replies:
            self.replies.set_flow(flow)

    async def _accept(self, near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        carrier = asyncio.current_task()
        assert carrier is not None
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)
        try:
            far_reader, far = await asyncio.open_connection(HOST, self._target_port)
        except (OSError, asyncio.CancelledError):
            # The node is down: the nearest thing to a refusal that is left to us.
            _break(near)
            return
        streams = (_Stream(self.replies, far_reader, near), _Stream(self.requests, near_reader, far))
        connection = _Connection(streams, carrier)
        self._connections.add(connection)
        try:
            await connection.carry()
        finally:
            self._connections.discard(connection)
            near.close()
            far.close()


def _break(writer: asyncio.StreamWriter) -> None:
    if not writer.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RST)
    writer.transport.abort()
