"""Serve `/metrics`, `/livez` and `/readyz` over HTTP on the event loop that serves the locks.

A loop that hangs answers no probe, which is what liveness is for. Everything has a bound: the request's size,
its time, and the number of connections. A connection serves one request. Scrapes within a second share one
text, so that scrapers cannot keep the loop busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import h11
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

from redfence_server.api import serving as grpc_serving

SETTING: Final = "metrics_listen"
_REQUEST_BYTES_MAX: Final = 8 * 1024
_REQUEST_S_MAX: Final = 5.0
_CONNECTIONS_MAX: Final = 64
_TEXT_AGE_S_MAX: Final = 1.0
_PLAIN: Final = "text/plain; charset=utf-8"

_Answer = tuple[HTTPStatus, str, bytes]


class Endpoint:
    """Answers the requests of scrapers and probes.

    Args:
        ready: tells whether `/readyz` answers 200; otherwise it answers 503.
    """

    def __init__(self, registry: CollectorRegistry, *, ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self._text = b""
        self._text_until_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, or close it at once if there are too many."""
        if len(self._tasks) >= _CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = self._loop.create_task(self._serve(reader, writer), name="metrics-request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the open connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_REQUEST_BYTES_MAX)
        try:
            async with asyncio.timeout(_REQUEST_S_MAX):
                answer = await self._answer(connection, reader)
                if answer is not None:
                    writer.write(_encoded(connection, *answer))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (TimeoutError, OSError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, connection: h11.Connection, reader: asyncio.StreamReader) -> _Answer | None:
        """Return the answer to the request; None if the peer has gone without one."""
        try:
            while (event := connection.next_event()) is h11.NEED_DATA:
                connection.receive_data(await reader.read(_REQUEST_BYTES_MAX))
        except h11.RemoteProtocolError as error:
            return HTTPStatus(error.error_status_hint), _PLAIN, f"{error}\n".encode()
        if not isinstance(event, h11.Request):
            return None
        if event.method not in {b"GET", b"HEAD"}:
            return HTTPStatus.METHOD_NOT_ALLOWED, _PLAIN, b"use GET\n"
        answer = self._get(event.target.partition(b"?")[0])
        return answer if event.method == b"GET" else (*answer[:2], b"")

    def _get(self, path: bytes) -> _Answer:
        match path:
            case b"/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, self._metrics()
            case b"/livez":
                return HTTPStatus.OK, _PLAIN, b"live\n"
            case b"/readyz" if self._ready():
                return HTTPStatus.OK, _PLAIN, b"ready\n"
            case b"/readyz":
                return HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, b"not ready: no quorum would grant now\n"
        return HTTPStatus.NOT_FOUND, _PLAIN, b"there are only /metrics, /livez and /readyz\n"

    def _metrics(self) -> bytes:
        now_s = self._loop.time()
        if now_s >= self._text_until_s:
            self._text = generate_latest(self._registry)
            self._text_until_s = now_s + _TEXT_AGE_S_MAX
        return self._text


def _encoded(connection: h11.Connection, status: HTTPStatus, content_type: str, body: bytes) -> bytes:
    response = h11.Response(
        status_code=status,
        reason=status.phrase.encode(),
        headers=[
            ("Content-Type", content_type),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ],
    )
    parts = (response, h11.Data(data=body), h11.EndOfMessage())
    return b"".join(connection.send(part) or b"" for part in parts)


@asynccontextmanager
async def endpoint(
    listen: str, registry: CollectorRegistry, *, ready: Callable[[], bool]
) -> AsyncIterator[int]:
    """Serve HTTP on HOST:PORT within `async with`, and yield the port; port 0 takes any free one.

    Raises:
        ListenError: the address is malformed or in use.
    """
    host, port = grpc_serving.parse_listen(listen, setting=SETTING)
    serving = Endpoint(registry, ready=ready)
    try:
        server = await asyncio.start_server(serving.accept, host, port, limit=_REQUEST_BYTES_MAX)
    except OSError as error:
        raise grpc_serving.cannot_listen(listen, error.strerror, setting=SETTING) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await serving.close()
