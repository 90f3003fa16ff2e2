"""Calls lock servers over the generated stubs and records what each answer proves by the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias, TypeVar

import grpc

from harness.chaos.recorder import Call, Recorder
from harness.history.records import Kind, Outcome
from harness.processes.servers import acquire_request, new_lease_id
from redfence_proto.rich_error import from_trailing_metadata
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc

AnswerT = TypeVar("AnswerT")

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    # A client finds a restarted server again soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A client notices a stopped server.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)
# Added to the time that a call may wait at the server.
_ANSWER_S = 2.0
# With these reasons an Acquire has granted nothing and never will. INTERNAL promises nothing.
_NOTHING_GRANTED = {
    lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE,
    lock_pb2.ERROR_REASON_VALIDITY_EXHAUSTED,
    lock_pb2.ERROR_REASON_DRAINING,
    lock_pb2.ERROR_REASON_TOO_MANY_WAITERS,
    lock_pb2.ERROR_REASON_CANCELLED,
}
# With these reasons a server could not examine the nodes.
_NOT_SEEN = {lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE, lock_pb2.ERROR_REASON_DRAINING}


@dataclass(frozen=True, slots=True)
class Held:
    """A lease that was granted.

    Attributes:
        until_s: until when the holder counts on it.
    """

    resource: str
    lease: str
    token: int
    until_s: float


class LockCalls:
    """Calls the servers for one client; a call mostly goes to the same server as the call before.

    Args:
        addresses: of the servers.
        recorder: where calls are written down.
        random: by which servers are chosen.
    """

    def __init__(self, addresses: Sequence[str], *, recorder: Recorder, random: Random) -> None:
        self._channels = [
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) for address in addresses
        ]
        self._stubs: list[lock_pb2_grpc.LockServiceAsyncStub] = [
            lock_pb2_grpc.LockServiceStub(channel) for channel in self._channels
        ]
        self._addresses = addresses
        self._recorder = recorder
        self._random = random
        self._place = random.randrange(len(self._stubs))

    async def close(self) -> None:
        """End every connection."""
        for channel in self._channels:
            await channel.close()

    def server(self) -> tuple[lock_pb2_grpc.LockServiceAsyncStub, str]:
        """Return a server to call next, and its address."""
        if self._random.random() < 0.1:
            self.go_elsewhere()
        return self._stubs[self._place], self._addresses[self._place]

    def go_elsewhere(self) -> None:
        """Call another server from now on."""
        self._place = (self._place + 1) % len(self._stubs)

    async def acquire(self, resource: str, lease: str, *, ttl_s: float, wait_s: float) -> Held | Outcome:
        """Return the lease, or the outcome if it was not granted."""
        request = acquire_request(
            resource,
            ttl_ms=round(ttl_s * 1000),
            wait_ms=round(wait_s * 1000),
            lease_id=lease,
            holder=self._recorder.client,
        )
        with self._recorder.call(Kind.ACQUIRE, resource, lease, ttl_s=ttl_s) as call:
            response = await self._ask(
                call,
                lambda stub: stub.Acquire(request, timeout=wait_s + _ANSWER_S),
                nothing_done=_NOTHING_GRANTED,
            )
            if response is None:
                return call.outcome
            if response.outcome != lock_pb2.ACQUIRE_OUTCOME_GRANTED:
                call.failed(lock_pb2.AcquireOutcome.Name(response.outcome))
                return call.outcome
            until_s = call.operation.invoked_s + response.lease.validity.ToMilliseconds() / 1000
            call.ok(token=response.lease.fencing_token, until_s=until_s)
            return Held(resource, lease, response.lease.fencing_token, until_s)

    async def release(self, resource: str, lease: str, *, token: int = 0) -> None:
        """Release a lease, or whatever an Acquire of it may have granted."""
        request = lock_pb2.ReleaseRequest(resource=resource, lease_id=lease)
        with self._recorder.call(Kind.RELEASE, resource, lease, token=token) as call:
            # After an error fewer than a quorum may have released it, so the lease may have ended or not.
            response = await self._ask(
                call, lambda stub: stub.Release(request, timeout=_ANSWER_S), nothing_done=set()
            )
            if response is None:
                return
            if response.outcome == lock_pb2.RELEASE_OUTCOME_RELEASED:
                call.ok()
            else:
                not_held = response.outcome == lock_pb2.RELEASE_OUTCOME_NOT_HELD
                call.failed(lock_pb2.ReleaseOutcome.Name(response.outcome), lost=not_held)

    async def check(self, resource: str, lease: str, token: int) -> None:
        """Ask whether the token of a lease is the live one."""
        request = lock_pb2.CheckTokenRequest(resource=resource, fencing_token=token)
        with self._recorder.call(Kind.CHECK, resource, lease, token=token) as call:
            response = await self._ask(
                call, lambda stub: stub.CheckToken(request, timeout=_ANSWER_S), nothing_done=_NOT_SEEN
            )
            if response is None:
                return
            if response.state == lock_pb2.TOKEN_STATE_LIVE:
                call.ok()
            else:
                not_live = response.state == lock_pb2.TOKEN_STATE_NOT_LIVE
                call.failed(lock_pb2.TokenState.Name(response.state), lost=not_live)

    async def look(self, resource: str) -> None:
        """Ask for the holder of a resource."""
        request = lock_pb2.GetLockRequest(resource=resource)
        with self._recorder.call(Kind.GET_LOCK, resource, new_lease_id()) as call:
            response = await self._ask(
                call, lambda stub: stub.GetLock(request, timeout=_ANSWER_S), nothing_done=_NOT_SEEN
            )
            if response is not None:
                call.ok(token=response.current.fencing_token)

    async def _ask(
        self,
        call: Call,
        ask: Callable[[lock_pb2_grpc.LockServiceAsyncStub], Awaitable[AnswerT]],
        *,
        nothing_done: set[lock_pb2.ErrorReason.ValueType],
    ) -> AnswerT | None:
        """Call a server and return its answer; on an error, record the outcome and return None."""
        stub, server = self.server()
        call.at(server)
        try:
            return await ask(stub)
        except grpc.aio.AioRpcError as error:
            self._conclude(call, error, nothing_done=nothing_done)
            return None

    def _conclude(
        self,
        call: Call,
        error: grpc.aio.AioRpcError,
        *,
        nothing_done: set[lock_pb2.ErrorReason.ValueType],
    ) -> None:
        rich = from_trailing_metadata(error.trailing_metadata())
        name = error.code().name
        if rich is not None:
            # The metadata says which nodes did not count, and why.
            name = " ".join((rich.reason_name, *(f"{key}: {value}" for key, value in rich.metadata.items())))
        # Without a reason the error is the transport's, and the request may have arrived.
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT or (rich and rich.reason in nothing_done):
            call.failed(name, admission_refused=True)
        else:
            call.unknown(name)
        if rich is None or rich.reason == lock_pb2.ERROR_REASON_DRAINING:
            self.go_elsewhere()


_Stream: TypeAlias = "grpc.aio.StreamStreamCall[lock_pb2.KeepAliveRequest, lock_pb2.KeepAliveResponse]"


class Renewals:
    """Renews one lease over keepalive streams; after a failure the next stream goes to another server."""

    def __init__(self, calls: LockCalls, recorder: Recorder, held: Held) -> None:
        self._calls = calls
        self._recorder = recorder
        self._held = held
        self._stream: _Stream | None = None
        self._server = ""
        self._sequence = 0

    async def renew(self) -> float | None:
        """Renew once; return the end of the validity, 0 if it is unknown, or None if the lease is lost."""
        self._sequence += 1
        request = lock_pb2.KeepAliveRequest(
            resource=self._held.resource, lease_id=self._held.lease, sequence=self._sequence
        )
        with self._recorder.call(Kind.RENEW, self._held.resource, self._held.lease) as call:
            if self._stream is None:
                stub, self._server = self._calls.server()
                self._stream = stub.KeepAlive()
            call.at(self._server)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    answer = await self._answer(self._stream, request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
                name = error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
                call.unknown(name)
                await self.close()
                self._calls.go_elsewhere()
                return 0.0
            if answer is None:
                call.unknown("the stream ended")
                await self.close()
                self._calls.go_elsewhere()
                return 0.0
            return _conclude_renewal(call, answer)

    async def _answer(
        self, stream: _Stream, request: lock_pb2.KeepAliveRequest
    ) -> lock_pb2.KeepAliveResponse | None:
        await stream.write(request)
        # Late answers to earlier renewals come first. There are at most as many as renewals.
        for _ in range(self._sequence + 1):
            answer = await stream.read()
            if not isinstance(answer, lock_pb2.KeepAliveResponse) or answer.HasField("draining"):
                return None
            if answer.sequence == request.sequence:
                return answer
        return None

    async def close(self) -> None:
        """End the stream; the lease lives on."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()


def _conclude_renewal(call: Call, answer: lock_pb2.KeepAliveResponse) -> float | None:
    if answer.HasField("error"):
        call.unknown(lock_pb2.ErrorReason.Name(answer.error.reason))
        return 0.0
    if answer.state == lock_pb2.LEASE_STATE_ACTIVE:
        until_s = call.operation.invoked_s + answer.validity.ToMilliseconds() / 1000
        call.ok(token=answer.fencing_token, until_s=until_s)
        return until_s
    if answer.state == lock_pb2.LEASE_STATE_LOST:
        call.failed("LOST", lost=True)
        return None
    call.unknown(lock_pb2.LeaseState.Name(answer.state))
    return 0.0
