"""Run one gRPC call for its connection, from the headers of the request to the end of the method's task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from redfence_server.http2 import wire
from redfence_server.http2.context import MESSAGE_BYTES, NO_ROOM, Context, Method
from redfence_server.http2.output import Output


class Call(Context):
    """Runs the method as a task, and ends the call in every case.

    Args:
        timeout_s: how long the caller waits, or None.
        reader: splits the body of the request into messages.
        headers: those of the request.
        own_bytes: what the call and its headers count as buffered, until it is closed.
    """

    __slots__ = ("_deadline_timer", "_reader", "own_bytes", "task")

    def __init__(
        self,
        out: Output,
        stream_id: int,
        method: Method,
        *,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float | None,
        reader: wire.MessageReader,
        headers: tuple[wire.Header, ...] = (),
        own_bytes: int = 0,
    ) -> None:
        deadline = None if timeout_s is None else loop.time() + timeout_s
        super().__init__(out, stream_id, method, loop=loop, deadline=deadline, headers=headers)
        self._reader = reader
        self.own_bytes = own_bytes
        self._deadline_timer = None if deadline is None else loop.call_at(deadline, self._on_deadline)
        self.task: asyncio.Task[None] | None = None

    def start_stream(self) -> asyncio.Task[None] | None:
        """Run the method of a call whose request is a stream; return its task, None for other calls."""
        if self._method.reads_stream:
            self.task = self._loop.create_task(self._run_writer(self._requests()))
        return self.task

    def feed(self, data: bytes) -> None:
        """Take bytes of the body; a broken or too large message ends the call."""
        self._untaken += len(data)
        if not self._finished:
            # A peer whose messages are not read may send no more than its window.
            if not self._inbox or not self._method.reads_stream:
                self._take()
            pending = self._reader.pending
            try:
                messages = self._reader.feed(data)
            except wire.CallError as error:
                self.end(error.code, error.details)
                return
            # A message counts as long as it is after decompression; the peer may have sent a thousandth.
            more = sum(map(len, messages)) + MESSAGE_BYTES * len(messages) + self._reader.pending - pending
            if not self._out.buffered.add(more):
                self.end(*NO_ROOM)
                return
            self._body_bytes += more
            self._inbox.extend(messages)
            if self._method.reads_stream:
                self._wake_reader()
            elif len(self._inbox) > 1:
                # At once: a peer that never ends its request could fill the memory.
                self._refuse_count()
        else:
            self._take()

    def feed_end(self) -> asyncio.Task[None] | None:
        """Take the end of the body; return the task of a method that starts now."""
        self._no_more = True
        if self._finished:
            return None
        if self._reader.pending:
            self.end(grpc.StatusCode.INTERNAL, "the request ends within a message")
        elif self._method.reads_stream:
            self._wake_reader()
        elif len(self._inbox) != 1:
            self._refuse_count()
        else:
            run = self._run_unary_stream if self._method.writes_stream else self._run_unary
            self.task = self._loop.create_task(run(self._inbox.popleft()))
            return self.task
        return None

    def _refuse_count(self) -> None:
        many = "more than one message" if self._inbox else "no message"
        self.end(grpc.StatusCode.UNIMPLEMENTED, f"the request has {many}; this method takes exactly 1")

    def lose(self) -> None:
        """Cancel the method, because the caller has gone or has cancelled the call."""
        self._close()
        if self.task is not None:
            self.task.cancel()

    def end(self, code: grpc.StatusCode, details: str, metadata: wire.Metadata = ()) -> None:
        """End the call with this status now, and cancel the method if it still runs."""
        self._finish(wire.status_trailers(code, details, metadata))
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        """End the call with CANCELLED if its method has ended without a status: it cancelled itself."""
        if not self._finished:
            self.end(grpc.StatusCode.CANCELLED, "the server cancelled the call")
        # A cancelled task refers to this call by its traceback: a cycle.
        self.task = self._wake = None

    # --- running

    async def _run_unary(self, data: bytes) -> None:
        try:
            response = await self._method.behaviour(self._parsed(data), self)
            if not self._finished:
                self._begun = True
                self._out.send_headers(self._id, wire.response_headers())
                self._out.send_message(self._id, wire.framed(self._method.serialize(response)))
                self._finish(wire.OK_TRAILERS)
        except Exception as error:
            self._on_error(error)

    async def _run_unary_stream(self, data: bytes) -> None:
        try:
            request = self._parsed(data)
        except grpc.aio.AbortError:
            return
        await self._run_writer(request)

    async def _run_writer(self, request: Any) -> None:
        try:
            answers = self._method.behaviour(request, self)
            if hasattr(answers, "__aiter__"):
                async for answer in answers:
                    await self.write(answer)
            else:
                await answers
            await self.send_initial_metadata(())
            self._finish(wire.OK_TRAILERS)
        except Exception as error:
            self._on_error(error)

    async def _requests(self) -> AsyncIterator[Any]:
        while (request := await self.read()) is not grpc.aio.EOF:
            yield request

    def _on_error(self, error: Exception) -> None:
        if isinstance(error, grpc.aio.AbortError):
            return
        code, details = self._failure
        if code is grpc.StatusCode.UNKNOWN:
            structlog.get_logger().error("internal_error", where="http2", exc_info=error)
        self._finish(wire.status_trailers(code, details, ()))

    # --- the end

    def _on_deadline(self) -> None:
        self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")

    def _close(self) -> None:
        super()._close()
        self._reader.clear()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
