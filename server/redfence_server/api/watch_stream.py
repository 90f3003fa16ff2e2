"""Serve one WatchLocks call: proto in, proto out. lock_watch.py decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import grpc

from redfence_proto.v1 import lock_pb2
from redfence_server.api import errors, messages
from redfence_server.clock import WallClock
from redfence_server.errors import DrainingError, InvalidFieldError, NoQuorumError
from redfence_server.lock_watch import LockChange, LockEvent, LockWatch

_INTERVAL_MS_MIN: Final = 100
_INTERVAL_MS_MAX: Final = 60_000
_INTERVAL_MS_DEFAULT: Final = 1_000
# An event is below 600 bytes, and a message below 64 KiB.
_EVENTS_PER_MESSAGE_MAX: Final = 50
_KINDS: Final = MappingProxyType(
    {
        LockChange.HELD: lock_pb2.LOCK_EVENT_KIND_HELD,
        LockChange.ACQUIRED: lock_pb2.LOCK_EVENT_KIND_ACQUIRED,
        LockChange.RELEASED: lock_pb2.LOCK_EVENT_KIND_RELEASED,
        LockChange.EXPIRED: lock_pb2.LOCK_EVENT_KIND_EXPIRED,
        LockChange.LOST: lock_pb2.LOCK_EVENT_KIND_LOST,
        LockChange.FORCED: lock_pb2.LOCK_EVENT_KIND_FORCED,
    }
)


def read_interval_ms(request: lock_pb2.WatchLocksRequest) -> int:
    """Return the interval of a watch; the default if it is unset.

    Raises:
        InvalidFieldError: the interval is out of bounds.
    """
    if not request.HasField("interval"):
        return _INTERVAL_MS_DEFAULT
    seconds = request.interval.seconds + request.interval.nanos / 1e9
    if not _INTERVAL_MS_MIN <= seconds * 1000 <= _INTERVAL_MS_MAX:
        problem = f"is {seconds:.10g} s; at least 0.1 s and at most 60 s are allowed"
        metadata = {"min": f"{_INTERVAL_MS_MIN}ms", "max": f"{_INTERVAL_MS_MAX}ms"}
        raise InvalidFieldError("interval", problem, lock_pb2.ERROR_REASON_INVALID_INTERVAL, metadata)
    return int(seconds * 1000)


class WatchStream:
    """Serves one WatchLocks call; a peer that reads slowly gets fewer pictures, because none is queued.

    Args:
        check: raises when the caller may not watch any more; called before each picture.
    """

    unanswered = 0
    waiting = None
    kind = lock_pb2.SESSION_KIND_WATCH

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        watch: LockWatch,
        *,
        interval_ms: int,
        clock: WallClock,
        check: Callable[[], None],
    ) -> None:
        self._context = context
        self._watch = watch
        self._interval_ms = interval_ms
        self._clock = clock
        self._check = check
        self._next_at_ms = clock.now_ms()
        self._looking: asyncio.Task[Sequence[lock_pb2.WatchLocksResponse]] | None = None
        self._end_with: Exception | None = None

    def drain(self) -> None:
        """End with DRAINING: finish writing a picture, but give up one that is not complete."""
        self.end(DrainingError())

    def end(self, error: Exception) -> None:
        """Take no more pictures, and have `serve` raise the error; harmless to repeat."""
        self._end_with = self._end_with or error
        if self._looking is not None:
            self._looking.cancel()

    async def serve(self) -> None:
        """Write pictures until the watch ends, and raise the error that ends it.

        Cancellation: ends the watch.
        """
        while self._end_with is None:
            # A task of its own, because an end cancels a look, but must not cancel a write.
            self._looking = looking = asyncio.create_task(self._look(), name="watch-look")
            try:
                await asyncio.wait([looking])
            finally:
                looking.cancel()
                await asyncio.wait([looking])
                self._looking = None
            if looking.cancelled():
                continue
            for message in looking.result():
                await self._context.write(message)
        raise self._end_with

    async def _look(self) -> Sequence[lock_pb2.WatchLocksResponse]:
        """Wait for the interval, take a picture, and return its messages."""
        await asyncio.sleep(max(0.0, self._next_at_ms - self._clock.now_ms()) / 1000)
        self._check()
        self._next_at_ms = self._clock.now_ms() + self._interval_ms
        try:
            events = await self._watch.changes()
        except NoQuorumError as error:
            failed = errors.to_message(*errors.describe(error, where="watch"))
            return [lock_pb2.WatchLocksResponse(error=failed)]
        return self._messages(events)

    def _messages(self, events: Sequence[LockEvent]) -> Sequence[lock_pb2.WatchLocksResponse]:
        parts = [
            lock_pb2.WatchLocksResponse(events=map(_event, events[start : start + _EVENTS_PER_MESSAGE_MAX]))
            for start in range(0, len(events) or 1, _EVENTS_PER_MESSAGE_MAX)
        ]
        parts[-1].taken_at.FromMilliseconds(int(self._clock.wall_ms()))
        return parts


def _event(event: LockEvent) -> lock_pb2.LockEvent:
    lease = messages.current_hold(event.lease)
    told = lock_pb2.LockEvent(kind=_KINDS[event.change], resource=event.resource, lease=lease)
    if event.change not in {LockChange.HELD, LockChange.ACQUIRED}:
        told.lease.ClearField("remaining")
    return told
