"""Thousands of inputs at once to the methods of both servers, to see what memory a server keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from hypothesis import given
from hypothesis import strategies as st

from harness.fuzz.methods import OWN_METHODS, Method
from harness.fuzz.settings import tried
from harness.fuzz.site import FuzzSite
from harness.fuzz.wire import inputs
from redfence_proto import bounds

CALLERS = 32
# For acquires that wait; any other call is answered sooner.
_CALL_TIMEOUT_S = 0.5
_MESSAGES = st.sampled_from(OWN_METHODS).flatmap(lambda each: st.tuples(st.just(each), inputs(each.request)))


def draw_inputs(count: int) -> list[tuple[Method, bytes]]:
    """Return inputs of any method, but none that the transport would refuse by its size."""
    drawn: list[tuple[Method, bytes]] = []

    @tried(count)
    @given(_MESSAGES)
    def draw(each: tuple[Method, bytes]) -> None:
        if len(each[1]) < bounds.MESSAGE_BYTES_MAX / 2:
            drawn.append(each)

    draw()
    return drawn


async def flood(site: FuzzSite, drawn: Sequence[tuple[Method, bytes]], *, count: int) -> None:
    """Send so many inputs, the same again and again, over one connection to each server."""
    async with (
        grpc.aio.insecure_channel(site.server_address) as locks,
        grpc.aio.insecure_channel(site.storage_address) as storage,
    ):
        left = iter(range(count))

        async def call_again_and_again() -> None:
            for number in left:
                method, data = drawn[number % len(drawn)]
                await _call_once(storage if method.of_storage else locks, method, data, number)

        await asyncio.gather(*(call_again_and_again() for _ in range(CALLERS)))


async def _call_once(channel: grpc.aio.Channel, method: Method, data: bytes, number: int) -> None:
    """Send an input, over a stream up to five times; read every answer, or cancel the call at once."""
    stream: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(method.path)(
        timeout=_CALL_TIMEOUT_S
    )
    try:
        for _ in range(1 + number % 5 if method.response_streaming else 1):
            await stream.write(bytes(data))
        if number % 4:
            await stream.done_writing()
            while await stream.read() is not grpc.aio.EOF:
                pass
        stream.cancel()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # most are refused
    except asyncio.CancelledError:
        # What grpc raises of a stream that was cancelled here; nobody cancels a task of the flood.
        return
