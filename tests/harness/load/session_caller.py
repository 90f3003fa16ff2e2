"""A raw caller of `LockService.Session`, which batches commands as the contract asks."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import grpc

from harness.processes.servers import LockServer, acquire_request
from redfence_proto.v1 import lock_pb2

Result = lock_pb2.SessionResult
_COMMANDS_PER_MESSAGE_MAX = 100


class StreamEndedError(Exception):
    """The stream ended before the command was answered."""


class SessionCaller:
    """One open Session. Commands of one turn of the event loop leave in one message.

    Attributes:
        answered: ids in the order of their answers.
        draining: the notice, once it came.
    """

    def __init__(self, server: LockServer) -> None:
        self._call: grpc.aio.StreamStreamCall[Any, Any] = server.locks.Session()
        self._next_id = 1
        self._outbox: list[lock_pb2.SessionCommand] = []
        self._unanswered: dict[int, asyncio.Future[Result]] = {}
        self._wake = asyncio.Event()
        self._closing = False
        self._ended = False
        self.answered: list[int] = []
        self.draining: lock_pb2.Draining | None = None
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()

    # --- commands ---------------------------------------------------------------------------------

    def send(
        self, command: lock_pb2.SessionCommand, *, command_id: int | None = None
    ) -> asyncio.Future[Result]:
        """Send a command under the next id, or the given one, and return its result-to-be."""
        if command_id is None:
            command_id, self._next_id = self._next_id, self._next_id + 1
        command.id = command_id
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if self._ended:
            answer.set_exception(StreamEndedError())
            return answer
        self._unanswered[command_id] = answer
        self._outbox.append(command)
        self._wake.set()
        return answer

    def acquire(self, resource: str, **fields: Any) -> asyncio.Future[Result]:
        """Send an acquire; see `acquire_request`."""
        return self.send(lock_pb2.SessionCommand(acquire=acquire_request(resource, **fields)))

    def release(self, resource: str, lease_id: str) -> asyncio.Future[Result]:
        """Send a release."""
        release = lock_pb2.ReleaseRequest(resource=resource, lease_id=lease_id)
        return self.send(lock_pb2.SessionCommand(release=release))

    def renew(self, resource: str, lease_id: str) -> asyncio.Future[Result]:
        """Send a renewal."""
        renew = lock_pb2.KeepAliveRequest(resource=resource, lease_id=lease_id)
        return self.send(lock_pb2.SessionCommand(renew=renew))

    def cancel_command(self, command_id: int) -> asyncio.Future[Result]:
        """Send a cancel of the acquire with that id."""
        return self.send(lock_pb2.SessionCommand(cancel=lock_pb2.CancelCommand(id=command_id)))

    @property
    def last_id(self) -> int:
        """The id given to the last command."""
        return self._next_id - 1

    # --- the stream -------------------------------------------------------------------------------

    def half_close(self) -> None:
        """Send what was given so far, and then that no more commands come."""
        self._closing = True
        self._wake.set()

    async def ended(self) -> grpc.aio.AioRpcError | None:
        """Return once the server has ended the stream: None if with OK."""
        await asyncio.wait([self._tasks[1]])
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return None
        return grpc.aio.AioRpcError(
            code,
            await self._call.initial_metadata(),
            await self._call.trailing_metadata(),
            details=await self._call.details(),
        )

    async def cancel(self) -> None:
        """Cancel the stream; harmless to repeat."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for answer in self._unanswered.values():
            answer.cancel()

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outbox:
                    batch = self._outbox[:_COMMANDS_PER_MESSAGE_MAX]
                    del self._outbox[:_COMMANDS_PER_MESSAGE_MAX]
                    await self._call.write(lock_pb2.SessionRequest(commands=batch))
                if self._closing:
                    await self._call.done_writing()
                    return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended, which `_read` tells

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                assert isinstance(response, lock_pb2.SessionResponse)
                if response.HasField("draining"):
                    self.draining = response.draining
                for result in response.results:
                    self.answered.append(result.id)
                    self._unanswered.pop(result.id).set_result(result)
        except grpc.aio.AioRpcError:
            pass  # told by `ended`
        finally:
            self._ended = True
            for answer in self._unanswered.values():
                if not answer.done():
                    answer.set_exception(StreamEndedError())
                    answer.exception()  # nobody has to look
