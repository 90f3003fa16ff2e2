"""Defines the Protocols of a link to one server: a session stream, and unary calls beside it.

The gRPC links implement these Protocols, and so do the links of `redfence.testing`. A client uses
nothing else of its connection. The methods raise only `RedfenceError`s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, Literal, Protocol, TypeAlias

from redfence_proto.v1 import lock_pb2

Method: TypeAlias = Literal[
    "GetLock", "CheckToken", "ClusterStatus", "ForceRelease", "ListLocks", "ListSessions"
]
"""The names of the unary calls."""


class AsyncLink(Protocol):
    """An open session with one server, for asyncio."""

    async def send(self, request: lock_pb2.SessionRequest, /) -> None:
        """Write a message; wait while the stream is congested."""
        ...

    async def receive(self) -> lock_pb2.SessionResponse | None:
        """Return the next message, or None when the server ended the stream or `abort` was called."""
        ...

    async def call(self, method: Method, request: Any, /, *, timeout_ms: int) -> Any:
        """Make a unary call; wait at most `timeout_ms` for its answer."""
        ...

    def watch(
        self, request: lock_pb2.WatchLocksRequest, /
    ) -> AsyncGenerator[lock_pb2.WatchLocksResponse, None]:
        """Yield the messages of a watch of locks; end with an UnavailableError when the transport fails."""
        ...

    def abort(self) -> None:
        """End the stream at once; `receive` returns None."""
        ...

    async def close(self) -> None:
        """Close the link and free its resources. It must not be used afterwards."""
        ...


class AsyncConnector(Protocol):
    """Opens links."""

    async def connect(self, address: str, /, *, timeout_ms: int) -> AsyncLink:
        """Open a session with the server at `address`.

        Raises:
            UnavailableError: no server accepted the connection within `timeout_ms`.
        """
        ...


class SyncLink(Protocol):
    """An open session with one server, for threads."""

    def send(self, request: lock_pb2.SessionRequest, /) -> None:
        """Queue a message for writing; never block."""
        ...

    def receive(self) -> lock_pb2.SessionResponse | None:
        """Return the next message, or None when the server ended the stream or `abort` was called."""
        ...

    def call(self, method: Method, request: Any, /, *, timeout_ms: int) -> Any:
        """Make a unary call; wait at most `timeout_ms` for its answer."""
        ...

    def watch(
        self, request: lock_pb2.WatchLocksRequest, /
    ) -> Generator[lock_pb2.WatchLocksResponse, None, None]:
        """Yield the messages of a watch of locks; end with an UnavailableError when the transport fails."""
        ...

    def abort(self) -> None:
        """End the stream at once, from any thread; `receive` returns None."""
        ...

    def close(self) -> None:
        """Close the link and free its resources. It must not be used afterwards."""
        ...


class SyncConnector(Protocol):
    """Opens links."""

    def connect(self, address: str, /, *, timeout_ms: int, is_closing: Callable[[], bool]) -> SyncLink:
        """Open a session with the server at `address`.

        Raises:
            UnavailableError: no server accepted the connection within `timeout_ms`, or until the client
                began to close, which `is_closing` tells.
        """
        ...
