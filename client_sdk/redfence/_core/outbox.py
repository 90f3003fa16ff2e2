"""Which commands leave next, in which message, and which are unanswered. No I/O."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import chain, count

from redfence._core.calls import AcquireCall, StreamCall, UrgentCall
from redfence_proto.v1 import lock_pb2

# A command is at most about 600 bytes (a resource and a holder of 256 bytes each), so a message stays below 64 KiB.
COMMANDS_PER_MESSAGE_MAX = 100
# Unanswered at a time on one stream; a server ends a stream that has more than it allows (10,000 by default, and it
# says how many).
COMMANDS_IN_FLIGHT_MAX = 9000
# What waits at the server stays unanswered for long. It may not use up the room of acquires that are answered at once,
# nor both the room of what ends and saves leases.
ACQUIRES_SHARE = 0.9
WAITS_SHARE = 0.8
# Below this size, stale entries are cheaper to keep than to sweep.
_SWEEP_AT_LEAST = 64


class _Lane:
    """Queued acquires in the order in which their callers came, whenever each was put here."""

    __slots__ = ("_calls", "_numbers")

    def __init__(self) -> None:
        self._calls: dict[int, AcquireCall] = {}
        # A heap. Numbers of calls that are not here any more are skipped when they surface.
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[AcquireCall]:
        return iter([self._calls[number] for number in sorted(self._calls)])

    def put(self, call: AcquireCall) -> None:
        """Queue an acquire that is not here."""
        self._calls[call.number] = call
        heapq.heappush(self._numbers, call.number)

    def drop(self, call: AcquireCall) -> bool:
        """Forget an acquire; return whether it was here."""
        dropped = self._calls.pop(call.number, None) is not None
        if len(self._numbers) > _SWEEP_AT_LEAST + 2 * len(self._calls):
            self._numbers = sorted(self._calls)
        return dropped

    def take_first(self) -> AcquireCall:
        """Return and forget the acquire whose caller came first."""
        while True:
            if (call := self._calls.pop(heapq.heappop(self._numbers), None)) is not None:
                return call


class Outbox:
    """The commands of one client: queued, or sent on the present stream and not answered."""

    def __init__(self) -> None:
        # In the order of leaving. Urgent calls that have ended stay where they lie and are skipped when they surface.
        self._urgent: deque[UrgentCall] = deque()
        self._tries = _Lane()
        self._waits = _Lane()
        self._unanswered: dict[int, StreamCall] = {}
        self._acquires_in_flight = 0
        self._waits_in_flight = 0
        self._allow(COMMANDS_IN_FLIGHT_MAX)
        # Never used twice, so that an answer of an earlier stream finds nobody.
        self._command_ids = count(1)

    def put(self, call: AcquireCall, *, now_ms: float) -> None:
        """Queue an acquire: before those whose callers came later, but one that waits behind all that do not."""
        call.single_try = False
        lane = self._waits if call.wait_ms_left(now_ms) > 0 else self._tries
        lane.put(call)

    def try_once(self, call: AcquireCall) -> bool:
        """Let an acquire that is queued to wait be tried once instead; return whether it was."""
        if not self._waits.drop(call):
            return False
        call.single_try = True
        self._tries.put(call)
        return True

    def drop(self, call: AcquireCall) -> None:
        """Forget an acquire that may be queued."""
        self._tries.drop(call)
        self._waits.drop(call)

    def put_first(self, call: UrgentCall) -> None:
        """Queue what ends or saves a lease: it goes before every acquire."""
        self._urgent.append(call)

    def limit(self, commands_max: int) -> None:
        """Stay below what a server said it allows."""
        # From two on there is room for something urgent beside an acquire that waits.
        self._allow(max(min(commands_max, 2), commands_max * 9 // 10))

    def _allow(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self._acquires_max = max(1, min(in_flight_max - 1, int(in_flight_max * ACQUIRES_SHARE)))
        self._waits_max = max(1, min(in_flight_max - 2, int(in_flight_max * WAITS_SHARE)))

    def limit_waits(self) -> None:
        """Let no more acquires wait on this stream than wait now."""
        self._waits_max = min(self._waits_max, max(1, self._waits_in_flight))

    @property
    def has_waits_in_flight(self) -> bool:
        """Whether an acquire waits at the server."""
        return self._waits_in_flight > 0

    @property
    def has_unanswered(self) -> bool:
        """Whether anything that was sent is unanswered."""
        return bool(self._unanswered)

    @property
    def has_room(self) -> bool:
        """Whether the stream takes one more command."""
        return len(self._unanswered) < self._in_flight_max

    @property
    def has_queued(self) -> bool:
        """Whether anything may be to send."""
        return bool(self._urgent or self._tries or self._waits)

    @property
    def has_queued_acquires(self) -> bool:
        """Whether an acquire is to send."""
        return bool(self._tries or self._waits)

    def waiting_lease_id(self, resource: str) -> str:
        """Return the secret of the first acquire that waits for a resource at the server; "" if none does."""
        for call in self._unanswered.values():
            if not isinstance(call, AcquireCall) or call.abandoned or call.settled:
                continue
            if call.order.resource == resource and call.requested_wait_ms:
                return call.lease_id
        return ""

    def queued_acquires(self) -> list[AcquireCall]:
        """Return the acquires that are not on the stream."""
        return [*self._tries, *self._waits]

    def acquires(self) -> list[AcquireCall]:
        """Return every acquire that has not ended."""
        sent = (
            call for call in self._unanswered.values() if isinstance(call, AcquireCall) and not call.settled
        )
        return [*self.queued_acquires(), *sent]

    def take_batch(self, now_ms: float) -> lock_pb2.SessionRequest | None:
        """Return the next commands in one message, or None; the instant of sending is noted in each."""
        batch = lock_pb2.SessionRequest()
        commands = batch.commands
        size = 0
        while size < COMMANDS_PER_MESSAGE_MAX and (call := self._next()) is not None:
            size += 1
            command_id = next(self._command_ids)
            call.write(commands.add(id=command_id), now_ms=now_ms)
            self._unanswered[command_id] = call
            if type(call) is AcquireCall:
                call.command_id = command_id
                self._acquires_in_flight += 1
                self._waits_in_flight += call.requested_wait_ms > 0
        return batch if size else None

    def take_answered(self, command_id: int) -> StreamCall | None:
        """Return the call that this id was sent for, once."""
        call = self._unanswered.pop(command_id, None)
        if type(call) is AcquireCall:
            call.command_id = 0
            self._acquires_in_flight -= 1
            self._waits_in_flight -= call.requested_wait_ms > 0
        return call

    def take_lost(self) -> list[StreamCall]:
        """Return, in order, what the end of the stream touches: all that is unanswered, and what was about to leave."""
        lost = [call for call in chain(self._unanswered.values(), self._urgent) if not call.settled]
        for call in lost:
            if isinstance(call, AcquireCall):
                call.command_id = 0
        self._unanswered.clear()
        self._urgent.clear()
        self._acquires_in_flight = self._waits_in_flight = 0
        # The next server may have room for more.
        self._allow(self._in_flight_max)
        return lost

    def _next(self) -> StreamCall | None:
        if not self.has_room:
            return None
        while self._urgent:
            urgent = self._urgent.popleft()
            if not urgent.settled:
                return urgent
        if self._acquires_in_flight < self._acquires_max:
            if self._tries:
                return self._tries.take_first()
            if self._waits and self._waits_in_flight < self._waits_max:
                return self._waits.take_first()
        return None
