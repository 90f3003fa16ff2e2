"""Listen and drain, with the methods of `grpc.aio.Server` that generated code and `api/serving.py` use."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc
import ngh2

from redfence_server.http2.connection import Connection, http2_settings
from redfence_server.http2.context import Method
from redfence_server.http2.places import Places
from redfence_server.http2.settings import ConnectionSettings
from redfence_server.http2.tls import TlsConnection
from redfence_server.sharing.shares import ConnectionShares

# asyncio accepts so many connections in one turn of the event loop. Each costs about 0.2 ms.
_ACCEPTS_PER_TURN: Final = 16
# For each of the three steps after the grace: the calls end, the last bytes leave, the sockets close.
_CLOSE_S: Final = 0.15


@dataclass(frozen=True, slots=True)
class _CallDetails:
    method: str
    invocation_metadata: tuple[()] = ()


class Server:
    """Serves the methods of registered services; see `grpc.aio.Server` for the methods below.

    Args:
        settings: the limits of each connection.
        adapt: changes the handler of each method before its first call; gets the path and the handler.
        shares: what peers share; by default as much as a server of redfence has.
        share_port: lets other processes of this user listen on the same port; each gets its part.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        adapt: Callable[[str, Any], Any],
        shares: ConnectionShares | None = None,
        share_port: bool = False,
    ) -> None:
        self.settings = settings
        shares = shares or ConnectionShares.of()
        self.places = Places(shares.places)
        self.buffered_bytes = shares.buffered_bytes
        self._share_port = share_port
        self.http2_settings: ngh2.Configuration = http2_settings(settings)
        self._adapt = adapt
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._methods: dict[str, Method] = {}
        # Each with its context for TLS, or None.
        self._sockets: list[tuple[socket.socket, ssl.SSLContext | None]] = []
        self._listeners: list[asyncio.Server] = []
        self._connections: set[Connection] = set()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Serve the methods of these handlers."""
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Do nothing: generated code passes the same handlers to `add_generic_rpc_handlers`."""

    def add_insecure_port(self, address: str) -> int:
        """Bind HOST:PORT, every address of the host, and return the port; port 0 takes any free one.

        Raises:
            RuntimeError: an address cannot be bound.
        """
        return self._bind(address, None)

    def add_secure_port(self, address: str, context: ssl.SSLContext) -> int:
        """Do as `add_insecure_port`, for connections that begin with a TLS handshake.

        The context must offer `h2` by ALPN. A connection that does not agree on `h2` ends at once.
        """
        return self._bind(address, context)

    def _bind(self, address: str, context: ssl.SSLContext | None) -> int:
        host, _, port_text = address.rpartition(":")
        port = int(port_text)
        # As grpcio does: both wildcards mean every address of both families.
        both = host in {"0.0.0.0", "[::]"} and socket.has_dualstack_ipv6()
        try:
            for family, _, _, _, where in socket.getaddrinfo(
                "::" if both else host.strip("[]"), port, type=socket.SOCK_STREAM
            ):
                bound = socket.create_server(
                    (where[0], port), family=family, dualstack_ipv6=both, reuse_port=self._share_port
                )
                self._sockets.append((bound, context))
                port = bound.getsockname()[1]
        except OSError as error:
            self._close_sockets()
            raise RuntimeError(str(error)) from error
        return port

    async def start(self) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        while self._sockets:
            bound, context = self._sockets.pop()
            listener = await loop.create_server(
                partial(self._new_connection, context), sock=bound, backlog=_ACCEPTS_PER_TURN
            )
            # The queue of the kernel is longer: asyncio takes one number for both.
            bound.listen(socket.SOMAXCONN)
            self._listeners.append(listener)

    def _new_connection(self, context: ssl.SSLContext | None) -> asyncio.BaseProtocol:
        connection = Connection(self)
        if context is None:
            return connection
        return TlsConnection(
            connection,
            context,
            places=self.places,
            handshake_s=self.settings.liveness.handshake_s,
            shutdown_s=_CLOSE_S,
        )

    async def stop(self, grace: float | None) -> None:
        """Accept no more calls, give the running ones `grace` seconds, then end them. Harmless to repeat."""
        self._close_sockets()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in self._connections:
            connection.out.goaway()
        await self._tasks_end(grace or 0.0)
        for connection in self._connections:
            connection.end_calls(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
        await self._tasks_end(_CLOSE_S)
        for connection in self._connections:
            connection.out.close()
        await self.places.all_left(timeout_s=_CLOSE_S)
        self.places.abort_all()
        await self.places.all_left(timeout_s=_CLOSE_S)

    async def _tasks_end(self, timeout_s: float) -> None:
        tasks = [task for connection in self._connections for task in connection.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def _close_sockets(self) -> None:
        while self._sockets:
            self._sockets.pop()[0].close()

    # --- for connections

    def method(self, path: str) -> Method | None:
        """Return the method with this path, or None."""
        if path not in self._methods:
            details: Any = _CallDetails(path)
            found = (handler.service(details) for handler in self._handlers)
            handler = next((each for each in found if each is not None), None)
            if handler is None:
                return None
            self._methods[path] = Method.of(self._adapt(path, handler))
        return self._methods[path]

    def opened(self, connection: Connection) -> None:
        """Note that calls may come."""
        self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        """Forget the connection."""
        self._connections.discard(connection)
