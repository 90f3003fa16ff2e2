"""Switch on what a server counts and logs about its requests; a server without it has no part of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector

from redfence_server.clock import WallClock
from redfence_server.errors import ConfigError
from redfence_server.locking.node import LockNode
from redfence_server.metrics.build import BuildInfo
from redfence_server.metrics.endpoint import endpoint
from redfence_server.metrics.loop_lag import LoopLag
from redfence_server.metrics.observing import Observer
from redfence_server.metrics.requests import RequestCounts

if TYPE_CHECKING:
    from redfence_server.metrics.tracing import Spans


class Telemetry:
    """Counts the requests of one server process if it serves metrics, logs them at level debug, traces them.

    Args:
        listen: HOST:PORT for the metrics, or empty.
        logs: log each request.
        traces_endpoint: the URL to which spans go, or empty.
        service: the name of the service in its spans.

    Attributes:
        wrap: what `api.serving.new_server` takes to have the requests observed; None if nothing
            is observed.

    Raises:
        ConfigError: traces need packages that are not installed.
    """

    def __init__(
        self,
        *,
        listen: str,
        logs: bool,
        clock: WallClock,
        transport: str = "grpcio",
        traces_endpoint: str = "",
        service: str = "redfence",
    ) -> None:
        self._listen = listen
        self._transport = transport
        self._requests = RequestCounts()
        self._spans = _open_spans(traces_endpoint, clock, service) if traces_endpoint else None
        observer = Observer(self._requests, clock=clock, logs=logs, spans=self._spans)
        self.wrap = observer.wrap if listen or logs or self._spans else None

    def nodes(self, nodes: Sequence[LockNode]) -> Sequence[LockNode]:
        """Return the nodes, whose answers become events of the spans if there are any."""
        return nodes if self._spans is None else self._spans.nodes(nodes)

    async def close(self) -> None:
        """Send the last spans, for two seconds at most."""
        if self._spans is not None:
            await self._spans.close()

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


def _open_spans(endpoint: str, clock: WallClock, service: str) -> Spans:
    try:
        # Only traces need these packages.
        from redfence_server.metrics import tracing  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"traces_endpoint: it needs the package {error.name}, which is not installed; "
            "install it with: pip install 'redfence[traces]'"
        ) from error
    return tracing.open_spans(endpoint, clock=clock, service=service)
