"""Lock servers inside the test's process, over real nodes and real gRPC, and the memory of these nodes."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc

from harness.processes.ports import HOST
from harness.processes.redis_nodes import RedisNode
from harness.processes.tcp_proxy import TcpProxy
from harness.time import timeouts
from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_server import composition, config
from redfence_server.api.messages import duration
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations import forming
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.scripts import Keyspace

# The whole memory of a node in one atomic look: each key, its value, and the instant at which it expires.
_DUMP = """
local all = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  all[#all + 1] = {key, redis.call('DUMP', key), redis.call('PEXPIRETIME', key)}
end
return all
"""
_LOOK_INTERVAL_S = 0.005

Memory = Mapping[bytes, tuple[bytes, int]]


class LockServer:
    """One lock server on a port of its own, and a channel to it.

    Attributes:
        nodes: by index.
        proxies: one for each node, or none.
        locks: the generated stub of `LockService`.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        nodes: Sequence[RedisNode] = (),
        proxies: Sequence[TcpProxy] = (),
        running: composition.LockServer | None = None,
    ) -> None:
        self._running = running
        self.channel = channel
        self.nodes = nodes
        self.proxies = proxies
        self.locks = lock_pb2_grpc.LockServiceStub(channel)
        self.admin = lock_pb2_grpc.AdminServiceStub(channel)

    @property
    def target(self) -> str:
        """Where it serves, for a channel of one's own."""
        return f"{HOST}:{self.port}"

    @property
    def port(self) -> int:
        """The port it serves on."""
        assert self._running is not None, "it runs elsewhere"
        return self._running.port

    @property
    def admin_port(self) -> int:
        """The port with its admin service."""
        assert self._running is not None, "it runs elsewhere"
        return self._running.admin_port

    async def acquire(
        self, resource: str, *, timeout_s: float | None = None, **fields: Any
    ) -> lock_pb2.AcquireResponse:
        """Call Acquire; see `acquire_request`."""
        return await self.locks.Acquire(acquire_request(resource, **fields), timeout=timeout_s)

    async def release(self, resource: str, lease_id: str) -> lock_pb2.ReleaseOutcome.ValueType:
        """Call Release."""
        request = lock_pb2.ReleaseRequest(resource=resource, lease_id=lease_id)
        return (await self.locks.Release(request)).outcome

    async def look(self, resource: str, *, lease_id: str = "") -> lock_pb2.GetLockResponse:
        """Call GetLock."""
        return await self.locks.GetLock(lock_pb2.GetLockRequest(resource=resource, lease_id=lease_id))

    async def check(self, resource: str, token: int) -> lock_pb2.CheckTokenResponse:
        """Call CheckToken."""
        return await self.locks.CheckToken(lock_pb2.CheckTokenRequest(resource=resource, fencing_token=token))

    async def status(self) -> lock_pb2.ClusterStatusResponse:
        """Call ClusterStatus."""
        return await self.admin.ClusterStatus(lock_pb2.ClusterStatusRequest())

    async def until_carried_out(self) -> None:
        """Return once every node has run every command of the calls that this server has answered.

        The server answers by a quorum, so a slow node may be later. It answers GetLock once each node has
        answered, and a node runs the commands of one connection in their order.
        """
        for _ in range(2):  # the late answer of a node may call for one more command to it
            await self.look("carried/out")

    async def until_waiting(self, resource: str, *, count: int = 1, timeout_s: float = 5.0) -> None:
        """Return once so many acquires of the resource wait at this server."""

        async def enough() -> bool:
            return (await self.look(resource)).waiters == count

        await until(enough, timeout_s=timeout_s)

    async def until_states(self, *states: lock_pb2.NodeState.ValueType, timeout_s: float = 5.0) -> None:
        """Return once the nodes are in these states, by index."""

        async def reached() -> bool:
            return [node.state for node in (await self.status()).nodes] == list(states)

        await until(reached, timeout_s=timeout_s)

    async def until_detail(self, index: int, text: str) -> None:
        """Return once the detail of a node shows this text. It may come after the state."""

        async def shown() -> bool:
            return text in (await self.status()).nodes[index].detail

        await until(shown)

    @asynccontextmanager
    async def on_own_connection(self, *, port: int | None = None) -> AsyncIterator[LockServer]:
        """Yield this server over a connection of its own, to another port if one is given."""
        target = self.target if port is None else f"{HOST}:{port}"
        # Channels of one process to one target would otherwise share their connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            yield LockServer(channel, nodes=self.nodes, proxies=self.proxies, running=self._running)

    async def until_quorum(self) -> None:
        """Connect to the nodes; see `composition.LockServer`."""
        assert self._running is not None, "it runs elsewhere"
        await self._running.until_quorum()

    @property
    def metrics_port(self) -> int:
        """The port of its metrics; the test gave `metrics_listen`."""
        assert self._running is not None, "it runs elsewhere"
        assert self._running.metrics_port is not None, "it serves no metrics"
        return self._running.metrics_port

    async def begin_drain(self) -> None:
        """Tell all callers, as at SIGTERM, but go on taking calls that were on their way by then."""
        assert self._running is not None, "it runs elsewhere"
        await self._running.drain()

    def reload(self) -> None:
        """Do what SIGHUP does."""
        assert self._running is not None, "it runs elsewhere"
        self._running.reload(None)

    def drain(self, *, grace_ms: int = 5_000) -> asyncio.Task[None]:
        """Do what SIGTERM does; the task ends when the server has."""
        assert self._running is not None, "it runs elsewhere"
        stop: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        stop.set_result(signal.SIGTERM)
        return asyncio.create_task(self._running.serve_until(stop, grace_ms=grace_ms))


class Serve(Protocol):
    """Starts a lock server for one test."""

    async def __call__(
        self, nodes: Sequence[RedisNode | str], *, proxied: bool = False, **settings: Any
    ) -> LockServer: ...


class FormedNodes(Protocol):
    """Lends or starts nodes that are formed into a cluster."""

    async def __call__(self, count: int) -> list[RedisNode]: ...


@asynccontextmanager
async def serving(
    nodes: Sequence[RedisNode | str],
    *,
    proxies: Sequence[TcpProxy] = (),
    until_quorum: bool = True,
    **settings: Any,
) -> AsyncIterator[LockServer]:
    """Serve over formed nodes, through the proxies where there are some; nothing is left afterwards.

    Without `until_quorum`, the test awaits `LockServer.until_quorum` itself.

    A test in which nodes do not answer says for how long they are waited for: `node_timeout_ms`.
    """
    urls = urls_of(nodes)
    if proxies:
        urls = [proxy.url(url) for proxy, url in zip(proxies, urls, strict=True)]
    usual = {"node_timeout_ms": timeouts.NODE_TIMEOUT_MS, "start_timeout_ms": 10_000}
    settings = {"listen": "127.0.0.1:0", **usual, **settings}
    async with (
        composition.LockServer(config.load({"nodes": urls, **settings})) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        if until_quorum:
            await running.until_quorum()
        known = [node for node in nodes if isinstance(node, RedisNode)]
        yield LockServer(channel, nodes=known, proxies=proxies, running=running)


def urls_of(nodes: Sequence[RedisNode | str]) -> list[str]:
    """Return the addresses; one that is given stays as it is."""
    return [node if isinstance(node, str) else node.url for node in nodes]


async def form(nodes: Sequence[RedisNode | str], *, ttl_ms_max: int = bounds.TTL_MS_MAX_DEFAULT) -> str:
    """Form the nodes into one cluster and return its id."""
    return await forming.form(
        check_urls(urls_of(nodes)),
        keys=Keyspace(),
        ttl_ms_max=ttl_ms_max,
        randomness=SystemRandomness(),
    )


def acquire_request(
    resource: str,
    *,
    ttl_ms: int = 10_000,
    wait_ms: int = 0,
    lease_id: str = "",
    holder: str = "",
    lock_delay_ms: int = 0,
) -> lock_pb2.AcquireRequest:
    """Return a request that is valid unless told otherwise."""
    request = lock_pb2.AcquireRequest(resource=resource, lease_id=lease_id, holder=holder)
    request.ttl.CopyFrom(duration(ttl_ms))
    if wait_ms:
        request.wait_timeout.CopyFrom(duration(wait_ms))
    if lock_delay_ms:
        request.lock_delay.CopyFrom(duration(lock_delay_ms))
    return request


def new_lease_id() -> str:
    """Return a fresh lease id."""
    return SystemRandomness().hex_id()


def now_ms() -> float:
    """Return the instant on the clock by which a holder counts."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) / 1e6


async def memory(node: RedisNode) -> Memory:
    """Return everything the node remembers."""
    found = await node.call("EVAL", _DUMP, 0)
    assert isinstance(found, list)
    return {key: (value, expires_at) for key, value, expires_at in found}


async def memories(nodes: Sequence[RedisNode]) -> list[Memory]:
    """Return everything that every node remembers."""
    return list(await asyncio.gather(*map(memory, nodes)))


async def identity_field(node: RedisNode, name: str) -> bytes | None:
    """Return a field of what the node remembers of itself, or None."""
    value = await node.call("HGET", "redfence:node", name)
    return value if isinstance(value, bytes) else None


async def node_phases(nodes: Sequence[RedisNode]) -> list[bytes | None]:
    """Return the phases that the nodes themselves say they are in."""
    return [await identity_field(node, "state") for node in nodes]


async def locks_left(nodes: Sequence[RedisNode]) -> list[bytes]:
    """Return the lock keys on any node."""
    return [key for each in await memories(nodes) for key in each if key.startswith(b"redfence:lock:")]


async def call_counts(nodes: Sequence[RedisNode], command: str) -> list[int]:
    """Return how often each node has run a command, also inside scripts. An operation is one `evalsha`."""
    counts = []
    for node in nodes:
        stats = await node.call("INFO", "commandstats")
        assert isinstance(stats, bytes)
        found = re.search(rf"^cmdstat_{command}:calls=(\d+)", stats.decode(), re.MULTILINE)
        counts.append(int(found[1]) if found else 0)
    return counts


async def until_idle(nodes: Sequence[RedisNode], *, quiet_s: float = 0.25) -> None:
    """Return once the nodes have run no script for so long. A server asks them sooner after an arrival."""
    before: list[int] = []

    async def unchanged() -> bool:
        nonlocal before
        last, before = before, await call_counts(nodes, "evalsha")
        if before != last:
            await asyncio.sleep(quiet_s)
        return before == last

    await until(unchanged)


async def until(look: Callable[[], Awaitable[object]], *, timeout_s: float = 5.0) -> None:
    """Return once what `look` returns is true; fail if that does not come about in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await look():  # noqa: ASYNC110  (nodes and servers set no event)
                await asyncio.sleep(_LOOK_INTERVAL_S)
    except TimeoutError:
        raise AssertionError(f"did not come true in {timeout_s:g} s") from None


async def until_all_ready(*servers: LockServer, timeout_s: float = 15.0) -> None:
    """Return once every node votes for every server."""

    async def ready() -> bool:
        reports = await asyncio.gather(*(server.status() for server in servers))
        return all(node.state == lock_pb2.NODE_STATE_READY for report in reports for node in report.nodes)

    await until(ready, timeout_s=timeout_s)


async def until_no_locks(nodes: Sequence[RedisNode], *, timeout_s: float = 5.0) -> None:
    """Return once no node has a lock key; fail if one stays."""

    async def clean() -> bool:
        return not await locks_left(nodes)

    try:
        await until(clean, timeout_s=timeout_s)
    except AssertionError:
        raise AssertionError(f"lock keys stay on the nodes: {await locks_left(nodes)}") from None
