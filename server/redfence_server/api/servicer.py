"""The gRPC services: they translate calls to use cases, and errors to statuses. They decide nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from importlib.metadata import version
from typing import Any, Final, TypeVar

import grpc

from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_server import model
from redfence_server.access.guard import Caller, Guard
from redfence_server.access.policy import Verb
from redfence_server.access.watch import CredentialWatch
from redfence_server.api import errors, messages
from redfence_server.api.guarded_service import GuardedService
from redfence_server.api.keep_alive_stream import KeepAliveStream
from redfence_server.api.open_streams import OpenStreams
from redfence_server.api.streams import SessionStream, Stream
from redfence_server.api.watch_stream import WatchStream, read_interval_ms
from redfence_server.clock import Clock, WallClock
from redfence_server.errors import DrainingError, NoQuorumError
from redfence_server.grpc_sending import caller_has_left
from redfence_server.lock_list import LockList, check_page_size, check_prefix
from redfence_server.lock_service import LockCalls, LockService
from redfence_server.lock_watch import LockWatches
from redfence_server.nodes.cluster import ClusterView
from redfence_server.randomness import Randomness
from redfence_server.sharing.peer import peer_of
from redfence_server.sharing.shares import Shares

# Read once: a server without free file descriptors could not read it later.
_VERSION: Final = version("redfence")

Context = grpc.aio.ServicerContext[Any, Any]


Self = TypeVar("Self")
Request = TypeVar("Request")
Response = TypeVar("Response")
Method = Callable[[Self, Request, Context], Awaitable[Response]]


def _answers_errors(method: Method[Self, Request, Response]) -> Method[Self, Request, Response]:
    """End the call with a status for every exception; no other exception passes this boundary.

    If the caller has left, end it as a cancellation.
    """

    @wraps(method)
    async def call(servicer: Self, request: Request, context: Context) -> Response:
        try:
            return await method(servicer, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if caller_has_left(error):
                # As grpcio itself ends most calls whose caller has left.
                raise asyncio.CancelledError from None
            return await errors.abort(context, *errors.describe(error, where=method.__name__))

    return call


class LockServicer(lock_pb2_grpc.LockServiceServicer):
    """Serves the LockService of the contract from the use cases of lock_service.py.

    Args:
        commands_max: the most unanswered commands of one stream.
        shares: the turns, the room for commands and the new names that peers share.
        drain_grace_ms: how long a draining server waits for unfinished calls; the notice to peers says it.
        guard: identifies callers; None without a policy and an audit log.

    Attributes:
        commands_max: for the streams that open from now on.
        streams: the open Sessions and KeepAlives.
    """

    def __init__(
        self,
        service: LockService,
        *,
        clock: Clock,
        randomness: Randomness,
        commands_max: int,
        shares: Shares,
        drain_grace_ms: int,
        guard: Guard | None = None,
    ) -> None:
        self._service = service
        self._guard = guard
        self._clock = clock
        self._randomness = randomness
        self.commands_max = commands_max
        self._shares = shares
        self._notice = lock_pb2.Draining(grace=messages.duration(drain_grace_ms))
        self._draining = False
        self.streams = OpenStreams(clock)

    async def drain(self) -> None:
        """End every wait with DRAINING, and end each stream once its commands are answered."""
        self._draining = True
        self._service.drain()
        self.streams.drain()

    @_answers_errors
    async def Acquire(self, request: lock_pb2.AcquireRequest, context: Context) -> lock_pb2.AcquireResponse:
        """Answer Acquire as protos/redfence/v1/lock.proto defines it."""
        arrived_at_ms = self._clock.now_ms()
        time_remaining = context.time_remaining()
        service, peer = await self._begin(context)
        call = messages.read_acquire(
            request,
            ttl_ms_max=self._service.ttl_ms_max,
            new_lease_id=self._randomness.hex_id,
            arrived_at_ms=arrived_at_ms,
            connection=context.peer(),
            peer=peer,
            answer_within_ms=None if time_remaining is None else time_remaining * 1000,
        )
        if call.resource not in self._shares.new_names.recent:
            self._shares.new_names.check(peer, call.resource)
        response = lock_pb2.AcquireResponse()
        messages.fill_acquire(response, call, await service.acquire(call))
        return response

    @_answers_errors
    async def Release(self, request: lock_pb2.ReleaseRequest, context: Context) -> lock_pb2.ReleaseResponse:
        """Answer Release as protos/redfence/v1/lock.proto defines it."""
        response = lock_pb2.ReleaseResponse()
        service, _ = await self._begin(context)
        messages.fill_release(response, await service.release(*messages.read_lease(request)))
        return response

    @_answers_errors
    async def GetLock(self, request: lock_pb2.GetLockRequest, context: Context) -> lock_pb2.GetLockResponse:
        """Answer GetLock as protos/redfence/v1/lock.proto defines it."""
        service, _ = await self._begin(context)
        resource, digest = messages.read_get_lock(request)
        view = await service.get_lock(resource, digest=digest)
        return messages.get_lock_response(resource, view)

    @_answers_errors
    async def CheckToken(
        self, request: lock_pb2.CheckTokenRequest, context: Context
    ) -> lock_pb2.CheckTokenResponse:
        """Answer CheckToken as protos/redfence/v1/lock.proto defines it."""
        service, _ = await self._begin(context)
        resource = model.check_resource(request.resource)
        token = model.check_token(request.fencing_token)
        judgement = await service.check_token(resource, token)
        return messages.check_token_response(judgement)

    # grpc.aio also accepts a coroutine that reads and writes by itself; the type stubs know only generators.

    @_answers_errors
    async def KeepAlive(self, _: object, context: Context) -> None:  # type: ignore[override]
        """Answer KeepAlive as protos/redfence/v1/lock.proto defines it."""
        caller = self._caller_of(context)
        stream = KeepAliveStream(
            context,
            service=self._service_of(caller),
            commands_max=self.commands_max,
            draining=self._notice,
            shares=self._shares,
            peer=_peer_of(context, caller),
        )
        await self._serve(context, stream, caller)

    @_answers_errors
    async def Session(self, _: object, context: Context) -> None:  # type: ignore[override]
        """Answer Session as protos/redfence/v1/lock.proto defines it."""
        caller = self._caller_of(context)
        stream = SessionStream(
            context,
            service=self._service_of(caller),
            clock=self._clock,
            randomness=self._randomness,
            commands_max=self.commands_max,
            draining=self._notice,
            shares=self._shares,
            peer=_peer_of(context, caller),
        )
        await self._serve(context, stream, caller)

    def _caller_of(self, context: Context) -> Caller | None:
        return None if self._guard is None else self._guard.admit(context)

    def _service_of(self, caller: Caller | None) -> LockCalls:
        return self._service if caller is None else GuardedService(self._service, caller)

    async def _begin(self, context: Context) -> tuple[LockCalls, str]:
        """Wait for the turn of a unary call; return the service for its caller, and the caller's peer."""
        caller = self._caller_of(context)
        peer = _peer_of(context, caller)
        await self._shares.turns.begin(peer)
        return self._service_of(caller), peer

    async def _serve(self, context: Context, stream: Stream[Any], caller: Caller | None) -> None:
        with (
            self.streams.opened(stream, context.peer()),
            _credentials(self._guard, caller, stream.end),
        ):
            if self._draining:  # the call was on its way when the drain began
                stream.drain()
            # Some clients, such as Rust's tonic, return from the call only once the headers are here.
            await context.send_initial_metadata(())
            await stream.serve()


def _peer_of(context: Context, caller: Caller | None) -> str:
    """Return the peer of a caller: its principal, or the address of its machine if it proved no name."""
    if caller is None or caller.is_anonymous:
        return peer_of(context.peer())
    return caller.principal


class AdminServicer(lock_pb2_grpc.AdminServiceServicer):
    """Serves the AdminService of the contract."""

    def __init__(
        self,
        service: LockService,
        *,
        locks: LockList,
        watches: LockWatches,
        streams: OpenStreams,
        status: Callable[[], ClusterView],
        clock: WallClock,
        guard: Guard | None = None,
    ) -> None:
        self._service = service
        self._streams = streams
        self._locks = locks
        self._watches = watches
        self._clock = clock
        self._status = status
        self._guard = guard

    @_answers_errors
    async def ClusterStatus(
        self, _: lock_pb2.ClusterStatusRequest, context: Context
    ) -> lock_pb2.ClusterStatusResponse:
        """Answer ClusterStatus as protos/redfence/v1/lock.proto defines it."""
        _check(self._caller_of(context), Verb.INSPECT, "")
        return messages.cluster_status_response(self._status(), server_version=_VERSION)

    @_answers_errors
    async def ForceRelease(
        self, request: lock_pb2.ForceReleaseRequest, context: Context
    ) -> lock_pb2.ForceReleaseResponse:
        """Answer ForceRelease as protos/redfence/v1/lock.proto defines it."""
        caller = self._caller_of(context)
        resource, token = model.check_resource(request.resource), model.check_token(request.fencing_token)
        reason = model.check_reason(request.reason)
        _check(caller, Verb.ADMIN, resource)
        line: dict[str, Any] = {"resource": resource, "token": token, "reason": reason}
        try:
            ended = await self._service.force_release(resource, token, reason=reason)
        except NoQuorumError:
            _record_force(caller, "unknown", **line)
            raise
        _record_force(caller, "released" if ended.was_held else "not_held", digest=ended.digest, **line)
        return messages.force_release_response(ended)

    @_answers_errors
    async def ListLocks(
        self, request: lock_pb2.ListLocksRequest, context: Context
    ) -> lock_pb2.ListLocksResponse:
        """Answer ListLocks as protos/redfence/v1/lock.proto defines it."""
        caller = self._caller_of(context)
        prefix, size = check_prefix(request.prefix), check_page_size(request.page_size)
        if caller is not None:
            caller.check_all(Verb.INSPECT, prefix)
        page = await self._locks.page(prefix, size=size, token=request.page_token)
        return messages.list_locks_response(page)

    @_answers_errors
    async def ListSessions(
        self, request: lock_pb2.ListSessionsRequest, context: Context
    ) -> lock_pb2.ListSessionsResponse:
        """Answer ListSessions as protos/redfence/v1/lock.proto defines it."""
        _check(self._caller_of(context), Verb.INSPECT, "")
        after, size = messages.read_number(request.page_token), check_page_size(request.page_size)
        return messages.list_sessions_response(self._streams.page(after=after, size=size))

    # As with the streams above, a coroutine that writes by itself.

    @_answers_errors
    async def WatchLocks(  # type: ignore[override]
        self, request: lock_pb2.WatchLocksRequest, context: Context
    ) -> None:
        """Answer WatchLocks as protos/redfence/v1/lock.proto defines it."""
        caller = self._caller_of(context)
        prefix, interval_ms = check_prefix(request.prefix), read_interval_ms(request)

        def check() -> None:
            if caller is not None:
                caller.check_all(Verb.INSPECT, prefix)

        check()
        if self._streams.draining:
            raise DrainingError
        with self._watches.opened(prefix, _peer_of(context, caller)) as watch:
            stream = WatchStream(context, watch, interval_ms=interval_ms, clock=self._clock, check=check)
            with self._streams.opened(stream, context.peer()), _credentials(self._guard, caller, stream.end):
                await context.send_initial_metadata(())
                await stream.serve()

    def _caller_of(self, context: Context) -> Caller | None:
        """Return the caller; None if everything is allowed and nothing is audited."""
        return None if self._guard is None else self._guard.admit(context)


def _credentials(
    guard: Guard | None, caller: Caller | None, end: Callable[[Exception], None]
) -> AbstractContextManager[object]:
    """Within `with`, end a stream whose caller's credentials are not valid any more."""
    return nullcontext() if guard is None or caller is None else CredentialWatch(guard, caller, end=end)


def _check(caller: Caller | None, verb: Verb, resource: str) -> None:
    if caller is not None:
        caller.check(verb, resource)


def _record_force(caller: Caller | None, outcome: str, **line: Any) -> None:
    if caller is not None:
        caller.record("force_release", outcome, **line)
