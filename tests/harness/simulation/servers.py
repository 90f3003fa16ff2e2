"""A lock server as a simulated process: the product from links to queues, called over the network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache

from harness.simulation.network import Network, NodeHost
from harness.simulation.processes import Chance, Process, ProcessClock
from redfence_server import composition, config
from redfence_server.errors import StartupError
from redfence_server.lock_service import LockService
from redfence_server.nodes.cluster import NodeCluster
from redfence_server.redis_io.dial import DialledNode, NodeUrl

# A supervisor starts it again so soon after its end.
_RESTART_S = 0.5
START_TIMEOUT_MS = 5_000


@cache
def _settings(node_count: int, node_timeout_ms: int) -> config.ServeConfig:
    urls = [f"redis://node-{index}:6379" for index in range(node_count)]
    return config.load({"nodes": urls, "listen": "127.0.0.1:0", "node_timeout_ms": node_timeout_ms})


class ServerHost:
    """The machine of one lock server: one run of the process after another.

    Attributes:
        service: what answers calls; None while it starts.
        calls: to be told when the process dies.
        floors: for each run, by node index, the greatest floor that it raised or was admitted under.
        routed: by node index, the other process that this server reaches at the address, if there is one.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[NodeHost],
        network: Network,
        chance: Chance,
        *,
        node_timeout_ms: int = 500,
    ) -> None:
        self.name = name
        self._settings = _settings(len(hosts), node_timeout_ms)
        self._hosts = hosts
        self.floors: list[dict[int, int]] = []
        self.routed: dict[int, NodeHost] = {}
        self._network = network
        self._chance = chance
        self.clock = ProcessClock(offset_ms=chance.uniform(0, 1e6), rate=chance.uniform(0.9999, 1.0001))
        self.process = Process(name)
        self.cluster: NodeCluster | None = None
        self.service: LockService | None = None
        self._serving = asyncio.Event()
        # In the order in which they came.
        self.calls: dict[Call, None] = {}
        self.start()

    def give_list(self, hosts: Sequence[NodeHost], node_count: int) -> None:
        """Let the next run serve over the first nodes of these."""
        self._hosts = hosts
        self._settings = _settings(node_count, self._settings.node_timeout_ms)

    def start(self) -> None:
        """Begin a run that knows nothing of the one before."""
        self.process = Process(self.name)
        self.process.spawn(self._run())

    async def _run(self) -> None:
        while True:
            self.floors.append({})
            self.cluster, service = composition.assemble(
                self._settings, clock=self.clock, randomness=self._chance, dial=self._dial
            )
            try:
                await self.cluster.start(timeout_ms=START_TIMEOUT_MS)
            except StartupError:
                await self.cluster.close()
                await asyncio.sleep(_RESTART_S)
            else:
                self.service = service
                self._serving.set()
                return

    async def until_serving(self) -> None:
        """Return when the first run answers calls."""
        await self._serving.wait()

    async def _dial(self, node: NodeUrl, *, timeout_ms: int) -> DialledNode:
        del timeout_ms
        index = int(node.address.removeprefix("node-").partition(":")[0])
        host = self.routed.get(index, self._hosts[index])
        return await self._network.dial(self.process, self, host, self.floors[-1])

    def kill(self) -> None:
        self.process.kill()
        self.service = None
        for host in (*self._hosts, *self.routed.values()):
            host.disconnect(self.process, "the server has died")
        for call in list(self.calls):
            call.lose()

    async def end(self) -> None:
        if self.cluster is not None:
            await self.cluster.close()
        await self.process.end()


class NotServingError(Exception):
    """No process listens there: the call had no effect."""


class UnknownOutcomeError(Exception):
    """No answer came: the call may have had its effect, or may still have it."""


@dataclass(eq=False)
class Call:
    """One remote call under way, with its caller's patience."""

    server: ServerHost
    answer: asyncio.Future[object]
    task: asyncio.Task[None] | None = None

    def lose(self) -> None:
        self.server.calls.pop(self, None)
        if not self.answer.done():
            self.answer.set_exception(UnknownOutcomeError("the connection broke"))


class Wire:
    """The ways between one client and the servers."""

    def __init__(self, client: Process, chance: Chance, *, latency_ms: tuple[float, float]) -> None:
        self.client = client
        # Under way, in the order in which they were made.
        self._calls: dict[Call, None] = {}
        self._chance = chance
        self._latency_ms = latency_ms
        self.loss = 0.0
        self.duplicates = 0.0

    async def call(
        self, server: ServerHost, method: Callable[[LockService], Awaitable[object]], *, timeout_s: float
    ) -> object:
        """Call a method of a server and return its answer."""
        call = Call(server, asyncio.get_running_loop().create_future())
        server.calls[call] = self._calls[call] = None
        for _ in range(1 + (self._chance.random() < self.duplicates)):
            self._send(server.process, lambda: self._arrive(call, method))
        try:
            async with asyncio.timeout(timeout_s):
                return await call.answer
        except TimeoutError as error:
            raise UnknownOutcomeError("no answer in time") from error
        finally:
            self._end(call)

    def break_off(self) -> None:
        """End what is under way, for the client has died: the servers are told, if the messages arrive."""
        for call in list(self._calls):
            self._end(call)

    def _end(self, call: Call) -> None:
        self._calls.pop(call, None)
        call.server.calls.pop(call, None)
        self._send(call.server.process, lambda: call.task is not None and call.task.cancel())

    def _send(self, to: Process, arrive: Callable[[], object]) -> None:
        if self._chance.random() >= self.loss:
            delay_s = self._chance.uniform(*self._latency_ms) / 1000
            to.at(asyncio.get_running_loop().time() + delay_s, arrive)

    def _arrive(self, call: Call, method: Callable[[LockService], Awaitable[object]]) -> None:
        service = call.server.service
        if service is None:
            self._send(self.client, lambda: _fail(call.answer, NotServingError()))
            return
        call.task = call.server.process.spawn(self._serve(call, method, service))

    async def _serve(
        self, call: Call, method: Callable[[LockService], Awaitable[object]], service: LockService
    ) -> None:
        try:
            value = await method(service)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for the caller)
            told = error
            self._send(self.client, lambda: _fail(call.answer, told))
        else:
            self._send(self.client, lambda: _tell(call.answer, value))


def _fail(answer: asyncio.Future[object], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _tell(answer: asyncio.Future[object], value: object) -> None:
    if not answer.done():
        answer.set_result(value)
