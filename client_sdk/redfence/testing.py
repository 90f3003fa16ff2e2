"""For the tests of programs that use redfence: a lock server in memory, below the real client code.

    def test_billing():
        with FakeLockServer() as fake, pytest.raises(redfence.LeaseLostError):
            with fake.client().lock("orders/42", ttl=1) as lease:
                fake.take_away("orders/42")         # somebody else has it now
                assert lease.lost.wait(timeout=5)   # learnt at the next renewal; leaving the body raises

With `FakeLockServer(clock=ManualClock())` no time passes by itself: `fake.clock.advance(11)` lets a lease of 10 seconds
expire at once, without sleeping.
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
from redfence._threads.client import Client

__all__ = ["FakeLockServer", "ManualClock"]

# How often the fake looks at the clock: a lease ends, and a wait, at most this much late.
_TICK_S = 0.01
# Anything is an address of the fake; this is the default.
_ADDRESS = "fake"


class ManualClock:
    """A clock that moves only by `advance`. Thread-safe.

    A jump is what a paused process sees: time is over before anything could be done. To let keepalives happen in between,
    advance in steps shorter than a third of the ttl and let the client run after each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_ms = 1_000_000.0
        self._listeners: list[Callable[[], None]] = []

    def now_ms(self) -> float:
        """Return the present instant."""
        with self._lock:
            return self._now_ms

    def advance(self, seconds: float) -> None:
        """Let time pass; then tell everyone who watches."""
        if seconds < 0:
            raise ValueError("time does not go back")
        with self._lock:
            self._now_ms += seconds * 1000
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def watch(self, listener: Callable[[], None], /) -> Callable[[], None]:
        """Call `listener` after every advance; return a function that ends this."""
        with self._lock:
            self._listeners.append(listener)

        def end() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return end


class FakeLockServer:
    """A lock server in memory, and the clients that talk to it; use it as a context manager.

    Leases, tokens, waiting and expiry are as the contract says. There is one server behind any number of addresses, each of
    which can be stopped.

    Args:
        clock: time for the server and its clients; None: the system's.

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
        """Close the threaded clients it made and stop the server."""
        self.thaw()
        self.start()
        for client in self._clients:
            client.close()
        if self._unwatch is not None:
            self._unwatch()
        self._ended.set()
        self._thread.join()

    def client(self, *addresses: str, options: ClientOptions | None = None) -> Client:
        """Return a client for threads; it is closed with the server."""
        connector = FakeSyncConnector(self._network)
        client = Client(*(addresses or (_ADDRESS,)), options=options, connector=connector, clock=self.clock)
        self._clients.append(client)
        return client

    def async_client(self, *addresses: str, options: ClientOptions | None = None) -> AsyncClient:
        """Return a client for asyncio; close it, or use it as a context manager, as any other."""
        connector = FakeAsyncConnector(self._network)
        return AsyncClient(
            *(addresses or (_ADDRESS,)), options=options, connector=connector, clock=self.clock
        )

    # What happens to leases.

    def expire(self, resource: str) -> bool:
        """End the lease of a resource, as if its ttl were over; its holder learns it at the next renewal."""
        return self._server.end(resource)

    def take_away(self, resource: str, *, holder: str = "somebody else", ttl: float = 3600.0) -> int:
        """Give a resource to somebody else, whoever holds it; return the new fencing token."""
        return self._server.grant(resource, holder=holder, ttl_ms=ttl * 1000)

    def holder(self, resource: str) -> str | None:
        """Return the label of whoever holds a resource; None if nobody does."""
        hold = self._server.hold_of(resource)
        return None if hold is None else hold.holder

    def token(self, resource: str) -> int | None:
        """Return the fencing token of the present lease; None if there is none."""
        hold = self._server.hold_of(resource)
        return None if hold is None else hold.token

    def waiters(self, resource: str) -> int:
        """Return how many acquires wait for a resource."""
        return self._server.waiters(resource)

    # What happens to servers.

    def stop(self, *addresses: str) -> None:
        """Break the links to these addresses, and refuse new ones; without an address, to all."""
        self._network.stop(addresses)

    def start(self, *addresses: str) -> None:
        """Accept links to these addresses again; without an address, to all."""
        self._network.start(addresses)

    def freeze(self) -> None:
        """Accept everything and answer nothing, like a process that was stopped."""
        self._server.frozen = True

    def thaw(self) -> None:
        """End `freeze`: carry out and answer what came meanwhile."""
        self._server.thaw()

    def lose_quorum(self) -> None:
        """Answer as a server that cannot reach its nodes: no grant, no renewal."""
        self._server.quorum_lost = True

    def regain_quorum(self) -> None:
        """End `lose_quorum`."""
        self._server.quorum_lost = False

    def drain(self) -> None:
        """Say goodbye on every link, as a server does that is about to stop."""
        self._server.drain()

    def _run(self) -> None:
        while not self._ended.wait(_TICK_S):
            self._server.tick()
