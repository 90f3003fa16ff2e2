"""Carry the commands of all callers to one node over one socket.

Commands that come while the node works on others wait for it, and leave together: a batch costs the node one
fsync. Without commands on their way, those of one turn of the event loop leave at its end. A large batch
leaves in parts, so that the node works on one part while the server makes the next. Replies come in order, so
a queue matches them. Only this class reads the socket, so a cancelled caller leaves no reply for the next.
One timer serves the whole queue, because the oldest command is the first to be overdue.

Notices come over the same socket. RESP3 marks them, so notices and replies stay in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import hiredis

from redfence_server.locking.node import NoReply
from redfence_server.redis_io.dial import DialError, DialRefusedError

# With more unanswered commands the node counts as unreachable; each takes about half a kilobyte.
_UNANSWERED_MAX: Final = 20_000
# If the oldest command is unanswered for this many node timeouts, the socket is closed and dialled again.
_STALLED_AFTER_TIMEOUTS: Final = 4
# A timer that is so late shows that this process stood still.
_STALL_S: Final = 0.05
# How long commands wait for the reply to the batch before them. Higher: fewer and larger batches. Lower: a
# far node, whose replies take long, is asked earlier.
_GATHER_S: Final = 0.002
# A batch of so many commands leaves at once, if no more were unanswered when it began. So parts grow with the
# load. Higher: nodes and server wait for each other. Lower: a node needs more fsyncs.
_PART_MIN: Final = 32
# The most that one read takes; the kernel keeps the rest for the next turn of the loop.
_READ_BYTES_MAX: Final = 65_536
_INCOMPLETE: Final = object()

# The callback for the reply, and when the command was sent, in seconds of the event loop.
_Unanswered = tuple[Callable[[Any], None], float]

ReplyError: type[Exception] = hiredis.ReplyError


class NodeConnection(asyncio.BufferedProtocol):
    """Pipelines packed commands over one transport, and calls back once for each.

    It reads into one buffer. asyncio would allocate 256 KiB for each read and shrink it to a few hundred
    bytes, thousands of times a second. Other objects would fill the gaps, so that the heap grows for hours.

    Args:
        node_timeout_ms: after this time without a reply, a command gets `NoReply.TIMED_OUT`.
        on_lost: called once with the reason when the connection has ended, after all callbacks of commands.
        on_notice: called with the payload of each message on the subscribed channel.

    Attributes:
        in_time: the commands that the node may still answer in time, oldest first.
    """

    def __init__(
        self, *, node_timeout_ms: int, on_lost: Callable[[str], None], on_notice: Callable[[bytes], None]
    ) -> None:
        self._timeout_s = node_timeout_ms / 1000
        self._on_lost = on_lost
        self._on_notice = on_notice
        # Set while a subscription is unanswered; the node answers it before any later command.
        self._on_subscribed: Callable[[str], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._buffer = memoryview(bytearray(_READ_BYTES_MAX))
        self._transport: asyncio.Transport | None = None
        self._outbox: list[bytes] = []
        self._outbox_since = 0.0
        self._outbox_room = 0  # how many more commands the batch takes before it leaves
        self._flush_timer: asyncio.Handle | None = None
        self.in_time: deque[_Unanswered] = deque()
        # Timed-out commands whose replies may still come; always older than `in_time`.
        self._overdue: deque[_Unanswered] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._stalled = False
        self._end_reason = ""
        self.latency_ms: float | None = None

    @property
    def unanswered(self) -> int:
        """How many commands the node has not answered, with those that timed out."""
        return len(self.in_time) + len(self._overdue)

    def call(self, packed: bytes, on_raw: Callable[[Any], None]) -> bool:
        """Send a packed command; later call `on_raw` once with the reply, a `ReplyError` or a `NoReply`.

        Return False without a call if the connection has ended or too many commands are unanswered.
        """
        if self._transport is None or len(self.in_time) + len(self._overdue) >= _UNANSWERED_MAX:
            return False
        if not self._outbox:
            self._begin_batch()
        self._outbox.append(packed)
        self.in_time.append((on_raw, self._outbox_since))
        self._outbox_room -= 1
        if self._outbox_room == 0 and self._flush_timer is not None:
            self._flush_timer.cancel()
            self.flush()
        return True

    def _begin_batch(self) -> None:
        """Set when the next batch leaves: now, or after the reply to the one before, but within `_GATHER_S`.

        It leaves earlier if it gets large.

        All commands of a batch count as sent at its beginning, so a late one may time out `_GATHER_S` early.
        """
        now = self._outbox_since = self._loop.time()
        unanswered = len(self.in_time)
        self._outbox_room = unanswered if unanswered > _PART_MIN else _PART_MIN  # noqa: FURB136  (max costs a call)
        if unanswered:
            self._flush_timer = self._loop.call_at(now + _GATHER_S, self.flush)
        else:
            self._flush_timer = self._loop.call_soon(self.flush)
        if self._timer is None or self._timer.when() > now + self._timeout_s:
            self._arm(now + self._timeout_s)

    async def commands(self, *batch: Sequence[str | bytes | int]) -> list[Any]:
        """Return the replies to raw commands, in order; an error reply is a `DialRefusedError` in the list.

        Cancellation: the replies are dropped.

        Raises:
            DialError: the connection ended or takes no more commands, or a reply came too late.
        """
        answers: list[asyncio.Future[Any]] = [self._loop.create_future() for _ in batch]
        for parts, answer in zip(batch, answers, strict=True):
            packed: bytes = hiredis.pack_command(tuple(parts))  # type: ignore[arg-type]  # its stub says: a tuple of one
            if not self.call(packed, partial(_settle, answer)):
                raise DialError(f"{parts[0]!s}: the connection takes no more commands")
        values = [await answer for answer in answers]
        for parts, value in zip(batch, values, strict=True):
            if isinstance(value, NoReply):
                raise DialError(f"{parts[0]!s}: {value.name.lower().replace('_', ' ')}")
        return [
            DialRefusedError(f"{parts[0]!s}: {value}") if isinstance(value, ReplyError) else value
            for parts, value in zip(batch, values, strict=True)
        ]

    def subscribe(self, channel: str, on_subscribed: Callable[[str], None]) -> None:
        """Subscribe to the notices of a channel, once, before any command.

        `on_subscribed` is called with the node's reason to refuse, or an empty text.
        """
        assert self._transport is not None
        assert not self.in_time, "the first reply answers the subscription"
        self._on_subscribed = on_subscribed
        self._transport.write(hiredis.pack_command(("SUBSCRIBE", channel)))  # type: ignore[arg-type]  # its stub says: a tuple of one

    def abort(self, reason: str) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._end_reason = reason
            self._transport.abort()

    def flush(self) -> None:
        """Write what waits, without the reply to the batch before it."""
        self._flush_timer = None
        outbox, self._outbox = self._outbox, []
        if self._transport is not None and outbox:
            self._transport.write(b"".join(outbox))

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._expire)

    def _expire(self) -> None:
        """Time out overdue commands; abort the connection if a reply is overdue for too long."""
        now = self._loop.time()
        assert self._timer is not None
        if now - self._timer.when() > _STALL_S and not self._stalled:
            # This process stood still, so replies may wait in the socket. Read for a while before judging.
            self._stalled = True
            self._arm(now + _STALL_S)
            return
        self._stalled = False
        while self.in_time and now - self.in_time[0][1] >= self._timeout_s:
            entry = self.in_time.popleft()
            self._overdue.append(entry)
            entry[0](NoReply.TIMED_OUT)  # may call `call`, which leaves the timer to this method
        if self._overdue and now - self._overdue[0][1] >= _STALLED_AFTER_TIMEOUTS * self._timeout_s:
            self.abort("it no longer answers")
            return
        self._timer = None
        if self.in_time:
            self._arm(self.in_time[0][1] + self._timeout_s)
        elif self._overdue:
            self._arm(self._overdue[0][1] + _STALLED_AFTER_TIMEOUTS * self._timeout_s)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept commands from now on."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  (asyncio's)
        """Return the buffer for the next bytes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Match replies with commands, oldest first."""
        self._reader.feed(self._buffer, 0, nbytes)  # type: ignore[arg-type]  # its stub leaves out what else has a buffer
        sent_at = None
        while True:
            try:
                raw = self._reader.gets()
            except hiredis.ProtocolError as error:
                self.abort(f"it does not speak the Redis protocol: {error}")
                return
            if raw is _INCOMPLETE:
                break
            if self._on_subscribed is not None or isinstance(raw, hiredis.PushNotification):
                self._pushed(raw)
            elif self._overdue:
                _, sent_at = self._overdue.popleft()
            elif self.in_time:
                on_raw, sent_at = self.in_time.popleft()
                on_raw(raw)
            else:
                self.abort("it sent a reply to no command")
                return
        if self._outbox and len(self.in_time) == len(self._outbox):
            self._flush_soon()
        if sent_at is not None:
            self.latency_ms = (self._loop.time() - sent_at) * 1000

    def _flush_soon(self) -> None:
        """Let the next batch leave at the end of this turn, because the one before has been answered."""
        if isinstance(self._flush_timer, asyncio.TimerHandle):
            self._flush_timer.cancel()
            self._flush_timer = self._loop.call_soon(self.flush)

    def _pushed(self, raw: Any) -> None:
        if self._on_subscribed is not None:
            on_subscribed, self._on_subscribed = self._on_subscribed, None
            on_subscribed(str(raw) if isinstance(raw, ReplyError) else "")
        elif raw[0] == b"message":
            self._on_notice(raw[2])

    def connection_lost(self, exc: Exception | None) -> None:
        """Answer every command with DISCONNECTED, then call `on_lost`."""
        self._transport = None
        for timer in (self._timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._flush_timer = None
        self._overdue.clear()
        while self.in_time:
            on_raw, _ = self.in_time.popleft()
            on_raw(NoReply.DISCONNECTED)
        self._on_lost(self._end_reason or (str(exc) if exc else "it closed the connection"))


def _settle(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():
        answer.set_result(value)
