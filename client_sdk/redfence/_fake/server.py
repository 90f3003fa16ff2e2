"""Implements the contract in memory, without nodes, quorum or network. Thread-safe.

It answers commands as the contract defines and grants ordered tokens. Its owner switches faults on and off.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redfence._clock import Clock
from redfence._fake.locks import FakeHold, FakeLocks, answer_grant, problem_of, validity_ms
from redfence._messages.requests import duration_ms
from redfence._transport.links import Method
from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2

Deliver = Callable[[lock_pb2.SessionResponse | None], None]
"""Receives each response of a session, and None at its end. Must not block: the server's lock is held."""

_INVALID_ARGUMENT, _UNAVAILABLE, _CANCELLED = 3, 14, 1
# As the contract defines it for GetLock.
_SHOWN_MAX = 100


@dataclass(slots=True, eq=False)
class _Waiting:
    session: FakeSession
    command_id: int
    request: lock_pb2.AcquireRequest
    arrived_at_ms: float
    until_ms: float


@dataclass(eq=False)
class FakeSession:
    """One stream of one client.

    Attributes:
        server: the in-memory server.
        deliver: receives the responses.
        open: whether the stream is open.
        held_requests: the requests that came while the server was frozen.
    """

    server: FakeServer
    deliver: Deliver
    open: bool = True
    held_requests: list[lock_pb2.SessionRequest] = field(default_factory=list)

    def handle(self, request: lock_pb2.SessionRequest) -> None:
        """Run the commands of one message."""
        self.server.handle(self, request)

    def close(self) -> None:
        """End the stream and cancel its waiting acquires."""
        self.server.close(self)


class FakeServer:
    """Answers sessions and unary calls over a dictionary of locks.

    Args:
        clock: the clock; leases expire and waits end when `tick` is called.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._locks = FakeLocks(clock)
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._sessions: dict[FakeSession, None] = {}
        # Faults.
        self.frozen = False
        self.quorum_lost = False
        # How many commands of each kind came. Tests use it, e.g. to see whether a lease was renewed.
        self.counts: dict[str, int] = {}

    # Streams.

    def connect(self, deliver: Deliver) -> FakeSession:
        """Open a stream."""
        with self._lock:
            session = FakeSession(self, deliver)
            self._sessions[session] = None
            return session

    def handle(self, session: FakeSession, request: lock_pb2.SessionRequest) -> None:
        """Run the commands of one message, and deliver the results that are ready."""
        with self._lock:
            if not session.open:
                return
            if self.frozen:
                session.held_requests.append(request)
                return
            now_ms = self._expire()
            results = []
            for command in request.commands:
                result = lock_pb2.SessionResult(id=command.id)
                if self._carry_out(session, command, result, now_ms):
                    results.append(result)
            if results:
                session.deliver(lock_pb2.SessionResponse(results=results))

    def close(self, session: FakeSession) -> None:
        """End a stream and cancel its waiting acquires."""
        with self._lock:
            if not session.open:
                return
            session.open = False
            self._sessions.pop(session, None)
            for queue in self._waiting.values():
                for waiting in [w for w in queue if w.session is session]:
                    queue.remove(waiting)
            session.deliver(None)

    def drain(self) -> None:
        """Answer every waiting acquire with DRAINING, announce the end on every stream, and end them."""
        with self._lock:
            for queue in self._waiting.values():
                while queue:
                    waiting = queue.popleft()
                    result = lock_pb2.SessionResult(id=waiting.command_id)
                    _error(result, _UNAVAILABLE, lock_pb2.ERROR_REASON_DRAINING, "this server is stopping")
                    waiting.session.deliver(lock_pb2.SessionResponse(results=[result]))
            for session in list(self._sessions):
                session.deliver(lock_pb2.SessionResponse(draining=lock_pb2.Draining()))
                self.close(session)

    def thaw(self) -> None:
        """End the freeze, and run the commands that came meanwhile."""
        with self._lock:
            self.frozen = False
            for session in list(self._sessions):
                held_requests, session.held_requests = session.held_requests, []
                for request in held_requests:
                    self.handle(session, request)

    # Time.

    def tick(self) -> None:
        """End expired leases, grant their locks to waiters, and end waits that are over."""
        with self._lock:
            if not self.frozen:
                self._expire()

    # Methods for the owner.

    def hold_of(self, resource: str) -> FakeHold | None:
        """Return the present hold of a resource, or None if it is free."""
        with self._lock:
            self._expire()
            return self._locks.get(resource)

    def end(self, resource: str) -> bool:
        """End the lease of a resource as if ttl and lock delay were over; return whether there was one."""
        with self._lock:
            ended = self._locks.end(resource)
            self._grant_next(resource)
            return ended

    def grant(self, resource: str, *, holder: str, ttl_ms: float) -> int:
        """Grant a resource to another holder, even if it is held; return the new token."""
        with self._lock:
            return self._locks.grant(resource, lease_id="-" * 32, holder=holder, ttl_ms=ttl_ms).token

    def waiters(self, resource: str) -> int:
        """Return how many acquires wait for a resource."""
        with self._lock:
            return len(self._waiting.get(resource, ()))

    # Unary calls.

    def call(self, method: Method, request: Any) -> Any:
        """Answer a unary call."""
        with self._lock:
            self._expire()
            if method == "ClusterStatus":
                return _cluster_status(quorum_lost=self.quorum_lost, high=self._locks.max_token())
            current = self._locks.get(request.resource)
            hold = self._locks.current(current) if current else None
            if method == "GetLock":
                return self._get_lock(request, hold)
            live = current and not current.closed and current.token == request.fencing_token
            state = lock_pb2.TOKEN_STATE_LIVE if live else lock_pb2.TOKEN_STATE_NOT_LIVE
            return lock_pb2.CheckTokenResponse(state=state, current=hold)

    def _get_lock(
        self, request: lock_pb2.GetLockRequest, hold: lock_pb2.CurrentHold | None
    ) -> lock_pb2.GetLockResponse:
        queue = self._waiting.get(request.resource, ())
        response = lock_pb2.GetLockResponse(resource=request.resource, current=hold, waiters=len(queue))
        for position, waiting in enumerate(queue, 1):
            if waiting.request.lease_id == request.lease_id:
                response.position = position
            if position <= _SHOWN_MAX:
                shown = response.queue.add(holder=waiting.request.holder)
                shown.waited.FromMilliseconds(int(self._clock.now_ms() - waiting.arrived_at_ms))
        return response

    # Commands. These methods run with the lock held.

    def _carry_out(
        self,
        session: FakeSession,
        command: lock_pb2.SessionCommand,
        result: lock_pb2.SessionResult,
        now_ms: float,
    ) -> bool:
        """Run a command and fill in its result; return whether to send the result now."""
        kind = command.WhichOneof("command") or ""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind == "acquire":
            return self._acquire(session, command.id, command.acquire, result, now_ms)
        if kind == "release":
            self._release(command.release, result)
        elif kind == "renew":
            self._renew(command.renew, result, now_ms)
        else:
            self._cancel(session, command.cancel.id, result)
        return True

    def _acquire(
        self,
        session: FakeSession,
        command_id: int,
        request: lock_pb2.AcquireRequest,
        result: lock_pb2.SessionResult,
        now_ms: float,
    ) -> bool:
        if problem := problem_of(request):
            _error(result, _INVALID_ARGUMENT, *problem)
            return True
        if self.quorum_lost:
            _error(
                result, _UNAVAILABLE, lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE, "no quorum of nodes answered"
            )
            return True
        hold = self._locks.get(request.resource)
        queue = self._waiting.setdefault(request.resource, deque())
        if hold is not None and hold.is_of(request.lease_id):
            hold.renew(now_ms)  # a retry gets the same grant again
            answer_grant(result, request, hold, waited_ms=0)
        elif hold is None and not queue:
            hold = self._locks.grant_to(request)
            answer_grant(result, request, hold, waited_ms=0)
        elif wait_ms := duration_ms(request.wait_timeout):
            queue.append(_Waiting(session, command_id, request, now_ms, now_ms + wait_ms))
            return False
        else:
            result.acquire.outcome = lock_pb2.ACQUIRE_OUTCOME_HELD
            if hold is not None:
                result.acquire.current.CopyFrom(self._locks.current(hold))
        return True

    def _release(self, request: lock_pb2.ReleaseRequest, result: lock_pb2.SessionResult) -> None:
        if self.quorum_lost:
            _error(
                result, _UNAVAILABLE, lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE, "no quorum of nodes answered"
            )
            return
        hold = self._locks.get(request.resource)
        if hold is None or hold.lease_id != request.lease_id:
            result.release.outcome = lock_pb2.RELEASE_OUTCOME_NOT_HELD
            return
        not_held, released = lock_pb2.RELEASE_OUTCOME_NOT_HELD, lock_pb2.RELEASE_OUTCOME_RELEASED
        result.release.outcome = not_held if hold.closed else released
        self.end(request.resource)

    def _renew(
        self, request: lock_pb2.KeepAliveRequest, result: lock_pb2.SessionResult, now_ms: float
    ) -> None:
        renewed = result.renew
        renewed.resource = request.resource
        hold = self._locks.get(request.resource)
        if self.quorum_lost:
            renewed.state = lock_pb2.LEASE_STATE_AT_RISK
            renewed.reason = lock_pb2.LEASE_STATE_REASON_QUORUM_UNAVAILABLE
        elif hold is None or not hold.is_of(request.lease_id):
            renewed.state = lock_pb2.LEASE_STATE_LOST
            renewed.reason = lock_pb2.LEASE_STATE_REASON_NOT_HELD
        else:
            hold.renew(now_ms)
            renewed.state = lock_pb2.LEASE_STATE_ACTIVE
            renewed.fencing_token = hold.token
            renewed.validity.FromMilliseconds(int(validity_ms(hold.ttl_ms)))

    def _cancel(self, session: FakeSession, command_id: int, result: lock_pb2.SessionResult) -> None:
        result.cancel.found = False
        for queue in self._waiting.values():
            for waiting in queue:
                if waiting.session is session and waiting.command_id == command_id:
                    queue.remove(waiting)
                    result.cancel.found = True
                    cancelled = lock_pb2.SessionResult(id=command_id)
                    _error(cancelled, _CANCELLED, lock_pb2.ERROR_REASON_CANCELLED, "cancelled by the caller")
                    session.deliver(lock_pb2.SessionResponse(results=[cancelled]))
                    return

    def _expire(self) -> float:
        now_ms = self._clock.now_ms()
        for resource in self._locks.expired():
            self.end(resource)
        for queue in self._waiting.values():
            for waiting in [w for w in queue if w.until_ms <= now_ms]:
                result = lock_pb2.SessionResult(id=waiting.command_id)
                result.acquire.outcome = lock_pb2.ACQUIRE_OUTCOME_WAIT_TIMEOUT
                result.acquire.position = queue.index(waiting) + 1
                queue.remove(waiting)
                if hold := self._locks.get(waiting.request.resource):
                    result.acquire.current.CopyFrom(self._locks.current(hold))
                waiting.session.deliver(lock_pb2.SessionResponse(results=[result]))
        return now_ms

    def _grant_next(self, resource: str) -> None:
        queue = self._waiting.get(resource)
        if not queue or self._locks.get(resource) is not None:
            return
        waiting = queue.popleft()
        hold = self._locks.grant_to(waiting.request)
        result = lock_pb2.SessionResult(id=waiting.command_id)
        waited_ms = self._clock.now_ms() - waiting.arrived_at_ms
        answer_grant(result, waiting.request, hold, waited_ms=waited_ms)
        waiting.session.deliver(lock_pb2.SessionResponse(results=[result]))


def _cluster_status(*, quorum_lost: bool, high: int) -> lock_pb2.ClusterStatusResponse:
    response = lock_pb2.ClusterStatusResponse(cluster_id="fake", quorum=1, server_version="fake")
    response.max_ttl.FromMilliseconds(bounds.TTL_MS_MAX_DEFAULT)
    state = lock_pb2.NODE_STATE_UNREACHABLE if quorum_lost else lock_pb2.NODE_STATE_READY
    # The process loses its memory when it ends, so the node is not durable.
    node = response.nodes.add(index=0, address="memory", state=state, durability=lock_pb2.DURABILITY_NONE)
    node.high = high
    node.clock_offset.FromMilliseconds(0)
    return response


def _error(
    result: lock_pb2.SessionResult, code: int, reason: lock_pb2.ErrorReason.ValueType, message: str
) -> None:
    result.error.code = code
    result.error.reason = reason
    result.error.message = message
