"""Switch on what a server counts and logs about its requests; a server without it has no part of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector

from redfence_server.clock import Clock
from redfence_server.metrics.build import BuildInfo
from redfence_server.metrics.endpoint import endpoint
from redfence_server.metrics.loop_lag import LoopLag
from redfence_server.metrics.observing import Observer
from redfence_server.metrics.requests import RequestCounts


class Telemetry:
    """Counts the requests of one server process if it serves metrics, and logs them at level debug.

    Args:
        listen: HOST:PORT for the metrics, or empty.
        logs: log each request.

    Attributes:
        wrap: what `api.serving.new_server` takes to have the requests observed; None without metrics and log.
    """

    def __init__(self, *, listen: str, logs: bool, clock: Clock, transport: str = "grpcio") -> None:
        self._listen = listen
        self._transport = transport
        self._requests = RequestCounts()
        observer = Observer(self._requests, clock=clock, logs=logs)
        self.wrap = observer.wrap if listen or logs else None

    @asynccontextmanager
    async def serving(self, *collectors: Any, ready: Callable[[], bool]) -> AsyncIterator[int | None]:
        """Serve the metrics and those of the collectors within `async with`, and yield the port, if any.

        Raises:
            ListenError: the address is malformed or in use.
        """
        if not self._listen:
            yield None
            return
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        lag = LoopLag()
        try:
            for each in (BuildInfo(self._transport), lag, self._requests, *collectors):
                registry.register(each)
            async with endpoint(self._listen, registry, ready=ready) as port:
                host = self._listen.rpartition(":")[0]
                structlog.get_logger().info("metrics_serving", address=f"{host}:{port}")
                yield port
        finally:
            lag.close()
