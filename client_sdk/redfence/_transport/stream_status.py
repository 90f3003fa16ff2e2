"""Keeps the status that a server ended a stream with.

If the server ends a stream while the client writes to it, grpc.aio replaces the server's status with
INTERNAL, "Internal error from Core" (https://github.com/grpc/grpc/issues/36066). Without the server's status
the client cannot know that it was refused, and tries again until its deadline. Delete this module once
grpcio mends the fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
from grpc import aio

_REPLACEMENT = "Internal error from Core"
# The server's status is already in this process when a write fails, so it comes within a turn of the loop.
_STATUS_TIMEOUT_S = 1.0


class StreamStatus:
    """The first status of a stream that is not grpc.aio's replacement.

    Args:
        stream: a call of `grpc.aio`; create this object on the call's loop, before any message is written.
    """

    def __init__(self, stream: Any) -> None:
        self._first: asyncio.Future[aio.AioRpcError] = asyncio.get_running_loop().create_future()
        # gRPC calls it each time it sets the status: for the server's and for the replacement.
        stream.add_done_callback(self._status_set)

    async def of(self, error: aio.AioRpcError) -> aio.AioRpcError:
        """Return the server's status for an error of the stream; the error itself if there is none.

        Cancellation: has no effect on the stream.
        """
        if not _is_replacement(error):
            return error
        await asyncio.wait([self._first], timeout=_STATUS_TIMEOUT_S)
        return self._first.result() if self._first.done() else error

    def _status_set(self, stream: Any) -> None:
        status = aio.AioRpcError(
            _result(stream.code()),
            trailing_metadata=_result(stream.trailing_metadata()),
            details=_result(stream.details()),
        )
        if not self._first.done() and not _is_replacement(status):
            self._first.set_result(status)


def _is_replacement(error: aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _REPLACEMENT


def _result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that has nothing to wait for; a task would run it too late."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("the status of a stream that has ended is known")
