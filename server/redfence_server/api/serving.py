"""How redfence runs a gRPC server: limits, health, reflection, and an orderly end.

The limits were measured. Without the pending-request options, a burst of a thousand calls is cancelled at random. Without the
ping options, a frozen peer is noticed after half a minute. Without a bound on streams, a flood of resets takes memory.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from redfence_proto import bounds
from redfence_server.api.parsing import RejectMalformedMessages

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", bounds.MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", 16 * 1024),
    # Calls and streams of one connection. More are refused (UNAVAILABLE) until the client has learnt the bound, then they
    # queue at the client. Measured: a burst of 3,000 calls on a new connection loses a third at 1,000 and none at
    # 4,000; a flood of 20,000 reset calls then costs 31 MB, and 110 MB without a bound.
    ("grpc.max_concurrent_streams", 4_000),
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    # A client may ping every 5 s without data, and a client that does not answer ours is dropped after 5 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # No bound on a connection's age: it would cut every waiting call and stream for nothing.
    ("grpc.max_connection_idle_ms", 600_000),
    # Two servers on one port would share the calls at random; better an error.
    ("grpc.so_reuseport", 0),
)
# How long a draining server goes on to answer that it is draining: a few round trips, and a load balancer's look at health.
_LAME_DUCK_S = 0.25


class ListenError(Exception):
    """The address cannot be served on; the message says which and why."""


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # the package has no types
    """The standard health service, but for its watches: they end when serving does.

    The package's own keeps each open for ever, and so one watcher makes every drain take its whole grace.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        super().__init__()
        self._names = (*service_names, "")
        self._statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {}
        self._changed = asyncio.Event()

    async def set_serving(self, *, serving: bool) -> None:
        """Set the health of every named service and of the server as a whole; no longer to serve is for good."""
        answers = health_pb2.HealthCheckResponse
        self._statuses = dict.fromkeys(self._names, answers.SERVING if serving else answers.NOT_SERVING)
        for name, status in self._statuses.items():
            await self.set(name, status)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Watch(  # noqa: N802  (the contract's name)
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Tell every change, until the server as a whole serves no more."""
        last_sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last_sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last_sent = status
            if self._statuses.get("") == health_pb2.HealthCheckResponse.NOT_SERVING:
                return
            await changed.wait()


def new_server() -> grpc.aio.Server:
    """Return a server with redfence's limits and nothing on it yet."""
    return grpc.aio.server(options=_OPTIONS, interceptors=[RejectMalformedMessages()])


def add_health_and_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> Health:
    """Add the standard health and reflection services; set the health before the server starts to serve."""
    servicer = Health(service_names)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(
        (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    return servicer


def bind(server: grpc.aio.Server, listen: str) -> int:
    """Bind HOST:PORT (port 0: any free one) and return the port.

    Raises:
        ListenError: the address is malformed or in use.
    """
    host, separator, port_text = listen.rpartition(":")
    if not separator or not host or not port_text.isdecimal() or int(port_text) > 65_535:
        raise ListenError(f"{listen!r} is not HOST:PORT with a port from 0 to 65535")
    _probe(host.strip("[]"), int(port_text), listen)
    try:
        return server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {listen}: {error}") from error


def _probe(host: str, port: int, listen: str) -> None:
    """Fail with the system's own reason; gRPC would write a line of its own to standard error and give none."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise ListenError(f"cannot listen on {listen}: {error.strerror}") from error


def stop_signal() -> asyncio.Future[signal.Signals]:
    """Catch SIGTERM and SIGINT from now on; the future is done with the first. A second one has its default effect."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)
        # A second signal ends the process now.
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note, number)
    return received


async def run_until_signal(
    server: grpc.aio.Server,
    *,
    on_drain: Callable[[], Awaitable[None]],
    grace_s: float,
    stop: asyncio.Future[signal.Signals],
) -> None:
    """Serve until `stop`, then send callers elsewhere, and return when all calls have ended, after `grace_s` at the latest.

    `stop` comes from `stop_signal`, which must catch the signals before the server says that it is ready.

    `on_drain` ends the open streams, for which `server.stop` alone would wait the whole grace, and has new calls answered with
    a reason. The server stops only after that: gRPC cancels a call to a stopped server without a reason.
    """
    number = await stop
    structlog.get_logger().info("draining", signal=number.name, grace_s=grace_s)
    await on_drain()
    lame_s = min(_LAME_DUCK_S, grace_s)
    await asyncio.sleep(lame_s)
    await server.stop(grace_s - lame_s)
    structlog.get_logger().info("stopped")
