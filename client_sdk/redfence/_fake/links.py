"""Opens links to the in-memory server for asyncio and for threads, and lets a test stop its addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Generator
from queue import SimpleQueue
from typing import Any

from redfence._errors import OutcomeUnknownError, UnavailableError, WrongServiceError
from redfence._fake.server import Deliver, FakeServer, FakeSession
from redfence._transport.links import Method
from redfence_proto.v1 import lock_pb2

_EVERYWHERE = "*"
_METHODS = frozenset({"GetLock", "CheckToken", "ClusterStatus"})


def _no_admin_service() -> WrongServiceError:
    return WrongServiceError(
        "the server in memory has no admin service; use the methods of FakeLockServer, or a real server"
    )


class FakeNetwork:
    """Connects any number of addresses to one in-memory server.

    Attributes:
        server: that server.
    """

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self._stopped: frozenset[str] = frozenset()
        self._sessions: dict[FakeSession, str] = {}

    def stop(self, addresses: Collection[str]) -> None:
        """Break the links to these addresses and refuse new ones; without an address, to all."""
        self._stopped |= set(addresses) or {_EVERYWHERE}
        for session, address in list(self._sessions.items()):
            if self._is_stopped(address):
                self.disconnect(session)

    def start(self, addresses: Collection[str]) -> None:
        """Accept links to these addresses again; without an address, to all."""
        self._stopped = self._stopped - set(addresses) if addresses else frozenset()

    def connect(self, address: str, deliver: Deliver) -> FakeSession:
        """Open a session.

        Raises:
            UnavailableError: the address is stopped.
        """
        if self._is_stopped(address):
            raise UnavailableError(f"{address} refused the connection")
        session = self.server.connect(deliver)
        self._sessions[session] = address
        return session

    def disconnect(self, session: FakeSession) -> None:
        """End a session; does nothing if it has ended."""
        self._sessions.pop(session, None)
        session.close()

    def call(self, method: Method, request: Any) -> Any:
        """Answer a unary call.

        Raises:
            OutcomeUnknownError: the server is frozen; no time passes.
            UnavailableError: the server reaches no quorum, and the call needs one.
            WrongServiceError: the server in memory does not have the method.
        """
        if method not in _METHODS:
            raise _no_admin_service()
        if self.server.frozen:
            raise OutcomeUnknownError(f"no answer to {method}: the server is frozen")
        if self.server.quorum_lost and method != "ClusterStatus":
            raise UnavailableError("no quorum of nodes answered", error_reason="QUORUM_UNAVAILABLE")
        return self.server.call(method, request)

    def _is_stopped(self, address: str) -> bool:
        return _EVERYWHERE in self._stopped or address in self._stopped


class FakeAsyncConnector:
    """Opens in-memory links for asyncio."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network

    async def connect(self, address: str, /, *, timeout_ms: int) -> FakeAsyncLink:  # noqa: ARG002
        """Open a session at once."""
        return FakeAsyncLink(self._network, address)


class FakeAsyncLink:
    """A link to the in-memory server."""

    def __init__(self, network: FakeNetwork, address: str) -> None:
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._responses: asyncio.Queue[lock_pb2.SessionResponse | None] = asyncio.Queue()
        self._session = network.connect(address, self._deliver)

    def _deliver(self, response: lock_pb2.SessionResponse | None) -> None:
        # The loop of a client may end before the server does.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._responses.put_nowait, response)

    async def send(self, request: lock_pb2.SessionRequest, /) -> None:
        """Run the commands; their answers arrive through the loop."""
        self._session.handle(request)

    async def receive(self) -> lock_pb2.SessionResponse | None:
        """Return the next message, or None at the end of the session."""
        return await self._responses.get()

    async def call(self, method: Method, request: Any, /, *, timeout_ms: int) -> Any:  # noqa: ARG002
        """Answer a unary call at once."""
        return self._network.call(method, request)

    def watch(
        self, _request: lock_pb2.WatchLocksRequest, /
    ) -> AsyncGenerator[lock_pb2.WatchLocksResponse, None]:
        """Raise WrongServiceError."""
        raise _no_admin_service()

    def abort(self) -> None:
        """End the session."""
        self._network.disconnect(self._session)

    async def close(self) -> None:
        """End the session."""
        self.abort()


class FakeSyncConnector:
    """Opens in-memory links for threads."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network

    def connect(
        self,
        address: str,
        /,
        *,
        timeout_ms: int,  # noqa: ARG002
        is_closing: Callable[[], bool],  # noqa: ARG002
    ) -> FakeSyncLink:
        """Open a session at once."""
        return FakeSyncLink(self._network, address)


class FakeSyncLink:
    """A link to the in-memory server."""

    def __init__(self, network: FakeNetwork, address: str) -> None:
        self._network = network
        self._responses: SimpleQueue[lock_pb2.SessionResponse | None] = SimpleQueue()
        self._session = network.connect(address, self._responses.put)

    def send(self, request: lock_pb2.SessionRequest, /) -> None:
        """Run the commands; their answers arrive through the queue."""
        self._session.handle(request)

    def receive(self) -> lock_pb2.SessionResponse | None:
        """Return the next message, or None at the end of the session."""
        return self._responses.get()

    def call(self, method: Method, request: Any, /, *, timeout_ms: int) -> Any:  # noqa: ARG002
        """Answer a unary call at once."""
        return self._network.call(method, request)

    def watch(
        self, _request: lock_pb2.WatchLocksRequest, /
    ) -> Generator[lock_pb2.WatchLocksResponse, None, None]:
        """Raise WrongServiceError."""
        raise _no_admin_service()

    def abort(self) -> None:
        """End the session."""
        self._network.disconnect(self._session)

    def close(self) -> None:
        """End the session."""
        self.abort()
