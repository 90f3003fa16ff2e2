"""Serve one streaming call: what Session and KeepAlive share, and Session. lock_service.py decides."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import grpc

from redfence_proto.v1 import lock_pb2
from redfence_server.api import errors, messages
from redfence_server.api.command_order import in_order, rank
from redfence_server.api.command_stream import CommandStream
from redfence_server.api.parsing import Malformed
from redfence_server.clock import Clock
from redfence_server.errors import InvalidFieldError, RedfenceServerError
from redfence_server.lock_service import LockCalls, RenewOutcome
from redfence_server.model import AcquireCall, Lease
from redfence_server.randomness import Randomness
from redfence_server.sharing.large import Large
from redfence_server.sharing.shares import Shares
from redfence_server.sharing.turns import COMMANDS_PER_PART
from redfence_server.waiting.acquiring import AcquireEnd, Acquisition, NotGranted

# A result is below 1 KiB and a message below 64 KiB.
_RESULTS_PER_MESSAGE_MAX: Final = 60
# A stream pauses so long after a part with too many new names, so that a flood of them delays others less.
_AFTER_REFUSALS_S: Final = 0.002

StreamContext = grpc.aio.ServicerContext[Any, Any]
WriteEnd = Callable[[lock_pb2.SessionResult, Any], None]
Item = TypeVar("Item")


class Stream(ABC, Generic[Item]):
    """Reads until the peer closes; writes results as they come, and `notice` when the server drains."""

    def __init__(
        self,
        context: StreamContext,
        *,
        shares: Shares,
        peer: str,
        commands_max: int,
        batch_max: int,
        notice: Item,
    ) -> None:
        self._context = context
        self._shares = shares
        self._peer = peer
        self._commands: CommandStream[Item] = CommandStream(
            open_max=commands_max, batch_max=batch_max, budget=shares.commands, peer=peer
        )
        self._notice = notice
        self._reading: asyncio.Task[None] | None = None
        self._draining = False
        self._end_with: Exception | None = None

    @abstractmethod
    async def _begin(self, request: Any) -> None:
        """Start the commands of one message, in parts of `COMMANDS_PER_PART`."""

    @abstractmethod
    async def _write(self, items: list[Item]) -> None:
        """Write results."""

    @abstractmethod
    def _on_protocol_error(self) -> None:
        """End the commands that could delay the end of the stream, after a peer broke the protocol."""

    @abstractmethod
    def _clean_up(self) -> None:
        """Clean up after the last write."""

    @property
    def unanswered(self) -> int:
        """How many commands have no written result."""
        return self._commands.unanswered

    @property
    def waiting(self) -> int | None:
        """How many acquires are unanswered; None for a stream without acquires."""
        return None

    @property
    @abstractmethod
    def kind(self) -> lock_pb2.SessionKind.ValueType:
        """The kind of the stream, for operators."""

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

    def end(self, error: Exception) -> None:
        """Start no more commands, cancel acquires, and have `serve` raise the error; harmless to repeat."""
        self._end_with = error
        self._on_protocol_error()
        self._commands.finish()
        if self._reading is not None:
            self._reading.cancel()

    async def serve(self) -> None:
        """Run commands until the peer closes, the server drains, or the peer breaks the protocol.

        Cancellation: unfinished acquires are cancelled, and so undone.

        Raises:
            TooManyCommandsError: the peer has too many streams or unanswered commands.
        """
        # An open stream takes room, so that streams are bounded as well.
        self._commands.make_room(1)
        self._reading = reading = asyncio.create_task(self._read(), name="stream-read")
        if self._draining:
            reading.cancel()
        try:
            await self._commands.write_all(self._write)
        finally:
            reading.cancel()
            self._clean_up()
            self._commands.close()
            await asyncio.wait([reading])
            # A cancelled task refers to this stream by its traceback: a cycle.
            self._reading = None
        if not reading.cancelled() and (error := reading.exception()) is not None:
            try:
                raise error
            finally:
                del error, reading
        if self._end_with is not None:
            raise self._end_with

    async def _begin_all(self) -> None:
        while (request := await self._context.read()) is not grpc.aio.EOF:
            if isinstance(request, Large):
                await self._shares.turns.begin(self._peer, COMMANDS_PER_PART)
                request = request.parse()
            if isinstance(request, Malformed):
                raise InvalidFieldError("", request.problem, lock_pb2.ERROR_REASON_MALFORMED_MESSAGE)
            await self._begin(request)

    async def _read(self) -> None:
        try:
            await self._begin_all()
        except RedfenceServerError as error:
            # The peer broke the protocol or a limit. The frames of the traceback would keep its message.
            self._end_with = error.with_traceback(None)
            self._on_protocol_error()
        except Exception:
            self._on_protocol_error()
            raise
        finally:
            self._commands.finish()


@dataclass(slots=True)
class _Result:
    """The end of one command: an outcome or the error that ended it, and how to write it."""

    command_id: int
    end: Any
    write: WriteEnd
    call: AcquireCall | None = None


class SessionStream(Stream[_Result | lock_pb2.Draining]):
    """Serves one Session call."""

    def __init__(
        self,
        context: StreamContext,
        *,
        service: LockCalls,
        clock: Clock,
        randomness: Randomness,
        commands_max: int,
        draining: lock_pb2.Draining,
        shares: Shares,
        peer: str,
    ) -> None:
        super().__init__(
            context,
            shares=shares,
            peer=peer,
            commands_max=commands_max,
            batch_max=_RESULTS_PER_MESSAGE_MAX,
            notice=draining,
        )
        self._service = service
        self._clock = clock
        self._randomness = randomness
        self._connection = context.peer()
        self._acquires: dict[int, Acquisition] = {}
        self._open_ids: set[int] = set()

    @property
    def waiting(self) -> int:
        """See `Stream`."""
        return len(self._acquires)

    @property
    def kind(self) -> lock_pb2.SessionKind.ValueType:
        """See `Stream`."""
        return lock_pb2.SESSION_KIND_SESSION

    def _clean_up(self) -> None:
        self._on_protocol_error()
        # A grant that no write has taken certainly has not reached the peer.
        for result in self._commands.unwritten:
            if isinstance(result, _Result) and result.call is not None and isinstance(result.end, Lease):
                self._service.undo_grant(result.call, result.end)

    async def _write(self, items: list[_Result | lock_pb2.Draining]) -> None:
        response = lock_pb2.SessionResponse()
        for item in items:
            if isinstance(item, lock_pb2.Draining):
                response.draining.CopyFrom(item)
                continue
            self._open_ids.discard(item.command_id)
            result = response.results.add(id=item.command_id)
            if isinstance(item.end, Exception):
                _write_error(result, _error_bytes(item.end))
            else:
                item.write(result, item.end)
        await self._context.write(response)

    async def _begin(self, request: lock_pb2.SessionRequest) -> None:
        arrived_at_ms = self._clock.now_ms()
        count = len(request.commands)
        if count <= COMMANDS_PER_PART:
            await self._shares.turns.begin(self._peer, count)
            await self._start_part(sorted(request.commands, key=rank), arrived_at_ms)
            return
        # Refuse a peer without room before any other work, so that it costs little.
        self._commands.make_room(count)
        turn = partial(self._shares.turns.begin, self._peer, COMMANDS_PER_PART)
        order = await in_order(request.commands, turn)
        for first in range(0, count, COMMANDS_PER_PART):
            await turn()
            part = [request.commands[index] for index in order[first : first + COMMANDS_PER_PART]]
            await self._start_part(part, arrived_at_ms)

    async def _start_part(self, commands: Sequence[lock_pb2.SessionCommand], arrived_at_ms: float) -> None:
        refusals = self._shares.new_names.refusals
        for command in commands:
            self._start(command, arrived_at_ms)
        if self._shares.new_names.refusals > refusals:
            await asyncio.sleep(_AFTER_REFUSALS_S)

    def _on_protocol_error(self) -> None:
        for acquisition in list(self._acquires.values()):
            acquisition.cancel()

    def _start(self, command: lock_pb2.SessionCommand, arrived_at_ms: float) -> None:
        command_id = command.id
        if command_id == 0 or command_id in self._open_ids:
            problem = "is 0; ids start at 1" if command_id == 0 else f"{command_id} is still unanswered"
            metadata = {"command_id": str(command_id)}
            raise InvalidFieldError(
                "commands.id", problem, lock_pb2.ERROR_REASON_INVALID_COMMAND_ID, metadata
            )
        self._commands.begin()
        self._open_ids.add(command_id)
        try:
            self._begin_command(command, arrived_at_ms)
        except Exception as error:
            # Keep the error as bytes, because a peer may leave thousands of them unread.
            self._on_end(command_id, _write_error, _error_bytes(error))

    def _begin_command(self, command: lock_pb2.SessionCommand, arrived_at_ms: float) -> None:
        match command.WhichOneof("command"):
            case "acquire":
                self._begin_acquire(command.id, command.acquire, arrived_at_ms)
            case "release":
                on_end = partial(self._on_end, command.id, _write_release)
                self._service.begin_release(*messages.read_lease(command.release), on_end)
            case "renew":
                on_end = partial(self._on_end, command.id, partial(_write_renewal, command.renew))
                self._service.begin_renew(*messages.read_lease(command.renew), on_end)
            case "cancel":
                acquisition = self._acquires.get(command.cancel.id)
                if acquisition is not None:
                    acquisition.cancel()
                self._on_end(command.id, _write_cancel, acquisition is not None)
            case _:
                raise InvalidFieldError(
                    "commands.command",
                    "is missing, or this server does not know its kind",
                    lock_pb2.ERROR_REASON_UNKNOWN_COMMAND,
                    {"command_id": str(command.id)},
                )

    def _begin_acquire(self, command_id: int, request: lock_pb2.AcquireRequest, arrived_at_ms: float) -> None:
        call = messages.read_acquire(
            request,
            ttl_ms_max=self._service.ttl_ms_max,
            new_lease_id=self._randomness.hex_id,
            arrived_at_ms=arrived_at_ms,
            connection=self._connection,
            peer=self._peer,
        )
        if call.resource not in self._shares.new_names.recent:
            self._shares.new_names.check(self._peer, call.resource)
        on_end = partial(self._on_acquire_end, command_id, call)
        acquisition = self._service.begin_acquire(call, on_end)
        if acquisition.end is None:
            self._acquires[command_id] = acquisition

    def _on_acquire_end(self, command_id: int, call: AcquireCall, end: AcquireEnd) -> None:
        self._acquires.pop(command_id, None)
        self._commands.answer(_Result(command_id, end, partial(_write_acquire, call), call))

    def _on_end(self, command_id: int, write: WriteEnd, end: Any) -> None:
        self._commands.answer(_Result(command_id, end, write))


def _write_acquire(call: AcquireCall, result: lock_pb2.SessionResult, outcome: Lease | NotGranted) -> None:
    messages.fill_acquire(result.acquire, call, outcome)


def _write_release(result: lock_pb2.SessionResult, was_held: bool) -> None:  # noqa: FBT001  (the outcome)
    messages.fill_release(result.release, was_held)


def _write_renewal(
    request: lock_pb2.KeepAliveRequest, result: lock_pb2.SessionResult, renewed: RenewOutcome
) -> None:
    messages.fill_renewal(result.renew, request, renewed)


def _write_cancel(result: lock_pb2.SessionResult, found: bool) -> None:  # noqa: FBT001  (the outcome)
    result.cancel.found = found


def _error_bytes(error: Exception) -> bytes:
    return errors.to_message(*errors.describe(error, where="session")).SerializeToString()


def _write_error(result: lock_pb2.SessionResult, error: bytes) -> None:
    result.error.MergeFromString(error)
