"""The in-memory lock server behind real gRPC on a free port, in a thread of its own.

Unlike `redfence.testing` it has gRPC; unlike the real server it has faults that a test can switch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpc import aio

from harness.processes.ports import HOST, free_port
from redfence._clock import SystemClock
from redfence._fake.server import FakeServer
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc


def _unary(method: Any) -> Any:
    async def call(servicer: FakeServicer, request: Any, context: Any) -> Any:
        await servicer._before_call()
        return servicer._server.call(method, request)

    return call


class FakeServicer:
    """Passes everything that the SDK uses on to a FakeServer."""

    Acquire = Release = KeepAlive = ForceRelease = ListLocks = ListSessions = WatchLocks = None

    def __init__(self, server: FakeServer, before_call: Callable[[], Awaitable[None]]) -> None:
        self._server = server
        self._before_call = before_call

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[lock_pb2.SessionResponse]:  # noqa: N802  (gRPC's name)
        loop = asyncio.get_running_loop()
        responses: asyncio.Queue[lock_pb2.SessionResponse | None] = asyncio.Queue()

        def deliver(response: lock_pb2.SessionResponse | None) -> None:
            loop.call_soon_threadsafe(responses.put_nowait, response)

        session = self._server.connect(deliver)

        async def read() -> None:
            async for request in request_iterator:
                session.handle(request)
            session.close()

        reader = asyncio.create_task(read())
        try:
            while (response := await responses.get()) is not None:
                while not responses.empty() and (more := responses.get_nowait()) is not None:
                    response.MergeFrom(more)
                yield response
        finally:
            reader.cancel()
            session.close()

    GetLock, CheckToken, ClusterStatus = map(_unary, ("GetLock", "CheckToken", "ClusterStatus"))


class GrpcFake:
    """Serves one FakeServer on a free port, again and again if it has to."""

    before_call: Callable[[], Awaitable[None]] | None = None

    def __init__(self, server: FakeServer | None = None) -> None:
        self.server = server or FakeServer(SystemClock())
        # While it is down nobody else gets the port, and no connection to it meets itself.
        self.address = f"{HOST}:{free_port()}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc-fake", daemon=True)
        self._thread.start()
        self._serving: Any = None

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)

    def end(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        server = aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 5000)]
        )
        servicer: Any = FakeServicer(self.server, self._before_call)
        lock_pb2_grpc.add_LockServiceServicer_to_server(servicer, server)
        lock_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
        server.add_insecure_port(self.address)
        await server.start()
        self._serving = server, asyncio.create_task(self._tick())

    async def _stop(self) -> None:
        if self._serving is not None:
            (server, ticker), self._serving = self._serving, None
            ticker.cancel()
            await asyncio.wait([ticker])
            await server.stop(None)

    async def _before_call(self) -> None:
        if self.before_call is not None:
            await self.before_call()

    async def _tick(self) -> None:
        while True:
            self.server.tick()
            await asyncio.sleep(0.01)


@contextmanager
def serving(server: FakeServer | None = None) -> Iterator[GrpcFake]:
    fake = GrpcFake(server)
    fake.start()
    try:
        yield fake
    finally:
        fake.end()
