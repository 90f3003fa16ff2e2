"""Connections between simulated processes: ordered and reliable as TCP, so late, stalled or broken."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

import hiredis

from harness.doubles.joining_commands import Formation
from harness.doubles.node_state import FakeNodeState
from harness.simulation.arriving_bytes import deliver
from harness.simulation.processes import Chance, Process
from harness.simulation.redis import Client, SimulatedRedis
from redfence_server.redis_io.dial import DialError, DialledNode, DialRefusedError


class Route:
    """One way between two processes, for all their connections; while it is blocked, messages stay on it."""

    def __init__(self, chance: Chance, latency_ms: tuple[float, float]) -> None:
        self._chance = chance
        self.latency_ms = latency_ms
        self.blocked = False
        self._waiting: list[Stream] = []

    def carry(self, stream: Stream, arrive: Callable[[], None]) -> None:
        """Have something arrive, after whatever was sent before on the same stream."""
        stream.under_way.append(arrive)
        due_s = stream.to.loop.time() + self._chance.uniform(*self.latency_ms) / 1000
        stream.last_s = max(stream.last_s + 1e-7, due_s)
        stream.to.at(stream.last_s, self._arrive, stream)

    def _arrive(self, stream: Stream) -> None:
        if self.blocked:
            self._waiting.append(stream)
        else:
            # A pause or a partition may change the order of these calls; the oldest bytes still come first.
            stream.under_way.popleft()()

    def unblock(self) -> None:
        self.blocked = False
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            stream.to.soon(self._arrive, stream)


class Stream:
    """One direction of one connection: it keeps the order."""

    __slots__ = ("last_s", "to", "under_way")

    def __init__(self, to: Process) -> None:
        self.to = to
        self.last_s = 0.0
        self.under_way: deque[Callable[[], None]] = deque()


class NodeHost:
    """The machine of one node: its process, which may be down, and whoever is connected to it.

    Attributes:
        wiped: it has lost its disk, and its next run begins with nothing.
    """

    def __init__(self, redis: SimulatedRedis, name: str) -> None:
        self.redis = redis
        self.process = Process(name)
        self._name = name
        self.connections: list[Connection] = []
        self.wiped = False

    def kill(self, *, wiped: bool = False) -> None:
        """End the process, and wipe its disk if that is asked for; every connection breaks."""
        self.wiped = wiped
        self.process.kill()
        for connection in list(self.connections):
            connection.reset("the node has died")

    def form(self, index: int, node_count: int, ttl_ms_max: int, *, cluster_id: str = "cluster") -> Self:
        """Remember what a node does that was just formed."""
        redis = self.redis
        redis.state.restore(
            FakeNodeState(
                admission=f"{index + 1:032x}",
                formation=Formation(cluster_id, index, node_count, ttl_ms_max),
                run_id=redis.run_id,
                durable=redis.appendfsync == "always",
            )
        )
        return self

    def disconnect(self, server: Process, reason: str) -> None:
        for connection in [each for each in self.connections if each._server is server]:
            connection.reset(reason)

    def start(self) -> None:
        self.process = Process(self._name)
        self.wiped = False


class Connection(DialledNode, asyncio.Transport):
    """A connection of a server to a node, for single commands and then for the product's `NodeConnection`."""

    def __init__(
        self, server: Process, host: NodeHost, there: Route, back: Route, floors: dict[int, int]
    ) -> None:
        asyncio.Transport.__init__(self)
        self._server = server
        self._host = host
        self._routes = there, back
        self._there, self._back = Stream(host.process), Stream(server)
        self._client: Client = host.redis.connect(self._send_back, floors)
        self._reader = hiredis.Reader()
        self._answers: deque[asyncio.Future[Any]] = deque()
        self._protocol: asyncio.BufferedProtocol | None = None
        self._open = True
        host.connections.append(self)

    # --- both ways --------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._open:
            self._routes[0].carry(self._there, lambda: self._arrive(bytes(data)))

    def _arrive(self, data: bytes) -> None:
        if self._open:
            self._client.feed(data)

    def _send_back(self, data: bytes) -> None:
        self._routes[1].carry(self._back, lambda: self._come_back(data))

    def _come_back(self, data: bytes) -> None:
        if not self._open:
            return
        if self._protocol is not None:
            deliver(self._protocol, data)
            return
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not False:
            future = self._answers.popleft()
            if not future.done():
                future.set_result(answer)

    def reset(self, reason: str) -> None:
        """Break it: whatever is under way is lost, and the server is told as soon as it runs."""
        if self._open:
            self._leave()
            self._server.soon(self._tell_loss, ConnectionResetError(reason))

    def _leave(self) -> None:
        self._open = False
        self._host.connections.remove(self)
        if self._client in self._host.redis.clients:
            self._host.redis.clients.remove(self._client)

    def _tell_loss(self, error: Exception | None) -> None:
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(DialError(str(error)))
                answer.exception()  # whoever gave up does not look
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    # --- DialledNode ------------------------------------------------------------------------------

    async def commands(self, *batch: Sequence[str | bytes | int]) -> list[Any]:
        if not self._open:
            raise DialError(f"{batch[0][0]!s}: the connection has ended")
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[Any]] = [loop.create_future() for _ in batch]
        self._answers += answers
        self.write(b"".join(hiredis.pack_command(tuple(parts)) for parts in batch))  # type: ignore[arg-type]  # its stub says: a tuple of one
        try:
            async with asyncio.timeout(_COMMAND_TIMEOUT_S):
                values = [await answer for answer in answers]
        except TimeoutError as error:
            raise DialError(f"{batch[0][0]!s}: no answer in time") from error
        return [
            DialRefusedError(str(each)) if isinstance(each, hiredis.ReplyError) else each for each in values
        ]

    def hand_over(self, protocol: asyncio.BufferedProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    async def close(self) -> None:  # type: ignore[override]
        self.abort()

    # --- asyncio.Transport ------------------------------------------------------------------------

    def abort(self) -> None:
        """Close at once; the protocol is told in the next turn."""
        if self._open:
            self._leave()
            asyncio.get_running_loop().call_soon(self._tell_loss, None)

    def is_closing(self) -> bool:
        return not self._open


_COMMAND_TIMEOUT_S = 2.0


class Network:
    """The ways between every server and every node."""

    def __init__(self, chance: Chance, *, latency_ms: tuple[float, float]) -> None:
        self._chance = chance
        self._latency_ms = latency_ms
        self.routes: dict[tuple[object, object], Route] = {}

    def route(self, start: object, end: object) -> Route:
        if (start, end) not in self.routes:
            self.routes[start, end] = Route(self._chance, self._latency_ms)
        return self.routes[start, end]

    def block(self, server: object, host: object) -> None:
        self.route(server, host).blocked = self.route(host, server).blocked = True

    def unblock(self, server: object, host: object) -> None:
        self.route(server, host).unblock()
        self.route(host, server).unblock()

    async def dial(self, server: Process, name: object, host: NodeHost, floors: dict[int, int]) -> Connection:
        """Connect a server to a node in one round trip; `floors` are those that this run of it knows."""
        there, back = self.route(name, host), self.route(host, name)
        await asyncio.sleep((there.latency_ms[1] + back.latency_ms[1]) / 1000)
        if there.blocked or back.blocked:
            await asyncio.sleep(_COMMAND_TIMEOUT_S)
            raise DialError("no answer in time")
        if not host.process.alive:
            raise DialError("connection refused")
        return Connection(server, host, there, back, floors)
