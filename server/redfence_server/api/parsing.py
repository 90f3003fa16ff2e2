"""Answer a request that cannot be parsed with a reason; let a stream parse a large request in its turn.

gRPC parses a request before redfence's code runs. If that fails, it answers UNKNOWN, or raises in a stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from redfence_proto.rich_error import RichError
from redfence_proto.v1 import lock_pb2
from redfence_server.api import errors
from redfence_server.sharing.large import Large

# A message of 64 KiB may have 10,000 commands, and takes 3 ms to parse.
_LARGE_BYTES: Final = 2048
# Health and reflection keep the behaviour of their own libraries.
_OURS = "/redfence."


class Malformed:
    """Takes the place of a message that could not be parsed."""

    __slots__ = ("problem",)

    def __init__(self, problem: str) -> None:
        self.problem = problem


class AdaptHandlers(grpc.aio.ServerInterceptor):
    """Lets a function replace the handler of each call, such as `reject_malformed`; gets the path as well."""

    def __init__(self, adapt: Callable[[str, Any], Any]) -> None:
        self._adapt = adapt

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the adapted handler; None for a method that the server does not have."""
        handler = await continuation(handler_call_details)
        return handler and self._adapt(handler_call_details.method, handler)


def reject_malformed(path: str, handler: Any) -> Any:
    """Return the handler of a redfence method with a parser that does not fail; another one unchanged.

    A call with one request then answers INVALID_ARGUMENT / MALFORMED_MESSAGE. A stream of requests reads a
    `Malformed` in place of a malformed message, and a `Large` in place of a large one.
    """
    if not path.startswith(_OURS):
        return handler
    parse = _tolerant(handler.request_deserializer)
    if handler.request_streaming:
        return handler._replace(request_deserializer=_later_if_large(parse))
    handler = handler._replace(request_deserializer=parse)
    if handler.response_streaming:
        return handler._replace(unary_stream=_guarded(handler.unary_stream))
    return handler._replace(unary_unary=_guarded(handler.unary_unary))


def _tolerant(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return Malformed(f"the message cannot be parsed: {error}")

    return parse_or_mark


def _later_if_large(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    return lambda data: parse(data) if len(data) < _LARGE_BYTES else Large(partial(parse, data))


def _guarded(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if not isinstance(request, Malformed):
            return await method(request, context)
        error = RichError(lock_pb2.ERROR_REASON_MALFORMED_MESSAGE, request.problem)
        return await errors.abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)

    return call
