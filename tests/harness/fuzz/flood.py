"""Thousands of inputs to every method by one seed, to see what memory a server keeps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import grpc

from harness.fuzz.methods import OWN_METHODS, Method
from harness.fuzz.site import FuzzSite
from harness.processes.servers import acquire_request
from redfence_proto.storage.v1 import storage_pb2
from redfence_proto.v1 import lock_pb2

CALLERS = 32
_CALL_TIMEOUT_S = 60.0
_MESSAGES_MAX = 5
_LEASE_ID = "0" * 32
_GOOD: dict[str, Sequence[bytes]] = {
    "Acquire": [acquire_request("flood/1", ttl_ms=200).SerializeToString()],
    "Release": [lock_pb2.ReleaseRequest(resource="flood/1", lease_id=_LEASE_ID).SerializeToString()],
    "GetLock": [lock_pb2.GetLockRequest(resource="flood/1").SerializeToString()],
    "CheckToken": [lock_pb2.CheckTokenRequest(resource="flood/1", fencing_token=7).SerializeToString()],
    "KeepAlive": [lock_pb2.KeepAliveRequest(resource="flood/1", lease_id=_LEASE_ID).SerializeToString()],
    "Session": [
        lock_pb2.SessionRequest(
            commands=[
                lock_pb2.SessionCommand(id=number, acquire=acquire_request(f"flood/{number}", ttl_ms=200))
                for number in range(1, 9)
            ]
        ).SerializeToString(),
        lock_pb2.SessionRequest(
            commands=[lock_pb2.SessionCommand(id=1, acquire=acquire_request("flood/1", wait_ms=200))]
        ).SerializeToString(),
    ],
    "Put": [
        storage_pb2.PutRequest(
            resource="flood", fencing_token=1, key="k", value=b"v" * 100
        ).SerializeToString()
    ],
    "Get": [storage_pb2.GetRequest(resource="flood", key="k").SerializeToString()],
}


async def flood(site: FuzzSite, *, inputs: int, seed: int) -> None:
    """Send the inputs, a third of them good, over one connection to each server."""
    chance = random.Random(seed)
    async with (
        grpc.aio.insecure_channel(site.server_address) as locks,
        grpc.aio.insecure_channel(site.storage_address) as storage,
    ):
        left = iter(range(inputs))

        async def call_again_and_again() -> None:
            for _ in left:
                method = chance.choice(OWN_METHODS)
                channel = storage if method.of_storage else locks
                await _call_once(channel, method, chance)

        await asyncio.gather(*(call_again_and_again() for _ in range(CALLERS)))


def _input(method: Method, chance: random.Random) -> bytes:
    good = chance.choice(_GOOD.get(method.path.rpartition("/")[2], [b"\x0a\x05flood"]))
    kind = chance.random()
    if kind < 1 / 3:
        return good
    if kind < 2 / 3:
        place = chance.randrange(len(good))
        return good[:place] + chance.randbytes(1) + good[place + chance.randrange(2) :]
    return chance.randbytes(chance.choice((0, 3, 30, 3_000)))


async def _call_once(channel: grpc.aio.Channel, method: Method, chance: random.Random) -> None:
    try:
        if not method.response_streaming:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method.path)
            await call(_input(method, chance), timeout=_CALL_TIMEOUT_S)
            return
        stream: grpc.aio.StreamStreamCall[Any, Any] = channel.stream_stream(method.path)(
            timeout=_CALL_TIMEOUT_S
        )
        for _ in range(chance.randrange(_MESSAGES_MAX)):
            await stream.write(_input(method, chance))
        match chance.randrange(3):
            case 0:
                stream.cancel()
            case 1:
                await stream.done_writing()
                while await stream.read() is not grpc.aio.EOF:
                    pass
            case _:
                await stream.done_writing()
                stream.cancel()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # most are refused
    except asyncio.CancelledError:
        # What grpc raises of a stream that was cancelled here; nobody cancels a task of the flood.
        return
