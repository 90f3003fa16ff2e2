"""Observe calls from outside: what the peer sends, and what it is answered.

The wrapper of a handler reads only messages of the contract, so it counts exactly what callers were told. It
knows nothing of the code that answers, and a server without metrics and debug log does not have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
import structlog

from redfence_proto import rich_error
from redfence_proto.v1 import lock_pb2
from redfence_server.clock import Clock
from redfence_server.metrics import outcomes
from redfence_server.metrics.requests import RequestCounts, Requests
from redfence_server.sharing.large import Large

if TYPE_CHECKING:
    # It needs the packages of the extra `traces`.
    from redfence_server.metrics.tracing import RequestSpan, Spans

# A name is checked only later, so a request may have a text of 64 KiB in place of it.
_RESOURCE_SHOWN_MAX: Final = 256


def _resource_of(request: Any) -> str | None:
    return getattr(request, "resource", None)


def _asks_to_wait(request: Any) -> bool:
    is_acquire = isinstance(request, lock_pb2.AcquireRequest)
    return is_acquire and request.HasField("wait_timeout")


class Observer:
    """Wraps the handlers of a server; counts each request, and logs it at level debug if `logs` is true.

    With `spans`, each request gets a span, except health probes and reflection.
    """

    def __init__(
        self, counts: RequestCounts, *, clock: Clock, logs: bool, spans: Spans | None = None
    ) -> None:
        self.counts = counts
        self.logs = logs
        self.spans = spans
        self._clock = clock

    def now_s(self) -> float:
        """Return the present instant."""
        return self._clock.now_ms() / 1000

    def wrap(self, path: str, handler: Any) -> Any:
        """Return the handler of the method with this path, observed."""
        service, _, method = path.rpartition("/")
        name = (service.rpartition(".")[2].removeprefix("/"), method)
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=self._unary(name, handler.unary_unary))
        if handler.unary_stream is not None:
            return handler._replace(unary_stream=self._stream(name, handler.unary_stream))
        if handler.stream_stream is not None:
            return handler._replace(stream_stream=self._stream(name, handler.stream_stream))
        return handler

    def answered(
        self,
        kind: Requests,
        duration_s: float,
        outcome: str,
        *,
        peer: str,
        resource: str | None,
        token: int | None = None,
    ) -> None:
        """Count the end of a request, and log it."""
        kind.end(outcome, duration_s)
        if self.logs:
            facts = {"resource": resource and resource[:_RESOURCE_SHOWN_MAX], "token": token}
            structlog.get_logger().debug(
                "request",
                method=kind.method,
                outcome=outcome,
                duration_ms=round(duration_s * 1000, 3),
                peer=peer,
                **{name: fact for name, fact in facts.items() if fact},
            )

    def _unary(self, name: tuple[str, str], method: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def call(request: Any, context: Any) -> Any:
            kind = self.counts.requests(*name, waits=_asks_to_wait(request))
            observed, peer, began_s = _Context(context), context.peer(), self.now_s()
            self.counts.begin_call(peer)
            kind.begin()
            outcome, token = outcomes.INTERNAL, None
            # Without this rule, most spans would be those of health probes.
            spans = self.spans if name[0] in _TRACED else None
            span = None if spans is None else spans.begin_call(*name, request, context.invocation_metadata())
            try:
                response = await method(request, observed)
                outcome, token = outcomes.outcome_of(response), outcomes.token_of(response)
            except asyncio.CancelledError:
                outcome = outcomes.CANCELLED
                raise
            finally:
                self.counts.end_call(peer)
                outcome = observed.outcome or outcome
                duration_s, resource = self.now_s() - began_s, _resource_of(request)
                if spans is not None and span is not None:
                    spans.end(span, outcome, token)
                self.answered(kind, duration_s, outcome, peer=peer, resource=resource, token=token)
            return response

        return call

    def _stream(self, name: tuple[str, str], method: Callable[[Any, Any], Any]) -> Any:
        streams = self.counts.streams(*name)
        observed_context = _STREAMS.get(streams.method, _Context)

        async def call(request: Any, context: Any) -> None:
            peer, began_s = context.peer(), self.now_s()
            observed = observed_context(context)
            if isinstance(observed, _CommandContext):
                observed.attach(self, streams)
            self.counts.begin_call(peer)
            streams.begin()
            outcome = outcomes.INTERNAL
            try:
                answers = method(request, observed)
                # A method writes by itself, or is a generator of its answers.
                if hasattr(answers, "__aiter__"):
                    async for answer in answers:
                        await observed.write(answer)
                else:
                    await answers
                outcome = outcomes.OK
            except asyncio.CancelledError:
                outcome = outcomes.CANCELLED
                raise
            finally:
                outcome = observed.outcome or outcome
                observed.close()
                self.counts.end_call(peer)
                streams.end(outcome, duration_s := self.now_s() - began_s)
                if self.logs:
                    structlog.get_logger().debug(
                        "stream_ended",
                        method=streams.method,
                        outcome=outcome,
                        duration_ms=round(duration_s * 1000, 3),
                        peer=peer,
                    )

        return call


class _Context:
    """Passes everything on to the context of a call, and notes the error that ended it."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.outcome: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Pass a message on."""
        await self._context.write(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call with a status.

        Raises:
            AbortError: always.
        """
        error = rich_error.from_trailing_metadata(trailing_metadata)
        self.outcome = code.name.lower() if error is None else outcomes.reason_name(error.reason)
        await self._context.abort(code, details, trailing_metadata)
        raise AssertionError("abort raises")  # pragma: no cover

    def close(self) -> None:
        """Note the end of the call."""


class _CommandContext(_Context):
    """Observes the commands of a stream.

    It keeps only texts and numbers of a command: a reference to it would keep its whole message in memory.
    """

    def attach(self, observer: Observer, stream: Requests) -> None:
        """Count for this observer; called before the method begins."""
        self._observer = observer
        self._stream = stream
        self._peer: str = self._context.peer()
        # By key, in the order in which they came: the kind, when it came, and the resource for the log.
        self._open: dict[Any, list[tuple[Requests, float, str | None, RequestSpan | None]]] = {}
        self._metadata = () if observer.spans is None else self._context.invocation_metadata()
        self._kinds: dict[tuple[str, bool], Requests] = {}

    def close(self) -> None:
        """Count the commands that got no answer."""
        now_s, answered = self._observer.now_s(), self._observer.answered
        for entries in self._open.values():
            for kind, began_s, resource, span in entries:
                if span is not None and self._observer.spans is not None:
                    self._observer.spans.end(span, outcomes.UNANSWERED)
                answered(kind, now_s - began_s, outcomes.UNANSWERED, peer=self._peer, resource=resource)
        self._open.clear()

    async def read(self) -> Any:
        """Return the next message, and begin its commands once it is parsed."""
        message = await self._context.read()
        return message.then(self._note) if isinstance(message, Large) else self._note(message)

    def _note(self, message: Any) -> Any:
        """Begin the commands of a message, and return it."""
        raise NotImplementedError

    def _begin(self, key: Any, command: str, request: Any, now_s: float, *, parent: str = "") -> None:
        waits = command == "acquire" and _asks_to_wait(request)
        kind = self._kinds.get((command, waits))
        if kind is None:
            method = f"{self._stream.method}.{command}"
            kind = self._observer.counts.requests(self._stream.service, method, waits=waits)
            self._kinds[command, waits] = kind
        kind.begin()
        resource = _resource_of(request) if self._observer.logs else None
        spans = self._observer.spans
        span = (
            None
            if spans is None
            else spans.begin(kind.service, kind.method, request, parent=parent, metadata=self._metadata)
        )
        self._open.setdefault(key, []).append((kind, now_s, resource, span))

    def _end(self, key: Any, outcome: str, response: Any, now_s: float) -> None:
        entries = self._open.get(key)
        if entries is None:
            return
        kind, began_s, resource, span = entries.pop(0)
        if not entries:
            del self._open[key]
        if span is not None and self._observer.spans is not None:
            self._observer.spans.end(span, outcome, outcomes.token_of(response))
        if self._observer.logs:
            token = outcomes.token_of(response)
            self._observer.answered(
                kind, now_s - began_s, outcome, peer=self._peer, resource=resource, token=token
            )
        else:
            kind.end(outcome, now_s - began_s)


class _SessionContext(_CommandContext):
    def _note(self, message: Any) -> Any:
        if isinstance(message, lock_pb2.SessionRequest):
            now_s = self._observer.now_s()
            for command in message.commands:
                name = command.WhichOneof("command") or "unknown"
                request = getattr(command, name, None)
                self._begin(command.id, name, request, now_s, parent=command.traceparent)
        return message

    async def write(self, message: Any) -> None:
        """Write results, and end their commands, also if the caller leaves as soon as it has them."""
        try:
            await self._context.write(message)
        finally:
            now_s = self._observer.now_s()
            for result in message.results:
                name = result.WhichOneof("result")
                response = getattr(result, name)
                is_error = name == "error"
                outcome = outcomes.reason_name(response.reason) if is_error else outcomes.outcome_of(response)
                self._end(result.id, outcome, response, now_s)


class _KeepAliveContext(_CommandContext):
    def _note(self, message: Any) -> Any:
        if isinstance(message, lock_pb2.KeepAliveRequest):
            key = (message.resource, message.sequence)
            self._begin(key, "renew", message, self._observer.now_s())
        return message

    async def write(self, message: Any) -> None:
        """Write the answer to a renewal, and end it, also if the caller leaves as soon as it has it."""
        try:
            await self._context.write(message)
        finally:
            if not message.HasField("draining"):
                failed = message.HasField("error")
                outcome = (
                    outcomes.reason_name(message.error.reason) if failed else outcomes.outcome_of(message)
                )
                self._end((message.resource, message.sequence), outcome, message, self._observer.now_s())


_TRACED: Final = frozenset({"LockService", "AdminService", "StorageService"})
_STREAMS: Final[Mapping[str, type[_Context]]] = MappingProxyType(
    {"Session": _SessionContext, "KeepAlive": _KeepAliveContext}
)
