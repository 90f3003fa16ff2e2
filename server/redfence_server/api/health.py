"""Serve gRPC's standard health service: readiness, liveness, and watches that end when the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Serves the standard health service: readiness for named services and the server, and liveness.

    The package's own service never ends a watch, so one watcher would make every drain take its whole grace.

    Args:
        service_names: the services whose health is the server's readiness, as that of the empty name is. The
            readiness is NOT_SERVING until `set_serving`.
        liveness_name: a name that is SERVING as long as the process answers; empty for none.
    """

    def __init__(self, service_names: Sequence[str], *, liveness_name: str = "") -> None:
        self._ready_names = frozenset({*service_names, ""})
        self._liveness_name = liveness_name
        self._serving = self._draining = False
        self._changed = asyncio.Event()

    def set_serving(self, *, serving: bool) -> None:
        """Set the readiness, and send it on every watch; without effect after `drain`."""
        self._serving = serving and not self._draining
        self._wake_watches()

    @property
    def serving(self) -> bool:
        """The readiness."""
        return self._serving

    def drain(self) -> None:
        """Set the readiness to NOT_SERVING for ever, and end every watch."""
        self._draining = True
        self.set_serving(serving=False)

    def _wake_watches(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        answers = health_pb2.HealthCheckResponse
        if name in self._ready_names:
            return answers.SERVING if self._serving else answers.NOT_SERVING
        return answers.SERVING if name and name == self._liveness_name else answers.SERVICE_UNKNOWN

    async def Check(  # noqa: N802  (the contract's name)
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Return the health of a service now; NOT_FOUND for an unknown name."""
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.service!r} is not served here")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(  # noqa: N802  (the contract's name)
        self, _: health_pb2.HealthListRequest, __: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        """Return the health of every service now."""
        names = self._ready_names | ({self._liveness_name} - {""})
        statuses = {name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in names}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802  (the contract's name)
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Send the health of a service now and after each change, until the server drains."""
        last_sent = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last_sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last_sent = status
            if self._draining:
                return
            if changed is self._changed:
                await changed.wait()
