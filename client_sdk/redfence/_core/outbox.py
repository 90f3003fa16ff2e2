"""Orders the commands to send, packs them into messages, and tracks the unanswered ones. No I/O."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import chain, count

from redfence._core.calls import AcquireCall, StreamCall, UrgentCall
from redfence_proto.v1 import lock_pb2

# A command has at most about 600 bytes (resource and holder have 256 bytes each), so a message stays
# below 64 KiB.
COMMANDS_PER_MESSAGE_MAX = 100
# The limit of unanswered commands on one stream. A server ends a stream that exceeds the server's own
# limit (10,000 by default), and its error names that limit.
COMMANDS_IN_FLIGHT_MAX = 9000
# An acquire that waits at the server stays unanswered for long. Waiting acquires must leave room for
# acquires that do not wait, and all acquires must leave room for releases and renewals.
ACQUIRES_SHARE = 0.9
WAITS_SHARE = 0.8
# Below this size, stale entries are cheaper to keep than to sweep.
_SWEEP_AT_LEAST = 64


class _Lane:
    """Keeps queued acquires in the order in which their callers asked, even if they are queued again."""

    __slots__ = ("_calls", "_numbers")

    def __init__(self) -> None:
        self._calls: dict[int, AcquireCall] = {}
        # A heap. Numbers of calls that have left this lane are skipped at the top.
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[AcquireCall]:
        return iter([self._calls[number] for number in sorted(self._calls)])

    def put(self, call: AcquireCall) -> None:
        """Queue an acquire that is not in this lane."""
        self._calls[call.number] = call
        heapq.heappush(self._numbers, call.number)

    def drop(self, call: AcquireCall) -> bool:
        """Remove an acquire; return whether it was in this lane."""
        dropped = self._calls.pop(call.number, None) is not None
        if len(self._numbers) > _SWEEP_AT_LEAST + 2 * len(self._calls):
            self._numbers = sorted(self._calls)
        return dropped

    def take_first(self) -> AcquireCall:
        """Remove and return the acquire whose caller asked first."""
        while True:
            if (call := self._calls.pop(heapq.heappop(self._numbers), None)) is not None:
                return call


class Outbox:
    """Holds the commands of one client that are queued, or sent on the present stream and unanswered."""

    def __init__(self) -> None:
        # In the order of sending. Urgent calls that have ended stay in the queue and are skipped at its head.
        self._urgent: deque[UrgentCall] = deque()
        self._tries = _Lane()
        self._waits = _Lane()
        self._unanswered: dict[int, StreamCall] = {}
        self._acquires_in_flight = 0
        self._waits_in_flight = 0
        self._allow(COMMANDS_IN_FLIGHT_MAX)
        # No id is used twice, so an answer from an earlier stream matches no call.
        self._command_ids = count(1)

    def put(self, call: AcquireCall, *, now_ms: float) -> None:
        """Queue an acquire in its caller's order; acquires that do not wait go before those that wait."""
        call.single_try = False
        lane = self._waits if call.wait_ms_left(now_ms) > 0 else self._tries
        lane.put(call)

    def try_once(self, call: AcquireCall) -> bool:
        """Send a queued waiting acquire as a single try instead; return whether it was queued to wait."""
        if not self._waits.drop(call):
            return False
        call.single_try = True
        self._tries.put(call)
        return True

    def drop(self, call: AcquireCall) -> None:
        """Remove an acquire from the queues, if it is queued."""
        self._tries.drop(call)
        self._waits.drop(call)

    def put_first(self, call: UrgentCall) -> None:
        """Queue an urgent call; it is sent before every acquire."""
        self._urgent.append(call)

    def limit(self, commands_max: int) -> None:
        """Stay below a limit of unanswered commands that a server reported."""
        # With two or more there is room for an urgent call beside a waiting acquire.
        self._allow(max(min(commands_max, 2), commands_max * 9 // 10))

    def _allow(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self._acquires_max = max(1, min(in_flight_max - 1, int(in_flight_max * ACQUIRES_SHARE)))
        self._waits_max = max(1, min(in_flight_max - 2, int(in_flight_max * WAITS_SHARE)))

    def limit_waits(self) -> None:
        """Allow no more waiting acquires on this stream than wait now."""
        self._waits_max = min(self._waits_max, max(1, self._waits_in_flight))

    @property
    def has_waits_in_flight(self) -> bool:
        """Whether an acquire waits at the server."""
        return self._waits_in_flight > 0

    @property
    def has_unanswered(self) -> bool:
        """Whether a sent command is unanswered."""
        return bool(self._unanswered)

    @property
    def has_room(self) -> bool:
        """Whether the limit of unanswered commands allows one more."""
        return len(self._unanswered) < self._in_flight_max

    @property
    def has_queued(self) -> bool:
        """Whether a command may be queued; some may have ended already."""
        return bool(self._urgent or self._tries or self._waits)

    @property
    def has_queued_acquires(self) -> bool:
        """Whether an acquire is queued."""
        return bool(self._tries or self._waits)

    def waiting_lease_id(self, resource: str) -> str:
        """Return the lease id of the first acquire that waits at the server for a resource, or ""."""
        for call in self._unanswered.values():
            if not isinstance(call, AcquireCall) or call.abandoned or call.settled:
                continue
            if call.order.resource == resource and call.requested_wait_ms:
                return call.lease_id
        return ""

    def queued_acquires(self) -> list[AcquireCall]:
        """Return the acquires that are queued and not sent."""
        return [*self._tries, *self._waits]

    def acquires(self) -> list[AcquireCall]:
        """Return every acquire that has not ended, queued or sent."""
        sent = (
            call for call in self._unanswered.values() if isinstance(call, AcquireCall) and not call.settled
        )
        return [*self.queued_acquires(), *sent]

    def take_batch(self, now_ms: float) -> lock_pb2.SessionRequest | None:
        """Return one message with the next commands, or None; each call records `now_ms` as its sending."""
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
        """Remove and return the call with this command id; None if there is none."""
        call = self._unanswered.pop(command_id, None)
        if type(call) is AcquireCall:
            call.command_id = 0
            self._acquires_in_flight -= 1
            self._waits_in_flight -= call.requested_wait_ms > 0
        return call

    def take_lost(self) -> list[StreamCall]:
        """Remove and return the calls that a broken stream affects: unanswered and queued urgent ones."""
        lost = [call for call in chain(self._unanswered.values(), self._urgent) if not call.settled]
        for call in lost:
            if isinstance(call, AcquireCall):
                call.command_id = 0
        self._unanswered.clear()
        self._urgent.clear()
        self._acquires_in_flight = self._waits_in_flight = 0
        # The next server may allow more waiting acquires.
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
