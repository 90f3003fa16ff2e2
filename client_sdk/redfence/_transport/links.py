"""What a client needs of a server: a session to stream over and single calls beside it.

gRPC implements these Protocols, and so does the in-memory server of `redfence.testing`; the clients know nothing else.
A link is to one server. Its methods raise `RedfenceError`s only.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

from redfence_proto.v1 import lock_pb2

Method: TypeAlias = Literal["GetLock", "CheckToken", "ClusterStatus"]
"""The single calls."""


class AsyncLink(Protocol):
    """An open session with one server, for asyncio."""

    async def send(self, request: lock_pb2.SessionRequest, /) -> None:
        """Write a message; wait while the stream is congested."""
        ...

    async def receive(self) -> lock_pb2.SessionResponse | None:
        """Return the next message, or None when the server ended the stream or `abort` was called."""
        ...

    async def call(self, method: Method, request: Any, /, *, timeout_ms: int) -> Any:
        """Make a single call; wait for its answer for at most `timeout_ms`."""
        ...

    def abort(self) -> None:
        """End the stream at once; `receive` returns None."""
        ...

    async def close(self) -> None:
        """Give everything back. The link is not used afterwards."""
        ...


class AsyncConnector(Protocol):
    """Makes links."""

    async def connect(self, address: str, /, *, timeout_ms: int) -> AsyncLink:
        """Open a session with the server at `address`, within `timeout_ms`."""
        ...


class SyncLink(Protocol):
    """An open session with one server, for threads."""

    def send(self, request: lock_pb2.SessionRequest, /) -> None:
        """Hand over a message to be written; never block."""
        ...

    def receive(self) -> lock_pb2.SessionResponse | None:
        """Return the next message, or None when the server ended the stream or `abort` was called."""
        ...

    def call(self, method: Method, request: Any, /, *, timeout_ms: int) -> Any:
        """Make a single call; wait for its answer for at most `timeout_ms`."""
        ...

    def abort(self) -> None:
        """End the stream at once, from any thread; `receive` returns None."""
        ...

    def close(self) -> None:
        """Give everything back. The link is not used afterwards."""
        ...


class SyncConnector(Protocol):
    """Makes links."""

    def connect(self, address: str, /, *, timeout_ms: int) -> SyncLink:
        """Open a session with the server at `address`, within `timeout_ms`."""
        ...
