"""Build the server from its parts: the only place that makes real clocks, randomness, nodes and servers."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_server import log_setup
from redfence_server.access.audit import AuditLog
from redfence_server.access.guard import Guard
from redfence_server.access.rules import load_rules
from redfence_server.api import serving as grpc_serving
from redfence_server.api.servicer import AdminServicer, LockServicer
from redfence_server.clock import SystemClock, WallClock
from redfence_server.config import ServeConfig
from redfence_server.errors import ConfigError
from redfence_server.lock_service import LockService
from redfence_server.locking.redlock import Redlock
from redfence_server.membership.admin import AdminSettings
from redfence_server.membership.heartbeat import HeartbeatSettings
from redfence_server.membership.joining import JoiningSettings
from redfence_server.membership.node_clock import ClockWitnesses
from redfence_server.nodes.cluster import NodeCluster, check_urls
from redfence_server.nodes.link import LinkSettings
from redfence_server.randomness import Randomness, SystemRandomness
from redfence_server.redis_io.dial import Dial, dial
from redfence_server.redis_io.scripts import Packer
from redfence_server.waiting.waiter_limiter import WaiterLimits

SERVICE_NAMES = tuple(
    lock_pb2.DESCRIPTOR.services_by_name[name].full_name for name in ("LockService", "AdminService")
)
LIVENESS_NAME = "redfence.liveness"
"""The health of this name is SERVING as long as the process answers, with or without a quorum."""
# A worker listens after this time even without a quorum, so that the port answers why it is not ready.
_LISTEN_ANYWAY_S = 1.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A lock server that answers calls.

    Attributes:
        until_quorum: connects to the nodes, once, and returns when a quorum votes. Until then the health is
            NOT_SERVING, and locks are UNAVAILABLE. Raises StartupError: a node must not vote, or
            `start_timeout_ms` is over.
        drain: ends every wait, stream and health watch.
        reload: takes over what may change without a restart: the log level of the settings, unless
            they are None, the files of access, and the audit log, which it opens anew.
    """

    port: int
    grpc_server: grpc_serving.Server
    until_quorum: Callable[[], Awaitable[None]]
    drain: Callable[[], Awaitable[None]]
    reload: Callable[[ServeConfig | None], None]


def assemble(
    config: ServeConfig,
    *,
    clock: WallClock,
    randomness: Randomness,
    dial: Dial,
    accept_empty_nodes: bool = False,
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
        Redlock(cluster.links, clock=clock, randomness=randomness),
        clock=clock,
        randomness=randomness,
        ttl_ms_max=cluster.ttl_ms_max,
        limits=WaiterLimits(
            server=config.waiters_max,
            resource=config.waiters_per_resource_max,
            connection=config.waiters_per_connection_max,
        ),
        quorum_may_return=cluster.quorum_may_return,
    )
    cluster.on_quorum_lost = service.quorum_lost
    return cluster, service


def _open_guard(config: ServeConfig, clock: WallClock) -> Guard | None:
    """Return what identifies callers; None if everything is allowed and nothing is audited.

    Raises:
        ConfigError: a file is wrong.
    """
    load = partial(load_rules, config.access)
    load()
    audit = AuditLog(config.audit_log, clock=clock) if config.audit_log else None
    return Guard(load, clock=clock, audit=audit) if config.policy_file or audit else None


@asynccontextmanager
async def lock_server(
    config: ServeConfig, *, accept_empty_nodes: bool = False, share_port: bool = False
) -> AsyncIterator[RunningServer]:
    """Run a lock server within `async with`, from the entry until the exit; call `until_quorum` on entry.

    `accept_empty_nodes` takes an empty node for a wiped one, even if this server has never seen it. Only a
    program that runs the nodes itself may set it. `share_port` is for a worker, whose supervisor holds the
    port of `config.listen`: the server listens once it has a quorum, or after a second without one.

    Raises:
        StartupError: a setting is wrong.
    """
    if not __debug__:
        raise ConfigError("refusing to run under python -O, because assertions guard the safety of locks")
    clock, randomness = SystemClock(), SystemRandomness()
    cluster, service = assemble(
        config, clock=clock, randomness=randomness, dial=dial, accept_empty_nodes=accept_empty_nodes
    )
    guard = _open_guard(config, clock)
    servicer = LockServicer(
        service,
        clock=clock,
        randomness=randomness,
        commands_max=config.commands_max,
        drain_grace_ms=config.drain_grace_ms,
        guard=guard,
    )
    certificates = grpc_serving.protection(
        config.listen,
        cert=config.tls_cert,
        key=config.tls_key,
        client_ca=config.tls_client_ca,
        insecure=config.insecure,
    )
    server = grpc_serving.new_server(config.transport, share_port=share_port)
    lock_pb2_grpc.add_LockServiceServicer_to_server(servicer, server)
    lock_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(cluster.view, guard=guard), server)
    health = grpc_serving.add_health_and_reflection(server, SERVICE_NAMES, liveness_name=LIVENESS_NAME)
    cluster.on_granting = lambda granting: health.set_serving(serving=granting)

    async def listen() -> int:
        port = grpc_serving.bind(server, config.listen, certificates=certificates, share_port=share_port)
        await server.start()
        return port

    async def until_quorum() -> None:
        starting = asyncio.create_task(cluster.start(timeout_ms=config.start_timeout_ms), name="start-nodes")
        try:
            if share_port:
                # The kernel gives every process that listens its part of the connections, so those that have
                # a quorum come first.
                await asyncio.wait([starting], timeout=_LISTEN_ANYWAY_S)
                if starting.done():
                    await starting
                await listen()
            await starting
        finally:
            starting.cancel()

    async def drain() -> None:
        health.drain()
        await servicer.drain()

    def reload(settings: ServeConfig | None) -> None:
        if settings is not None:
            log_setup.set_level(settings.log_level)
        if guard is not None:
            guard.reload()

    try:
        # The port first, because it is the likelier mistake and needs no connection to a node.
        port = 0 if share_port else await listen()
        yield RunningServer(port, server, until_quorum, drain, reload)
    finally:
        health.drain()
        await server.stop(0)
        await cluster.close()
        if guard is not None:
            guard.close()


async def quorum_before(stop: asyncio.Future[signal.Signals], running: RunningServer) -> bool:
    """Return True once a quorum votes, or False if `stop` comes first.

    Raises:
        StartupError: see `RunningServer.until_quorum`.
    """
    waiting = asyncio.ensure_future(running.until_quorum())
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


def relax_garbage_collector() -> None:
    """Make the garbage collector run rarely; call it once everything that lasts has been made.

    Commands make no reference cycles, so counting references frees them. By default the collector would run
    after every few commands, and now and then over all that was imported: an eighth of the server's CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def drain_at(
    stop: asyncio.Future[signal.Signals], running: RunningServer, settings: ServeConfig
) -> None:
    """Serve until `stop`, then drain for `drain_grace_ms` at most."""
    await grpc_serving.run_until_signal(
        running.grpc_server,
        on_drain=running.drain,
        notice_s=settings.drain_notice_ms / 1000,
        grace_s=settings.drain_grace_ms / 1000,
        stop=stop,
    )
