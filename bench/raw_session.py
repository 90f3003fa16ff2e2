"""Opens a Session without the SDK, which carries thousands of commands at a low cost each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from redfence_proto.v1 import lock_pb2, lock_pb2_grpc

Result = lock_pb2.SessionResult

# A message has at most 64 KiB, and a command of these benchmarks fewer than 200 bytes.
_COMMANDS_PER_MESSAGE_MAX = 200


def acquire(resource: str, lease_id: str, *, ttl_s: int, wait_s: int) -> lock_pb2.SessionCommand:
    """Return a command without its id."""
    command = lock_pb2.SessionCommand()
    command.acquire.resource = resource
    command.acquire.lease_id = lease_id
    command.acquire.ttl.seconds = ttl_s
    command.acquire.wait_timeout.seconds = wait_s
    return command


def release(resource: str, lease_id: str) -> lock_pb2.SessionCommand:
    """Return a command without its id."""
    return lock_pb2.SessionCommand(release=lock_pb2.ReleaseRequest(resource=resource, lease_id=lease_id))


def renew(resource: str, lease_id: str) -> lock_pb2.SessionCommand:
    """Return a command without its id."""
    return lock_pb2.SessionCommand(renew=lock_pb2.KeepAliveRequest(resource=resource, lease_id=lease_id))


class RawSession:
    """One stream on its own connection."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._last_id = 0
        self._results: dict[int, asyncio.Future[lock_pb2.SessionResult]] = {}

    async def send(
        self, commands: Iterable[lock_pb2.SessionCommand]
    ) -> list[asyncio.Future[lock_pb2.SessionResult]]:
        """Send commands; return a future for each result."""
        batch = list(commands)
        results = []
        for command in batch:
            self._last_id += 1
            command.id = self._last_id
            results.append(asyncio.get_running_loop().create_future())
            self._results[command.id] = results[-1]
        for first in range(0, len(batch), _COMMANDS_PER_MESSAGE_MAX):
            message = lock_pb2.SessionRequest(commands=batch[first : first + _COMMANDS_PER_MESSAGE_MAX])
            await self._stream.write(message)
        return results

    async def read(self) -> None:
        """Read the stream and resolve the futures, until cancelled."""
        while (response := await self._stream.read()) is not grpc.aio.EOF:
            for result in response.results:
                self._results.pop(result.id).set_result(result)


@asynccontextmanager
async def raw_session(address: str) -> AsyncIterator[RawSession]:
    """Open a stream; cancel it and its waiting acquires at the exit."""
    # Without this option all channels to one address share one connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stream = lock_pb2_grpc.LockServiceStub(channel).Session()
        session = RawSession(stream)
        reading = asyncio.create_task(session.read())
        try:
            yield session
        finally:
            stream.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
