"""The client knows why a server ended a stream, also if it was writing to the stream at that moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

import redfence
from harness.processes.ports import HOST
from redfence._transport.grpc_async_link import GrpcAsyncConnector
from redfence_proto.v1 import lock_pb2


class _Refusing:
    """Refuses a session after its first message, as soon as the test says so."""

    def __init__(self) -> None:
        self.received, self.refuse = threading.Event(), threading.Event()
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Session": grpc.stream_stream_rpc_method_handler(
                self._session, request_deserializer=lock_pb2.SessionRequest.FromString
            )
        }
        self.handler = grpc.method_handlers_generic_handler("redfence.v1.LockService", methods)

    def _session(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        next(requests)
        self.received.set()
        self.refuse.wait(10)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such token")


async def test_a_refusal_during_a_write_is_known() -> None:
    """The loop stands still meanwhile, so that grpc.aio writes to a stream that has already ended."""
    refusing = _Refusing()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((refusing.handler,))
        port = server.add_insecure_port(f"{HOST}:0")
        server.start()
        try:
            connector = GrpcAsyncConnector(protection=None, metadata=())
            link = await connector.connect(f"{HOST}:{port}", timeout_ms=10_000)
            reader = asyncio.create_task(link.receive())
            await link.send(lock_pb2.SessionRequest())
            assert await asyncio.to_thread(refusing.received.wait, 10)
            _refuse_while_the_loop_stands_still(refusing)
            with pytest.raises(redfence.ServerError, match="Internal error from Core"):
                await link.send(lock_pb2.SessionRequest())
            with pytest.raises(redfence.AccessDeniedError, match="no such token"):
                await reader
            await link.close()
        finally:
            await asyncio.to_thread(server.stop(0).wait, 10)


def _refuse_while_the_loop_stands_still(refusing: _Refusing) -> None:
    refusing.refuse.set()
    # gRPC's own thread receives the status; no event tells when.
    time.sleep(0.3)
