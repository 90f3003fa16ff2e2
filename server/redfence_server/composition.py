"""Build the server from its parts: the only place that makes real clocks, randomness, nodes and servers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self

import structlog

from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_server import log_setup
from redfence_server.access.setup import open_guard
from redfence_server.api import serving as grpc_serving
from redfence_server.api.health import Health
from redfence_server.api.listener import Listener
from redfence_server.api.servicer import AdminServicer, LockServicer
from redfence_server.clock import SystemClock, WallClock
from redfence_server.config import RELOADABLE, ServeConfig
from redfence_server.errors import ConfigError
from redfence_server.http2.settings import Transport
from redfence_server.lock_list import LockList
from redfence_server.lock_service import LockService
from redfence_server.lock_watch import LockWatches
from redfence_server.locking.node import LockNode
from redfence_server.locking.redlock import Redlock
from redfence_server.log_setup import LogLevel
from redfence_server.membership.admin import AdminSettings
from redfence_server.membership.heartbeat import HeartbeatSettings
from redfence_server.membership.joining import JoiningSettings
from redfence_server.membership.node_clock import ClockWitnesses
from redfence_server.metrics.cluster import ClusterMetrics
from redfence_server.metrics.telemetry import Telemetry
from redfence_server.node_audit import NodeAudit
from redfence_server.nodes.cluster import NodeCluster, check_urls
from redfence_server.nodes.link import LinkSettings
from redfence_server.process_memory import freed_memory_returned
from redfence_server.randomness import Randomness, SystemRandomness
from redfence_server.redis_io.dial import Dial, dial
from redfence_server.redis_io.scripts import Packer
from redfence_server.sharing.shares import ShareLimits, Shares
from redfence_server.waiting.waiter_limiter import WaiterLimits

SERVICE_NAMES = tuple(
    lock_pb2.DESCRIPTOR.services_by_name[name].full_name for name in ("LockService", "AdminService")
)
LIVENESS_NAME = "redfence.liveness"
"""The health of this name is SERVING as long as the process answers, with or without a quorum."""
# A worker listens after this time even without a quorum, so that the port answers why it is not ready.
_LISTEN_ANYWAY_S = 1.0


def _waiter_limits(config: ServeConfig) -> WaiterLimits:
    return WaiterLimits(
        server=config.waiters_max,
        resource=config.waiters_per_resource_max,
        connection=config.waiters_per_connection_max,
    )


def _share_limits(config: ServeConfig) -> ShareLimits:
    return ShareLimits(
        commands=config.commands_server_max,
        connections=config.connections_max,
        buffered_bytes=config.buffered_bytes_max,
        new_names_per_second=config.new_resources_per_second,
    )


def assemble(
    config: ServeConfig,
    *,
    clock: WallClock,
    randomness: Randomness,
    dial: Dial,
    accept_empty_nodes: bool = False,
    observe: Callable[[Sequence[LockNode]], Sequence[LockNode]] = lambda nodes: nodes,
) -> tuple[NodeCluster, LockService]:
    """Build the parts that decide about locks, without gRPC, and start nothing.

    Raises:
        ConfigError: the nodes' URLs or their number are wrong.
    """
    keys = config.keyspace
    channel = keys.channel(randomness.hex_id())
    urls = check_urls(config.nodes, config.node_tls)
    cluster = NodeCluster(
        settings=LinkSettings(
            packer=Packer(keys, channel=channel),
            channel=channel,
            node_timeout_ms=config.node_timeout_ms,
            joining=JoiningSettings(
                urls=urls,
                admin=AdminSettings(keys, config.dial_timeout_ms, clock, dial),
                assume_durable=config.assume_durable,
                accept_empty_nodes=accept_empty_nodes,
                fencing=asyncio.Lock(),
            ),
            heartbeat=HeartbeatSettings(config.heartbeat_interval_ms, keys, ClockWitnesses(len(urls))),
        ),
        clock=clock,
        randomness=randomness,
    )
    service = LockService(
        Redlock(observe(cluster.links), clock=clock, randomness=randomness),
        clock=clock,
        randomness=randomness,
        ttl_ms_max=cluster.ttl_ms_max,
        limits=_waiter_limits(config),
        quorum_may_return=cluster.quorum_may_return,
    )
    cluster.on_quorum_lost = service.quorum_lost
    return cluster, service


class LockServer:
    """A lock server that answers calls from the entry of `async with` until the exit.

    Until `until_quorum` has returned, the health is NOT_SERVING, and locks are UNAVAILABLE.

    Args:
        accept_empty_nodes: takes an empty node for a wiped one, even if this server has never seen it. Only a
            program that runs the nodes itself may set it.
        share_port: for a worker, whose supervisor holds the port of `config.listen`. The server then listens
            once it has a quorum, or after a second without one.

    Attributes:
        metrics_port: of the metrics; None without them.

    Raises:
        ConfigError: a setting or a file is wrong.
    """

    def __init__(
        self, config: ServeConfig, *, accept_empty_nodes: bool = False, share_port: bool = False
    ) -> None:
        if not __debug__:
            raise ConfigError("refusing to run under python -O, because assertions guard the safety of locks")
        if share_port and config.admin_listen:
            raise ConfigError("admin_listen: it needs one process; set processes to 1, or leave it out")
        self._config = config
        self._shares_port = share_port
        self._has_stopped = False
        self.metrics_port: int | None = None
        self._stack = AsyncExitStack()
        clock, randomness = SystemClock(), SystemRandomness()
        self._telemetry = Telemetry(
            listen=config.metrics_listen,
            logs=config.log_level is LogLevel.DEBUG,
            traces_endpoint=config.traces_endpoint,
            transport=config.transport,
            clock=clock,
        )
        self._cluster, service = assemble(
            config,
            clock=clock,
            randomness=randomness,
            dial=dial,
            accept_empty_nodes=accept_empty_nodes,
            observe=self._telemetry.nodes,
        )
        self._shares = Shares(_share_limits(config), has_room=self._cluster.has_room, clock=clock)
        listener = partial(Listener, config, shares=self._shares.connections, wrap=self._telemetry.wrap)
        self._listeners = [listener("listen", share_port=share_port)]
        if config.admin_listen:
            self._listeners.append(listener("admin_listen"))
        self._service = service
        self._guard = open_guard(config.access, audit_log=config.audit_log, clock=clock)
        if self._guard is not None and self._guard.audit is not None:
            self._cluster.on_change = NodeAudit(self._guard.audit, self._cluster.view).note
        self._servicer = LockServicer(
            service,
            clock=clock,
            randomness=randomness,
            commands_max=config.commands_max,
            shares=self._shares,
            drain_grace_ms=config.drain_grace_ms,
            guard=self._guard,
        )
        nodes, keys, look = self._cluster.links, config.keyspace, service.get_lock
        locks = LockList(nodes, keys=keys, look=look)
        admin = AdminServicer(
            service,
            locks=locks,
            watches=LockWatches(locks, nodes, keys=keys, look=look, clock=clock),
            streams=self._servicer.streams,
            status=self._cluster.view,
            clock=clock,
            guard=self._guard,
        )
        self._health = Health(SERVICE_NAMES, liveness_name=LIVENESS_NAME)
        for each in self._listeners:
            # The last address has all services: a client of the admin service opens a Session as well.
            has_all = each is self._listeners[-1]
            lock_pb2_grpc.add_LockServiceServicer_to_server(self._servicer, each.server)
            if has_all:
                lock_pb2_grpc.add_AdminServiceServicer_to_server(admin, each.server)
            grpc_serving.add_health_and_reflection(
                each.server, self._health, SERVICE_NAMES, reflection=config.reflection and has_all
            )
        self._metrics = ClusterMetrics(
            view=self._cluster.view,
            waiting=service.waiting,
            shares=self._shares,
            ready=self._is_ready,
            shows_connections=config.transport is Transport.FAST,
        )
        self._cluster.on_granting = lambda granting: self._health.set_serving(serving=granting)

    @property
    def port(self) -> int:
        """The port of `listen`, once it is bound."""
        return self._listeners[0].port

    @property
    def admin_port(self) -> int:
        """The port with the admin service: that of `admin_listen`, or else of `listen`."""
        return self._listeners[-1].port

    async def __aenter__(self) -> Self:
        """Listen, unless the port is shared.

        Raises:
            ListenError: the address is malformed or in use.
        """
        # The ports first, because they are the likelier mistake and need no connection to a node.
        try:
            if not self._shares_port:
                await self._listen()
            await self._stack.enter_async_context(freed_memory_returned())
            self.metrics_port = await self._stack.enter_async_context(
                self._telemetry.serving(self._metrics, ready=self._is_ready)
            )
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End every call and every connection."""
        await self._close()

    def _is_ready(self) -> bool:
        return self._health.serving

    async def _listen(self) -> None:
        for listener in self._listeners:
            await listener.start()

    async def _close(self) -> None:
        self._health.drain()
        # After a drain, a second stop would wait again for peers that read nothing.
        if not self._has_stopped:
            for listener in self._listeners:
                await grpc_serving.stop_within(listener.server, 0)
        await self._cluster.close()
        await self._stack.aclose()
        await self._telemetry.close()
        if self._guard is not None:
            self._guard.close()

    async def until_quorum(self) -> None:
        """Connect to the nodes, once, and return when a quorum votes.

        Raises:
            StartupError: a node must not vote, or `start_timeout_ms` is over.
        """
        timeout_ms = self._config.start_timeout_ms
        starting = asyncio.create_task(self._cluster.start(timeout_ms=timeout_ms), name="start-nodes")
        try:
            if self._shares_port:
                # The kernel gives every process that listens its part of the connections, so those that have
                # a quorum come first.
                await asyncio.wait([starting], timeout=_LISTEN_ANYWAY_S)
                if starting.done():
                    await starting
                await self._listen()
            await starting
        finally:
            starting.cancel()

    async def quorum_before(self, stop: asyncio.Future[signal.Signals]) -> bool:
        """Return True once a quorum votes, or False if `stop` comes first.

        Raises:
            StartupError: see `until_quorum`.
        """
        waiting = asyncio.ensure_future(self.until_quorum())
        either: set[asyncio.Future[Any]] = {waiting, stop}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return False
            await waiting
            return True
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def serve_until(self, stop: asyncio.Future[signal.Signals], *, grace_ms: int) -> None:
        """Serve until `stop`, then drain for `grace_ms` at most."""
        await grpc_serving.run_until_signal(
            *(listener.server for listener in self._listeners),
            on_drain=self.drain,
            notice_s=self._config.drain_notice_ms / 1000,
            grace_s=grace_ms / 1000,
            stop=stop,
        )
        self._has_stopped = True

    async def drain(self) -> None:
        """End every wait, stream and health watch; answer new calls that this server drains."""
        self._health.drain()
        await self._servicer.drain()

    def reload(self, settings: ServeConfig | None) -> None:
        """Take over what may change without a restart.

        These are the `RELOADABLE` settings, unless they are None; the files of TLS and of access; and the
        audit log, which is opened anew. A lower limit ends no wait and no command that has begun.
        """
        if settings is not None:
            now = self._config
            changed = {
                name: each for name in RELOADABLE if (each := getattr(settings, name)) != getattr(now, name)
            }
            if changed:
                self._config = now.model_copy(update=changed)
                log_setup.set_level(self._config.log_level)
                self._service.set_limits(_waiter_limits(self._config))
                self._servicer.commands_max = self._config.commands_max
                self._shares.set_limits(_share_limits(self._config))
                structlog.get_logger().info("settings_reloaded", **changed)
        for listener in self._listeners:
            listener.reload()
        if self._guard is not None:
            self._guard.reload()
