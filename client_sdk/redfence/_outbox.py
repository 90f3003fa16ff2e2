"""Which commands leave next, in which message, and which are unanswered. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from redfence._calls import AcquireCall, StreamCall, UrgentCall
from redfence_proto.v1 import lock_pb2

# A command is at most about 600 bytes (a resource and a holder of 256 bytes each), so a message stays below 64 KiB.
COMMANDS_PER_MESSAGE_MAX = 100
# Unanswered at a time on one stream; a server ends a stream that has more than it allows (10,000 by default, and it
# says how many). Waiting acquires stay unanswered for long, so they may not use up the room that releases and
# renewals need.
COMMANDS_IN_FLIGHT_MAX = 9000
ACQUIRES_SHARE = 0.8


class Outbox:
    """The commands of one client: queued, or sent on the present stream and not answered.

    Settled calls stay where they lie and are skipped when they surface.
    """

    def __init__(self) -> None:
        self._acquires: deque[AcquireCall] = deque()
        self._urgent: deque[UrgentCall] = deque()
        self._unanswered: dict[int, StreamCall] = {}
        self._acquires_in_flight = 0
        self._in_flight_max = COMMANDS_IN_FLIGHT_MAX
        # Never used twice, so that an answer of an earlier stream finds nobody.
        self._command_ids = count(1)

    def put(self, call: AcquireCall) -> None:
        """Queue an acquire."""
        self._acquires.append(call)

    def put_first(self, call: UrgentCall) -> None:
        """Queue what ends or saves a lease: it goes before every acquire."""
        self._urgent.append(call)

    def limit(self, commands_max: int) -> None:
        """Stay below what a server said it allows."""
        self._in_flight_max = max(COMMANDS_PER_MESSAGE_MAX, commands_max * 9 // 10)

    @property
    def has_unanswered(self) -> bool:
        """Whether anything that was sent is unanswered."""
        return bool(self._unanswered)

    @property
    def has_queued(self) -> bool:
        """Whether anything may be to send."""
        return bool(self._urgent or self._acquires)

    @property
    def has_queued_acquires(self) -> bool:
        """Whether an acquire is to send."""
        while self._acquires and self._acquires[0].settled:
            self._acquires.popleft()
        return bool(self._acquires)

    def queued_acquires(self) -> Iterator[AcquireCall]:
        """Iterate over the acquires that are not on the stream."""
        return (call for call in self._acquires if not call.settled)

    def acquires(self) -> list[AcquireCall]:
        """Return every acquire that has not ended."""
        sent = (
            call for call in self._unanswered.values() if isinstance(call, AcquireCall) and not call.settled
        )
        return [*self.queued_acquires(), *sent]

    def take_batch(self, now_ms: float, *, wait_ms_max: int) -> lock_pb2.SessionRequest | None:
        """Return the next commands in one message, or None; the instant of sending is noted in each."""
        batch = lock_pb2.SessionRequest()
        commands = batch.commands
        size = 0
        while size < COMMANDS_PER_MESSAGE_MAX and (call := self._next()) is not None:
            size += 1
            command_id = next(self._command_ids)
            call.write(commands.add(id=command_id), now_ms=now_ms, wait_ms_max=wait_ms_max)
            self._unanswered[command_id] = call
            if type(call) is AcquireCall:
                self._acquires_in_flight += 1
                call.command_id = command_id
        return batch if size else None

    def take_answered(self, command_id: int) -> StreamCall | None:
        """Return the call that this id was sent for, once."""
        call = self._unanswered.pop(command_id, None)
        if type(call) is AcquireCall:
            self._acquires_in_flight -= 1
            call.command_id = 0
        return call

    def take_lost(self) -> list[StreamCall]:
        """Return, in order, what the end of the stream touches: all that is unanswered, and what was about to leave."""
        lost = [call for call in (*self._unanswered.values(), *self._urgent) if not call.settled]
        for call in lost:
            if isinstance(call, AcquireCall):
                call.command_id = 0
        self._unanswered.clear()
        self._urgent.clear()
        self._acquires_in_flight = 0
        return lost

    def put_back(self, calls: list[AcquireCall]) -> None:
        """Queue acquires again, in order, before those that have not been sent yet."""
        self._acquires.extendleft(reversed(calls))

    def _next(self) -> StreamCall | None:
        room = self._in_flight_max - len(self._unanswered)
        while self._urgent and room > 0:
            urgent = self._urgent.popleft()
            if not urgent.settled:
                return urgent
        while self._acquires and room > 0 and self._acquires_in_flight < self._in_flight_max * ACQUIRES_SHARE:
            acquire = self._acquires.popleft()
            if not acquire.settled:
                return acquire
        return None
