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
from enum import Enum
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from harness.processes.ports import HOST, free_port

_CHUNK_BYTES = 64 * 1024
# Chunks under way in one direction of one connection; beyond, the sender feels it, as it would in a network.
_CHUNKS_MAX = 256
# No longer is a text to look for in requests.
_MARK_BYTES_MAX = 64
# An RST instead of an orderly end: linger for zero seconds.
_LINGER_RST = struct.pack("ii", 1, 0)


# The instant of its arrival, and the bytes; none are the end of the stream.
_Chunk = tuple[float, bytes]


class Flow(Enum):
    """What happens to bytes of one direction."""

    PASS = "they arrive"
    HOLD = "they arrive when the network heals"
    DROP = "they never arrive"


@dataclass(slots=True)
class Direction:
    """One direction of every connection, and what it has carried.

    Attributes:
        flow: change it by the proxy's methods.
        delay_ms: how much later than sent bytes arrive; their order stays.
        slice_bytes: bytes arrive at most so many at a time; None as they come.
        taken_bytes: how many were sent so far, whatever became of them.
        passed_bytes: how many arrived.
        kept_bytes: how many were held back or lost so far, for tests to wait for.
    """

    flow: Flow = Flow.PASS
    delay_ms: float = 0.0
    slice_bytes: int | None = None
    taken_bytes: int = 0
    passed_bytes: int = 0
    kept_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Connection:
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    carrier: asyncio.Task[None]
    lossy: set[int] = field(default_factory=set)  # ids of directions that have lost a byte

    def reset(self) -> None:
        """Break both ends at once; what was under way is gone."""
        _break(self.near)
        _break(self.far)
        self.carrier.cancel()


@dataclass(frozen=True, slots=True)
class _Mark:
    """Bytes of a request at which a fault begins.

    Attributes:
        begin: sets the fault, before the request goes on.
        came: set as soon as it was seen.
    """

    text: bytes
    begin: Callable[[], None]
    came: asyncio.Event = field(default_factory=asyncio.Event)


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
        self._replies_to_lose = 0
        self._mark: _Mark | None = None
        self._changed = asyncio.Event()

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen."""
        self._listener = await asyncio.start_server(self._accept, HOST, self.port)

    async def stop(self) -> None:
        """Return when nothing listens, no connection is open and no task runs. Harmless to repeat."""
        self._stop_listening()
        self.reset()
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
        return self._begin_at(text, lambda: self.hold(replies=False))

    def hold_after(self, text: bytes) -> asyncio.Event:
        """Let the request with `text` arrive, but no reply after it; the event is set when it was sent."""
        return self._begin_at(text, lambda: self.hold(requests=False))

    def watch_for(self, text: bytes) -> asyncio.Event:
        """Return an event that is set when a request with `text` was sent."""
        return self._begin_at(text, lambda: None)

    def _begin_at(self, text: bytes, begin: Callable[[], None]) -> asyncio.Event:
        assert 1 < len(text) <= _MARK_BYTES_MAX, "it might be missed"
        self._mark = mark = _Mark(text, begin)
        return mark.came

    def forward_to(self, target_port: int) -> None:
        """Break every open connection and lead new ones to another node, as after a failover."""
        self._target_port = target_port
        self.reset()

    def lose_replies(self, count: int) -> None:
        """Swallow the next `count` chunks of replies and reset their connections. Requests arrive."""
        self._replies_to_lose = count

    def reset(self) -> None:
        """Break every open connection with an RST; new ones are taken."""
        for connection in tuple(self._connections):
            connection.reset()

    def refuse(self) -> None:
        """Break every open connection and refuse new ones, as a node that is down does."""
        self._stop_listening()
        self.reset()

    async def heal(self) -> None:
        """End every fault; what was held back arrives now, and connections that lost bytes are reset."""
        for connection in tuple(self._connections):
            if connection.lossy:
                connection.reset()
        for direction in (self.requests, self.replies):
            direction.flow, direction.delay_ms, direction.slice_bytes = Flow.PASS, 0.0, None
        self._replies_to_lose = 0
        self._mark = None
        self._wake()
        if self._listener is None:
            await self.start()

    def _look_for_mark(self, before: bytes, chunk: bytes) -> None:
        mark = self._mark
        # A text that comes in pieces is found with the last of them.
        if mark is not None and mark.text in before[1 - len(mark.text) :] + chunk:
            self._mark = None
            mark.begin()
            mark.came.set()

    def _set_flow(self, flow: Flow, *, requests: bool, replies: bool) -> None:
        if requests:
            self.requests.flow = flow
        if replies:
            self.replies.flow = flow
        self._wake()

    def _wake(self) -> None:
        # A task that waits holds this event. A later one waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

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
        connection = _Connection(near, far, carrier)
        self._connections.add(connection)
        to_node: asyncio.Queue[_Chunk] = asyncio.Queue(_CHUNKS_MAX)
        from_node: asyncio.Queue[_Chunk] = asyncio.Queue(_CHUNKS_MAX)
        takes = (
            asyncio.create_task(self._take(self.requests, near_reader, to_node)),
            asyncio.create_task(self._take(self.replies, far_reader, from_node)),
        )
        delivers = (
            asyncio.create_task(self._deliver(self.requests, connection, to_node, far)),
            asyncio.create_task(self._deliver(self.replies, connection, from_node, near)),
        )
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
            self._connections.discard(connection)
            near.close()
            far.close()

    async def _take(
        self, direction: Direction, reader: asyncio.StreamReader, under_way: asyncio.Queue[_Chunk]
    ) -> None:
        """Put every chunk on its way, the end of the stream as well."""
        loop = asyncio.get_running_loop()
        chunk = b"-"
        while chunk:
            try:
                chunk = await reader.read(_CHUNK_BYTES)
            except OSError:
                chunk = b""
            direction.taken_bytes += len(chunk)
            await under_way.put((loop.time() + direction.delay_ms / 1000, chunk))

    async def _deliver(
        self,
        direction: Direction,
        connection: _Connection,
        under_way: asyncio.Queue[_Chunk],
        writer: asyncio.StreamWriter,
    ) -> None:
        """Deliver, hold back or lose every chunk, in order."""
        loop = asyncio.get_running_loop()
        before = b""
        while True:
            arrives_at, chunk = await under_way.get()
            await asyncio.sleep(max(0.0, arrives_at - loop.time()))
            if direction is self.requests:
                self._look_for_mark(before, chunk)
                before = (before + chunk)[-_MARK_BYTES_MAX:]
            if direction.flow is not Flow.PASS:
                direction.kept_bytes += len(chunk)
            while direction.flow is Flow.HOLD:
                await self._changed.wait()
            if direction.flow is Flow.DROP or id(direction) in connection.lossy:
                connection.lossy.add(id(direction))
                continue
            if not chunk:
                return
            if direction is self.replies and self._replies_to_lose:
                self._replies_to_lose -= 1
                direction.kept_bytes += len(chunk)
                connection.reset()
                continue
            await _write(direction, chunk, writer)


async def _write(direction: Direction, chunk: bytes, writer: asyncio.StreamWriter) -> None:
    size = direction.slice_bytes or len(chunk)
    for start in range(0, len(chunk), size):
        piece = chunk[start : start + size]
        try:
            writer.write(piece)
            await writer.drain()
            # Let the receiver see this piece on its own.
            await asyncio.sleep(0)
        except OSError:
            # The receiver is gone, which its own direction finds out.
            return
        direction.passed_bytes += len(piece)


def _break(writer: asyncio.StreamWriter) -> None:
    if not writer.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RST)
    writer.transport.abort()
