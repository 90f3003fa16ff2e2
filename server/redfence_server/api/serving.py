"""Run a gRPC server with redfence's limits, health, reflection, and an orderly end.

The limits were measured. Without the pending-request options, gRPC cancels calls of a burst of a thousand at
random. Without the ping options, a frozen peer is noticed only after half a minute.
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

from redfence_proto import bounds
from redfence_server.api.parsing import RejectMalformedMessages
from redfence_server.api.reflection import add_reflection
from redfence_server.errors import ConfigError

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", bounds.MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", 16 * 1024),
    # Calls and streams of one connection. Beyond it calls fail with UNAVAILABLE until the client has learnt
    # the limit; then they queue at the client. A burst of 3,000 calls on a new connection loses a third at a
    # limit of 1,000, and none at 4,000. A flood of 20,000 reset calls costs 31 MB; without a limit, 110 MB.
    ("grpc.max_concurrent_streams", 4_000),
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    # The contract lets a client ping every second; half of it is room for jitter. The third early ping ends
    # the connection. A client that leaves a ping unanswered for 5 s is dropped.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # No limit on a connection's age: it would end waiting calls and streams without need.
    ("grpc.max_connection_idle_ms", 600_000),
)
# How long a draining server still answers DRAINING: a few round trips, and one check by a load balancer.
_LAME_DUCK_S = 0.25


class ListenError(ConfigError):
    """The server cannot listen on the address; the message names the address and the cause."""


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Serves the standard health service; its watches end when the server stops serving.

    The package's own service never ends a watch, so one watcher would make every drain take its whole grace.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        super().__init__()
        self._names = (*service_names, "")
        self._statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {}
        self._changed = asyncio.Event()

    async def set_serving(self, *, serving: bool) -> None:
        """Set the health of every named service and of the server; NOT_SERVING ends every watch."""
        answers = health_pb2.HealthCheckResponse
        self._statuses = dict.fromkeys(self._names, answers.SERVING if serving else answers.NOT_SERVING)
        for name, status in self._statuses.items():
            await self.set(name, status)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Watch(  # noqa: N802  (the contract's name)
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Send each change of health, until the server stops serving."""
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


def new_server(*, share_port: bool = False) -> grpc.aio.Server:
    """Return a server with redfence's limits and no services yet.

    `share_port` lets it listen beside the other workers of its supervisor.
    """
    # Two servers on one port would share the calls at random; an error is better.
    options = (*_OPTIONS, ("grpc.so_reuseport", int(share_port)))
    return grpc.aio.server(options=options, interceptors=[RejectMalformedMessages()])


def add_health_and_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> Health:
    """Add the standard health and reflection services; the caller sets the health before serving starts."""
    servicer = Health(service_names)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    add_reflection(server, (*service_names, health.SERVICE_NAME))
    return servicer


def bind(server: grpc.aio.Server, listen: str, *, share_port: bool = False) -> int:
    """Bind HOST:PORT and return the port; port 0 takes any free one.

    With `share_port`, as given to `new_server`, the supervisor of this process holds the port.

    Raises:
        ListenError: the address is malformed or in use.
    """
    host, port = parse_listen(listen)
    try:
        if not share_port:
            for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                probe(family, kind, protocol, address)
        return server.add_insecure_port(listen)
    except OSError as error:
        raise cannot_listen(listen, error.strerror) from error
    except RuntimeError as error:
        raise cannot_listen(listen, error) from error


def parse_listen(listen: str) -> tuple[str, int]:
    """Return the host, without the brackets of IPv6, and the port.

    Raises:
        ListenError: the address is malformed.
    """
    host, separator, port_text = listen.rpartition(":")
    if not separator or not host or not port_text.isdecimal() or int(port_text) > 65_535:
        raise ListenError(f"listen: {listen!r} is not HOST:PORT with a port from 0 to 65535")
    return host.strip("[]"), int(port_text)


def probe(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> None:
    """Raise the system's OSError if the address is in use.

    gRPC gives no reason, and writes its own line to standard error.
    """
    with socket.socket(family, kind, protocol) as prober:
        prober.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        prober.bind(address)


def cannot_listen(listen: str, reason: object) -> ListenError:
    """Return the error that names the address and the reason."""
    return ListenError(f"listen: cannot listen on {listen}: {reason}")


def stop_signal() -> asyncio.Future[signal.Signals]:
    """Return a future of the first SIGTERM or SIGINT; a second signal ends the process."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)
        # From now on the default handlers apply.
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return received


async def run_until_signal(
    server: grpc.aio.Server,
    *,
    on_drain: Callable[[], Awaitable[None]],
    grace_s: float,
    stop: asyncio.Future[signal.Signals],
) -> None:
    """Serve until `stop`, then drain; return when all calls have ended, after `grace_s` at the latest.

    Call `stop_signal` for `stop` before the server reports that it is ready.

    `on_drain` must end the open streams, because `server.stop` would wait the whole grace for them. It must
    have new calls answered with a reason, because gRPC cancels a call to a stopped server without one.
    """
    number = await stop
    structlog.get_logger().info("draining", signal=number.name, grace_s=grace_s)
    await on_drain()
    lame_s = min(_LAME_DUCK_S, grace_s)
    await asyncio.sleep(lame_s)
    await server.stop(grace_s - lame_s)
    structlog.get_logger().info("stopped")
