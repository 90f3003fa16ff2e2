"""The streaming calls, Session and KeepAlive: proto in, proto out. lock_service.py decides."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine
from functools import partial
from typing import Any, Final, Generic, TypeVar

import grpc

from redfence_proto.v1 import lock_pb2
from redfence_server.api import errors, messages
from redfence_server.api.command_stream import CommandStream
from redfence_server.api.parsing import Malformed
from redfence_server.clock import Clock
from redfence_server.errors import InvalidFieldError
from redfence_server.lock_service import LockService
from redfence_server.locking.quorum import ReleaseVerdict
from redfence_server.locking.redlock import Verdict
from redfence_server.model import AcquireCall, Lease
from redfence_server.randomness import Randomness

# A result is below 1 KiB and a message below 64 KiB.
_RESULTS_PER_MESSAGE_MAX: Final = 60

# A release under way, or the error that prevented it.
Released = Awaitable[Verdict[ReleaseVerdict]] | InvalidFieldError
StreamContext = grpc.aio.ServicerContext[Any, Any]
Item = TypeVar("Item")


class Stream(ABC, Generic[Item]):
    """Reads until the peer closes; writes results as they come, and `notice` when the server drains."""

    def __init__(self, context: StreamContext, *, commands: CommandStream[Item], notice: Item) -> None:
        self._context = context
        self._commands = commands
        self._notice = notice
        self._reading: asyncio.Task[None] | None = None
        self._draining = False

    @abstractmethod
    def _begin(self, request: Any) -> None:
        """Start the commands of one message."""

    @abstractmethod
    async def _write(self, items: list[Item]) -> None:
        """Write results."""

    @abstractmethod
    def _on_protocol_error(self) -> None:
        """End the commands that could delay the end of the stream, after a peer broke the protocol."""

    @abstractmethod
    def _clean_up(self) -> None:
        """Clean up after the last write."""

    def drain(self) -> None:
        """Write the notice, start no more commands, and end when the started ones are answered."""
        if self._draining:
            return
        self._draining = True
        self._commands.put(self._notice)
        self._commands.finish()
        # Otherwise a peer that never pauses would keep the stream open.
        if self._reading is not None:
            self._reading.cancel()

    async def serve(self) -> None:
        """Run commands until the peer closes, the server drains, or the peer breaks the protocol.

        Cancellation: unfinished acquires are cancelled, and so undone.
        """
        self._reading = reading = asyncio.create_task(self._read(), name="stream-read")
        if self._draining:
            reading.cancel()
        try:
            await self._commands.write_all(self._write)
        finally:
            self._commands.cancel()
            reading.cancel()
            self._clean_up()
            (outcome,) = await asyncio.gather(reading, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

    async def _begin_all(self) -> None:
        while (request := await self._context.read()) is not grpc.aio.EOF:
            if isinstance(request, Malformed):
                raise InvalidFieldError("", request.problem, lock_pb2.ERROR_REASON_MALFORMED_MESSAGE)
            self._begin(request)

    async def _read(self) -> None:
        try:
            await self._begin_all()
        except Exception:
            # The peer broke the protocol, or the server has a defect: stop reading this stream.
            self._on_protocol_error()
            raise
        finally:
            self._commands.finish()


class SessionStream(Stream[lock_pb2.SessionResult | lock_pb2.Draining]):
    """Serves one Session call."""

    def __init__(
        self,
        context: StreamContext,
        *,
        service: LockService,
        clock: Clock,
        randomness: Randomness,
        commands_max: int,
        draining: lock_pb2.Draining,
    ) -> None:
        super().__init__(
            context,
            commands=CommandStream(open_max=commands_max, batch_max=_RESULTS_PER_MESSAGE_MAX),
            notice=draining,
        )
        self._service = service
        self._clock = clock
        self._randomness = randomness
        self._connection = context.peer()
        self._acquires: dict[int, asyncio.Task[None]] = {}
        self._open_ids: set[int] = set()
        # Grants that certainly have not reached the peer yet.
        self._undelivered: dict[int, tuple[AcquireCall, Lease]] = {}

    def _clean_up(self) -> None:
        for call, lease in self._undelivered.values():
            self._service.undo_grant(call, lease)

    async def _write(self, items: list[lock_pb2.SessionResult | lock_pb2.Draining]) -> None:
        response = lock_pb2.SessionResponse()
        for item in items:
            if isinstance(item, lock_pb2.Draining):
                response.draining.CopyFrom(item)
                continue
            response.results.append(item)
            self._open_ids.discard(item.id)
            # Before the write, because a failed or cancelled write may still have reached the peer.
            self._undelivered.pop(item.id, None)
        await self._context.write(response)

    def _begin(self, request: lock_pb2.SessionRequest) -> None:
        arrived_at_ms = self._clock.now_ms()
        for command in request.commands:
            self._start(command, arrived_at_ms)

    def _on_protocol_error(self) -> None:
        for acquire in self._acquires.values():
            acquire.cancel()

    def _start(self, command: lock_pb2.SessionCommand, arrived_at_ms: float) -> None:
        command_id = command.id
        if command_id == 0 or command_id in self._open_ids:
            problem = "is 0; ids start at 1" if command_id == 0 else f"{command_id} is still unanswered"
            metadata = {"command_id": str(command_id)}
            raise InvalidFieldError(
                "commands.id", problem, lock_pb2.ERROR_REASON_INVALID_COMMAND_ID, metadata
            )
        task = self._commands.start(
            partial(self._begin_command, command, arrived_at_ms),
            # A cancel command in the same message may come first.
            never_begun=partial(_cancelled, command_id),
        )
        self._open_ids.add(command_id)
        if command.HasField("acquire"):
            self._acquires[command_id] = task
            task.add_done_callback(lambda _: self._acquires.pop(command_id, None))

    def _begin_command(
        self, command: lock_pb2.SessionCommand, arrived_at_ms: float
    ) -> Coroutine[None, None, lock_pb2.SessionResult]:
        released: Released | None = None
        if command.HasField("release"):
            # A waiter may need the lock, so send the release before the other commands of the message.
            try:
                released = self._service.begin_release(*messages.read_lease(command.release))
            except InvalidFieldError as error:
                released = error
        return self._answer(command, arrived_at_ms, released)

    async def _answer(
        self, command: lock_pb2.SessionCommand, arrived_at_ms: float, released: Released | None
    ) -> lock_pb2.SessionResult:
        result = lock_pb2.SessionResult(id=command.id)
        try:
            if released is not None:
                await self._carry_out_release(released, result)
            else:
                await self._carry_out(command, arrived_at_ms, result)
        except asyncio.CancelledError:
            # A cancel command came, or the stream has ended and drops this result.
            return _cancelled(command.id)
        except Exception as error:
            result.error.CopyFrom(errors.to_message(*errors.describe(error, where="session")))
        return result

    async def _carry_out_release(self, released: Released, result: lock_pb2.SessionResult) -> None:
        if isinstance(released, InvalidFieldError):
            raise released
        held = self._service.was_held(await released)
        result.release.CopyFrom(messages.release_response(held))

    async def _carry_out(
        self, command: lock_pb2.SessionCommand, arrived_at_ms: float, result: lock_pb2.SessionResult
    ) -> None:
        match command.WhichOneof("command"):
            case "acquire":
                call = messages.read_acquire(
                    command.acquire,
                    ttl_ms_max=self._service.ttl_ms_max,
                    new_lease_id=self._randomness.hex_id,
                    arrived_at_ms=arrived_at_ms,
                    connection=self._connection,
                )
                outcome = await self._service.acquire(call)
                if isinstance(outcome, Lease):
                    self._undelivered[command.id] = (call, outcome)
                result.acquire.CopyFrom(messages.acquire_response(call, outcome))
            case "renew":
                renewed = await self._service.renew(*messages.read_lease(command.renew))
                result.renew.CopyFrom(messages.keep_alive_response(command.renew, renewed))
            case "cancel":
                task = self._acquires.get(command.cancel.id)
                result.cancel.found = task is not None
                if task is not None:
                    task.cancel()
            case _:
                raise InvalidFieldError(
                    "commands.command",
                    "is missing, or this server does not know its kind",
                    lock_pb2.ERROR_REASON_UNKNOWN_COMMAND,
                    {"command_id": str(command.id)},
                )


def _cancelled(command_id: int) -> lock_pb2.SessionResult:
    error = errors.to_message(grpc.StatusCode.CANCELLED, errors.CANCELLED)
    return lock_pb2.SessionResult(id=command_id, error=error)


class KeepAliveStream(Stream[lock_pb2.KeepAliveResponse]):
    """Serves one KeepAlive call."""

    def __init__(
        self,
        context: StreamContext,
        *,
        service: LockService,
        commands_max: int,
        draining: lock_pb2.Draining,
    ) -> None:
        super().__init__(
            context,
            commands=CommandStream(open_max=commands_max, batch_max=1),
            notice=lock_pb2.KeepAliveResponse(draining=draining),
        )
        self._service = service
        # The latest unfinished renewal of each lease.
        self._latest: dict[tuple[str, str], asyncio.Task[None]] = {}

    def _on_protocol_error(self) -> None:
        """Do nothing: every renewal ends within two node timeouts and `REVALIDATION_MS_MAX`."""

    def _clean_up(self) -> None:
        """Do nothing: closing a KeepAlive releases nothing."""

    async def _write(self, items: list[lock_pb2.KeepAliveResponse]) -> None:
        for response in items:
            await self._context.write(response)

    def _begin(self, request: lock_pb2.KeepAliveRequest) -> None:
        # Answer the renewals of one lease in order. Otherwise a renewal that waits for a slow node could
        # report ACTIVE after a later one has reported LOST.
        lease = (request.resource, request.lease_id)
        task = self._commands.start(partial(self._answer, request, after=self._latest.get(lease)))
        self._latest[lease] = task
        task.add_done_callback(partial(self._forget, lease))

    def _forget(self, lease: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._latest.get(lease) is task:
            del self._latest[lease]

    async def _answer(
        self, request: lock_pb2.KeepAliveRequest, *, after: asyncio.Task[None] | None
    ) -> lock_pb2.KeepAliveResponse:
        response = await self._renew(request)
        if after is not None:
            await asyncio.wait([after])
        return response

    async def _renew(self, request: lock_pb2.KeepAliveRequest) -> lock_pb2.KeepAliveResponse:
        try:
            renewed = await self._service.renew(*messages.read_lease(request))
            return messages.keep_alive_response(request, renewed)
        except Exception as error:
            failed = errors.to_message(*errors.describe(error, where="keepalive"))
            return lock_pb2.KeepAliveResponse(
                resource=request.resource, sequence=request.sequence, error=failed
            )
