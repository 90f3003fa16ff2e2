"""Run a gRPC server with redfence's limits, health, reflection, and an orderly end.

The limits were measured. Without the pending-request options, gRPC cancels calls of a burst of a thousand at
random. Without the ping options, a frozen peer is noticed only after half a minute.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc

from redfence_proto import bounds
from redfence_server.api.certificates import CertificateFiles, Certificates
from redfence_server.api.health import Health
from redfence_server.api.parsing import AdaptHandlers, reject_malformed
from redfence_server.api.reflection import add_reflection
from redfence_server.errors import ConfigError
from redfence_server.http2.settings import ConnectionSettings, LivenessSettings, Transport
from redfence_server.sharing.shares import ConnectionShares

# A connection of either transport has these limits.
LIMITS = ConnectionSettings(
    message_bytes_max=bounds.MESSAGE_BYTES_MAX,
    metadata_bytes_max=16 * 1024,
    # Calls and streams of one connection. Beyond it calls fail with UNAVAILABLE until the client has learnt
    # the limit; then they queue at the client. A burst of 3,000 calls on a new connection loses a third at a
    # limit of 1,000, and none at 4,000. A flood of 20,000 reset calls costs 31 MB; without a limit, 110 MB.
    streams_max=4_000,
    # The contract lets a client ping every second; half of it is room for jitter. The third early ping ends
    # the connection. A client that leaves a ping unanswered for 5 s is dropped.
    liveness=LivenessSettings(
        handshake_s=10.0,
        ping_after_s=20.0,
        ping_timeout_s=5.0,
        # No limit on a connection's age: it would end waiting calls and streams without need.
        idle_s=600.0,
        peer_ping_interval_s=0.5,
        early_pings_max=2,
    ),
)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", LIMITS.message_bytes_max),
    ("grpc.max_metadata_size", LIMITS.metadata_bytes_max),
    ("grpc.max_concurrent_streams", LIMITS.streams_max),
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    ("grpc.keepalive_time_ms", _ms(LIMITS.liveness.ping_after_s)),
    ("grpc.keepalive_timeout_ms", _ms(LIMITS.liveness.ping_timeout_s)),
    ("grpc.http2.ping_timeout_ms", _ms(LIMITS.liveness.ping_timeout_s)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", _ms(LIMITS.liveness.peer_ping_interval_s)),
    ("grpc.http2.max_ping_strikes", LIMITS.liveness.early_pings_max),
    ("grpc.server_handshake_timeout_ms", _ms(LIMITS.liveness.handshake_s)),
    ("grpc.max_connection_idle_ms", _ms(LIMITS.liveness.idle_s)),
)

# After the grace, for the last bytes to leave. grpcio would wait for a peer that never reads.
_CLOSE_S = 0.5


class ListenError(ConfigError):
    """The server cannot or must not listen on the address; the message names the address and the cause."""


class Server(Protocol):
    """Names the methods of `grpc.aio.Server` that both transports have; both take the same servicers."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any], /) -> None:
        """Serve the methods of these handlers."""

    def add_insecure_port(self, address: str, /) -> int:
        """Bind the address and return its port."""

    def add_secure_port(self, address: str, credentials: Any, /) -> int:
        """Bind the address for TLS and return its port."""

    async def start(self) -> None:
        """Accept calls."""

    async def stop(self, grace: float | None) -> None:
        """Accept no more calls, and end the running ones after `grace` seconds."""


Wrap = Callable[[str, Any], Any]
"""Takes the path and the handler of a method, and returns the handler to call in its place."""


def new_server(
    transport: Transport = Transport.GRPCIO,
    *,
    shares: ConnectionShares | None = None,
    share_port: bool = False,
    wrap: Wrap | None = None,
) -> Any:
    """Return a `Server` with redfence's limits and no services yet.

    `shares` bounds the connections of the transport `fast`; the default is `ConnectionShares.of()`. It does
    not bound grpcio, which shows a connection only with its first call.

    `share_port` lets it listen beside the other workers of its supervisor. `wrap` gets the handler of each
    method with all that this server adds to it.

    Raises:
        ConfigError: the transport needs a package that is not installed.
    """
    if transport is Transport.GRPCIO:
        # Two servers on one port would share the calls at random; an error is better.
        options = (*_OPTIONS, ("grpc.so_reuseport", int(share_port)))
        outer = [] if wrap is None else [AdaptHandlers(wrap)]
        return grpc.aio.server(options=options, interceptors=[*outer, AdaptHandlers(reject_malformed)])
    try:
        # Only this transport needs the package ngh2.
        from redfence_server.http2.server import Server as FastServer  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"transport: fast needs the package {error.name}, which is not installed; "
            "install it with: pip install 'redfence[fast]'"
        ) from error

    def adapt(path: str, handler: Any) -> Any:
        handler = reject_malformed(path, handler)
        return handler if wrap is None else wrap(path, handler)

    return FastServer(LIMITS, adapt=adapt, shares=shares, share_port=share_port)


def add_health_and_reflection(
    server: Server, servicer: Health, service_names: Sequence[str], *, reflection: bool = True
) -> None:
    """Add the standard health service, and reflection of these services and of health."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if reflection:
        add_reflection(server, (*service_names, health.SERVICE_NAME))


def protection(
    listen: str,
    *,
    cert: Path | None,
    key: Path | None,
    client_ca: Path | None,
    insecure: bool,
    setting: str = "listen",
) -> Certificates | None:
    """Return the certificates to serve HOST:PORT with, or None to serve it in plain text.

    `setting` is what an error calls the address.

    Raises:
        CertificateError: a file cannot be used.
        ListenError: other machines would reach a port without TLS, and `insecure` does not allow that.
    """
    host, _ = parse_listen(listen, setting=setting)
    if cert is not None and key is not None:
        return Certificates(CertificateFiles(cert, key, client_ca))
    if not insecure and not is_loopback(host):
        raise ListenError(
            f"{setting}: {listen} is open to other machines, without TLS; set tls_cert and tls_key, or set "
            "insecure to serve in plain text, or listen on 127.0.0.1"
        )
    return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host: 127.0.0.0/8, ::1 and localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(
    server: Server,
    listen: str,
    *,
    certificates: Certificates | None = None,
    share_port: bool = False,
    setting: str = "listen",
) -> int:
    """Bind HOST:PORT and return the port; port 0 takes any free one.

    With certificates the port speaks only TLS. With `share_port`, as given to `new_server`, the supervisor
    of this process holds the port. `setting` is what an error calls the address.

    Raises:
        ListenError: the address is malformed or in use.
    """
    host, port = parse_listen(listen, setting=setting)
    try:
        if not share_port:
            for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                probe(family, address)
        if certificates is None:
            return server.add_insecure_port(listen)
        is_grpcio = isinstance(server, grpc.aio.Server)
        return server.add_secure_port(
            listen, certificates.for_grpcio() if is_grpcio else certificates.for_fast()
        )
    except OSError as error:
        raise cannot_listen(listen, error.strerror, setting=setting) from error
    except RuntimeError as error:
        raise cannot_listen(listen, error, setting=setting) from error


def parse_listen(listen: str, *, setting: str = "listen") -> tuple[str, int]:
    """Return the host, without the brackets of IPv6, and the port; an error names the setting.

    Raises:
        ListenError: the address is malformed.
    """
    host, separator, port_text = listen.rpartition(":")
    if not separator or not host or not port_text.isdecimal() or int(port_text) > 65_535:
        raise ListenError(f"{setting}: {listen!r} is not HOST:PORT with a port from 0 to 65535")
    return host.strip("[]"), int(port_text)


def probe(family: int, address: tuple[Any, ...]) -> None:
    """Raise the system's OSError if the address is in use.

    gRPC gives no reason, and writes its own line to standard error.
    """
    with socket.socket(family, socket.SOCK_STREAM) as prober:
        if family == socket.AF_INET6:
            prober.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        prober.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        prober.bind(address)


def cannot_listen(listen: str, reason: object, *, setting: str = "listen") -> ListenError:
    """Return the error that names the setting, the address and the reason."""
    return ListenError(f"{setting}: cannot listen on {listen}: {reason}")


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
    *servers: Server,
    on_drain: Callable[[], Awaitable[None]],
    notice_s: float,
    grace_s: float,
    stop: asyncio.Future[signal.Signals],
) -> None:
    """Serve until `stop`, then drain; return when all calls have ended, at most 0.5 s after `grace_s`.

    For the first `notice_s` of the grace the server takes connections and answers that it drains.

    Call `stop_signal` for `stop` before the server reports that it is ready.

    `on_drain` must end the open streams, because `server.stop` would wait the whole grace for them. It must
    have new calls answered with a reason, because gRPC cancels a call to a stopped server without one.
    """
    number = await stop
    structlog.get_logger().info("draining", signal=number.name, grace_s=grace_s)
    await on_drain()
    notice_s = min(notice_s, grace_s)
    await asyncio.sleep(notice_s)
    await asyncio.gather(*(stop_within(server, grace_s - notice_s) for server in servers))
    structlog.get_logger().info("stopped")


async def stop_within(server: Server, grace_s: float) -> None:
    """Accept no more calls, and end the running ones after `grace_s`; return 0.5 s later at most."""
    # Not by a timeout, which would cancel the stop: grpcio then fails at the next one.
    stopping = asyncio.ensure_future(server.stop(grace_s))
    await asyncio.wait([stopping], timeout=grace_s + _CLOSE_S)
    if stopping.done():
        await stopping
    else:
        structlog.get_logger().warning("connections_abandoned", after_s=grace_s + _CLOSE_S)
