"""One socket to one node that carries the commands of every caller.

Commands issued in one turn of the event loop leave in one write, and the node answers them with one fsync. Replies come in
order, so a queue matches them. Only this class reads the socket, so a caller that goes away cannot leave a reply for the
next one. Timeouts need one timer for the whole queue: the oldest command is the first to be overdue.

Notices come over the same socket, which speaks RESP3: it tells what was pushed from what was asked for. So a notice can
neither overtake the reply to an earlier command nor be overtaken by the reply to a later one.
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

# Above this many unanswered commands the node is as good as unreachable; each takes about half a kilobyte.
_UNANSWERED_MAX: Final = 20_000
# A socket whose oldest command is unanswered for this many node timeouts is given up and dialled anew.
_STALLED_AFTER_TIMEOUTS: Final = 4
# A read takes this much at most; more waits in the kernel for the next turn of the loop.
_READ_BYTES_MAX: Final = 65_536
_INCOMPLETE: Final = object()

# The callback for the reply, and when the command was issued, in seconds of the event loop.
_Unanswered = tuple[Callable[[Any], None], float]

ReplyError: type[Exception] = hiredis.ReplyError


class NodeConnection(asyncio.BufferedProtocol):
    """Pipelines packed commands over one transport.

    It reads into one buffer of its own. asyncio would allocate 256 KiB for each read and shrink it to the few hundred bytes
    that came, thousands of times a second. Other objects would settle in the gaps, and the heap would grow for hours.

    Args:
        node_timeout_ms: a command without a reply for this long is told `NoReply.TIMED_OUT`. Its late reply is dropped.
        on_lost: told once, with the reason, when the connection has ended; every unanswered command has been told by then.
        on_notice: told the payload of each message published on the channel that was subscribed to.
    """

    def __init__(
        self, *, node_timeout_ms: int, on_lost: Callable[[str], None], on_notice: Callable[[bytes], None]
    ) -> None:
        self._timeout_s = node_timeout_ms / 1000
        self._on_lost = on_lost
        self._on_notice = on_notice
        # Told whether a subscription was granted; the node answers it before anything that is sent later.
        self._on_subscribed: Callable[[str], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._buffer = memoryview(bytearray(_READ_BYTES_MAX))
        self._transport: asyncio.Transport | None = None
        self._outbox: list[bytes] = []
        self._unanswered: deque[_Unanswered] = deque()
        # Commands already told TIMED_OUT whose replies are still owed by the node; always older than `_unanswered`.
        self._overdue: deque[_Unanswered] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._end_reason = ""
        self.latency_ms: float | None = None

    def call(self, packed: bytes, on_raw: Callable[[Any], None]) -> bool:
        """Send a packed command; `on_raw` is told the parsed reply, a `ReplyError`, or a `NoReply`, exactly once and later.

        Returns False, and tells nothing, if the connection has ended or too much is unanswered.
        """
        if self._transport is None or len(self._unanswered) + len(self._overdue) >= _UNANSWERED_MAX:
            return False
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(packed)
        now = self._loop.time()
        self._unanswered.append((on_raw, now))
        if self._timer is None or self._timer.when() > now + self._timeout_s:
            self._arm(now + self._timeout_s)
        return True

    async def commands(self, *batch: Sequence[str | bytes | int]) -> list[Any]:
        """Return the answers to raw commands, in order; a `DialRefusedError` stands for one that is an error.

        Cancellation: the answers are dropped.

        Raises:
            DialError: the connection ended, takes no more, or an answer came too late.
        """
        answers: list[asyncio.Future[Any]] = [self._loop.create_future() for _ in batch]
        for parts, answer in zip(batch, answers, strict=True):
            packed: bytes = hiredis.pack_command(tuple(parts))  # type: ignore[arg-type]  # its stub says: a tuple of one
            if not self.call(packed, partial(_settle, answer)):
                raise DialError(f"{parts[0]!s}: the connection takes no command")
        values = [await answer for answer in answers]
        for parts, value in zip(batch, values, strict=True):
            if isinstance(value, NoReply):
                raise DialError(f"{parts[0]!s}: {value.name.lower().replace('_', ' ')}")
        return [
            DialRefusedError(f"{parts[0]!s}: {value}") if isinstance(value, ReplyError) else value
            for parts, value in zip(batch, values, strict=True)
        ]

    def subscribe(self, channel: str, on_subscribed: Callable[[str], None]) -> None:
        """Begin to take the notices of a channel: the first thing to send, and once at most.

        `on_subscribed` is told why the node refuses, or nothing.
        """
        assert self._transport is not None
        assert not self._unanswered, "the answer is told by its place"
        self._on_subscribed = on_subscribed
        self._transport.write(hiredis.pack_command(("SUBSCRIBE", channel)))  # type: ignore[arg-type]  # its stub says: a tuple of one

    def abort(self, reason: str) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._end_reason = reason
            self._transport.abort()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if self._transport is not None and outbox:
            self._transport.write(b"".join(outbox))

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._expire)

    def _expire(self) -> None:
        """Tell the overdue, and give the connection up if the node owes replies for too long."""
        now = self._loop.time()
        while self._unanswered and now - self._unanswered[0][1] >= self._timeout_s:
            entry = self._unanswered.popleft()
            self._overdue.append(entry)
            entry[0](NoReply.TIMED_OUT)  # may call `call`, which leaves the timer to us
        if self._overdue and now - self._overdue[0][1] >= _STALLED_AFTER_TIMEOUTS * self._timeout_s:
            self.abort("it answers nothing any more")
            return
        self._timer = None
        if self._unanswered:
            self._arm(self._unanswered[0][1] + self._timeout_s)
        elif self._overdue:
            self._arm(self._overdue[0][1] + _STALLED_AFTER_TIMEOUTS * self._timeout_s)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to carry commands."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  (asyncio's)
        """Return where the next bytes are to be put."""
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
            elif self._unanswered:
                on_raw, sent_at = self._unanswered.popleft()
                on_raw(raw)
            else:
                self.abort("it sent a reply to no command")
                return
        if sent_at is not None:
            self.latency_ms = (self._loop.time() - sent_at) * 1000

    def _pushed(self, raw: Any) -> None:
        if self._on_subscribed is not None:
            on_subscribed, self._on_subscribed = self._on_subscribed, None
            on_subscribed(str(raw) if isinstance(raw, ReplyError) else "")
        elif raw[0] == b"message":
            self._on_notice(raw[2])

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every waiting caller, then the owner."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._overdue.clear()
        while self._unanswered:
            on_raw, _ = self._unanswered.popleft()
            on_raw(NoReply.DISCONNECTED)
        self._on_lost(self._end_reason or (str(exc) if exc else "it closed the connection"))


def _settle(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():
        answer.set_result(value)
