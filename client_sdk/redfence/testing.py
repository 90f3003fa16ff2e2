"""Runs a lock server in memory for the tests of programs that use redfence. The client code is the real one.

    def test_billing():
        with FakeLockServer() as fake, pytest.raises(redfence.LeaseLostError):
            with fake.client().lock("orders/42", ttl=1) as lease:
                fake.take_away("orders/42")         # another holder gets the lock
                assert lease.lost.wait(timeout=5)   # set at the next renewal; leaving the body raises

With `FakeLockServer(clock=ManualClock())` time passes only by `advance`. `fake.clock.advance(11)`
expires a lease of 10 seconds at once, without sleeping.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from redfence._aio.client import AsyncClient
from redfence._clock import Clock, SystemClock
from redfence._config import ClientOptions
from redfence._fake.links import FakeAsyncConnector, FakeNetwork, FakeSyncConnector
from redfence._fake.server import FakeServer
from redfence._seconds import Seconds, milliseconds
from redfence._threads.client import Client

__all__ = ["FakeLockServer", "ManualClock"]

# How often the fake reads the clock. A lease or a wait ends at most this much late.
_TICK_S = 0.01
# The fake accepts any address; this is the default.
_ADDRESS = "fake"


class ManualClock:
    """A clock that moves only by `advance`. Thread-safe.

    A jump shows what a paused process sees: the deadline passes before the process can act. To let
    renewals happen, advance in steps shorter than a third of the ttl, and let the client run after
    each step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_ms = 1_000_000.0
        self._listeners: list[Callable[[], None]] = []

    def now_ms(self) -> float:
        """Return the present instant in milliseconds."""
        with self._lock:
            return self._now_ms

    def advance(self, length: Seconds) -> None:
        """Move the clock forward, then call every listener.

        Raises:
            InvalidArgumentError: the length is negative, or not a length of time.
        """
        length_ms = milliseconds("length", length)
        with self._lock:
            self._now_ms += length_ms
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def watch(self, listener: Callable[[], None], /) -> Callable[[], None]:
        """Call `listener` after every advance; return a function that stops this."""
        with self._lock:
            self._listeners.append(listener)

        def end() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return end


class FakeLockServer:
    """A lock server in memory that also creates its clients; use it as a context manager.

    Leases, tokens, waiting and expiry follow the contract. One server answers at any number of
    addresses, and a test can stop each address.

    Args:
        clock: the clock of the server and its clients; None uses the system clock.

    Attributes:
        clock: that clock.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Any = clock or SystemClock()
        self._server = FakeServer(self.clock)
        self._network = FakeNetwork(self._server)
        self._clients: list[Client] = []
        self._ended = threading.Event()
        self._unwatch: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="redfence-fake-server", daemon=True)

    def __enter__(self) -> Self:
        """Start the server."""
        self._unwatch = self.clock.watch(self._server.tick)
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the clients for threads that this object created, and stop the server."""
        self.thaw()
        self.start()
        for client in self._clients:
            client.close()
        if self._unwatch is not None:
            self._unwatch()
        self._ended.set()
        self._thread.join()

    def client(self, *addresses: str, options: ClientOptions | None = None) -> Client:
        """Return a new client for threads, which is closed with the server."""
        connector = FakeSyncConnector(self._network)
        client = Client(*(addresses or (_ADDRESS,)), options=options, connector=connector, clock=self.clock)
        self._clients.append(client)
        return client

    def async_client(self, *addresses: str, options: ClientOptions | None = None) -> AsyncClient:
        """Return a new client for asyncio; close it, or use it as a context manager."""
        connector = FakeAsyncConnector(self._network)
        return AsyncClient(
            *(addresses or (_ADDRESS,)), options=options, connector=connector, clock=self.clock
        )

    # Faults of leases.

    def expire(self, resource: str) -> bool:
        """End a lease as if ttl and lock delay were over; its holder sees the loss at the next renewal."""
        return self._server.end(resource)

    def take_away(self, resource: str, *, holder: str = "somebody else", ttl: Seconds = 3600) -> int:
        """Grant a resource to another holder, even if it is held; return the new fencing token."""
        return self._server.grant(resource, holder=holder, ttl_ms=milliseconds("ttl", ttl))

    def holder(self, resource: str) -> str | None:
        """Return the label of the present holder of a resource; None if it is free."""
        hold = self._server.hold_of(resource)
        return None if hold is None else hold.holder

    def token(self, resource: str) -> int | None:
        """Return the fencing token of the present lease of a resource; None if it is free."""
        hold = self._server.hold_of(resource)
        return None if hold is None else hold.token

    def waiters(self, resource: str) -> int:
        """Return how many acquires wait for a resource."""
        return self._server.waiters(resource)

    # Faults of servers.

    def stop(self, *addresses: str) -> None:
        """Break the connections to these addresses and refuse new ones; without an address, to all."""
        self._network.stop(addresses)

    def start(self, *addresses: str) -> None:
        """Accept connections to these addresses again; without an address, to all."""
        self._network.start(addresses)

    def freeze(self) -> None:
        """Accept commands but answer none, like a stopped process."""
        self._server.frozen = True

    def thaw(self) -> None:
        """End `freeze`: run and answer the commands that came meanwhile."""
        self._server.thaw()

    def lose_quorum(self) -> None:
        """Answer like a server that reaches no quorum: grant and renew nothing."""
        self._server.quorum_lost = True

    def regain_quorum(self) -> None:
        """End `lose_quorum`."""
        self._server.quorum_lost = False

    def drain(self) -> None:
        """Announce the end on every connection and close it, like a server that is stopping."""
        self._server.drain()

    def _run(self) -> None:
        while not self._ended.wait(_TICK_S):
            self._server.tick()
