"""Callers that acquire, renew and release without pause, and write down what they were told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self

import grpc

from harness.history.token_history import Grant, TokenHistory
from harness.load.failures import Failure
from harness.load.session_caller import SessionCaller, StreamEndedError
from harness.processes.servers import LockServer, acquire_request, new_lease_id, now_ms
from harness.time.eventually import eventually
from redfence_proto.rich_error import from_trailing_metadata
from redfence_proto.v1 import lock_pb2

# Long beside a hold of a few ms. A broken connection leaves a lock for so long, so it is short beside a test.
TTL_MS = 2_000
WAIT_MS = 3_000
_RELEASE_TRIES_MAX = 200
_KINDS = ("acquire", "renew", "release")


@dataclass(slots=True)
class _Caller:
    """One caller, which sends commands of a session if it has one, and makes unary calls otherwise."""

    number: int
    server: LockServer
    session: SessionCaller | None
    turn: int


class LockLoad:
    """A load within `async with`: half of the callers make calls, the others share a session per server.

    Attributes:
        history: every grant that was answered.
        failures: what callers were told otherwise, and had to retry.
        granted_by: how many grants each server has answered, in their order.

    Args:
        servers: over which the callers are spread.
        callers: how many.
        resources: for how many they contend; every third time each takes one of its own.
        ttl_ms: of the leases.
        mortal: servers that may die; their callers go on at the others, with the leases they have.
        history: to be continued.
    """

    def __init__(
        self,
        *servers: LockServer,
        callers: int = 16,
        resources: int = 4,
        ttl_ms: int = TTL_MS,
        mortal: Collection[LockServer] = (),
        history: TokenHistory | None = None,
    ) -> None:
        self._servers = servers
        self._mortal = mortal
        self._names = [f"load/{number}" for number in range(resources)]
        self._ttl_ms = ttl_ms
        self._callers = callers
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._sessions: list[SessionCaller] = []
        self.history = history or TokenHistory()
        self.failures: list[Failure] = []
        self.granted_by = [0] * len(servers)

    async def __aenter__(self) -> Self:
        self._sessions = [SessionCaller(server) for server in self._servers]
        self._tasks = [asyncio.create_task(self._work(number)) for number in range(self._callers)]
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._stopping = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in self._sessions:
            await session.cancel()
        if kind is None:
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome

    async def until_granted(self, count: int, *, timeout_s: float = 20.0) -> None:
        """Return once so many more grants were answered; fail if a caller has failed for good."""
        goal = len(self.history.grants) + count
        await self._until(lambda: len(self.history.grants) >= goal, timeout_s)

    async def until_granted_by_each(self, count: int, *, timeout_s: float = 20.0) -> None:
        """Return once every server has granted so many more; fail if a caller has failed for good."""
        goals = [granted + count for granted in self.granted_by]
        await self._until(
            lambda: all(now >= goal for now, goal in zip(self.granted_by, goals, strict=True)), timeout_s
        )

    def check(self, *, least: int = 20) -> None:
        """Fail unless what holders were told could be true, and there was enough of everything to tell by."""
        few = Counter({kind: least - self.history.succeeded[kind] for kind in _KINDS})
        assert not +few, f"not a valid run: too few succeeded, by {+few}"
        self.history.check()
        self.history.check_exclusion()

    async def _until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        def looked() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return reached()

        await eventually(looked, timeout_s=timeout_s, interval_s=0.002)

    async def _work(self, number: int) -> None:
        place = number % len(self._servers)
        # Neighbours differ in how they call, whatever the number of servers.
        session = self._sessions[place] if number // len(self._servers) % 2 else None
        caller = _Caller(number, self._servers[place], session, turn=number)
        while not self._stopping:
            caller.turn += 1
            own = caller.turn % 3 == 0
            name = f"load/of {number}" if own else self._names[caller.turn % len(self._names)]
            await self._hold_once(caller, name)

    async def _hold_once(self, caller: _Caller, name: str) -> None:
        lease_id, began_at_ms = new_lease_id(), now_ms()
        request = acquire_request(name, ttl_ms=self._ttl_ms, wait_ms=WAIT_MS, lease_id=lease_id)
        response = await self._call(caller, lock_pb2.SessionCommand(acquire=request))
        if response is not None and response.acquire.HasField("lease"):
            grant = self.history.note(response.acquire.lease, began_at_ms=began_at_ms)
            self.granted_by[self._servers.index(caller.server)] += 1
            if caller.turn % 4 == 0:
                await self._renew(caller, grant)
            await asyncio.sleep(0)
            self.history.given_up(grant)
        release = lock_pb2.ReleaseRequest(resource=name, lease_id=lease_id)
        # Also after a failure: a caller that gives up says so.
        for _ in range(_RELEASE_TRIES_MAX):
            answer = await self._call(caller, lock_pb2.SessionCommand(release=release))
            if answer is not None:
                self.history.succeeded["release"] += (
                    answer.release.outcome == lock_pb2.RELEASE_OUTCOME_RELEASED
                )
                return
            if self._stopping:
                return  # it ends by its ttl
            await asyncio.sleep(0.02)
        raise AssertionError(f"no release in {_RELEASE_TRIES_MAX} tries: {self.failures[-1]}")

    async def _renew(self, caller: _Caller, grant: Grant) -> None:
        renewal = lock_pb2.KeepAliveRequest(resource=grant.resource, lease_id=grant.lease_id)
        sent_at_ms = now_ms()
        answer = await self._call(caller, lock_pb2.SessionCommand(renew=renewal))
        if answer is not None and answer.renew.state == lock_pb2.LEASE_STATE_ACTIVE:
            self.history.renewed(
                grant, sent_at_ms=sent_at_ms, validity_ms=answer.renew.validity.ToMilliseconds()
            )

    async def _call(self, caller: _Caller, command: lock_pb2.SessionCommand) -> lock_pb2.SessionResult | None:
        """Return the answer, or None if it is worth another try; any other failure is one of the test."""
        try:
            if caller.session is not None:
                result = await caller.session.send(command)
            else:
                result = await _unary(caller.server, command)
        except grpc.aio.AioRpcError as error:
            if from_trailing_metadata(error.trailing_metadata()) is None and self._leave(caller):
                return None
            failure = Failure.of_call(error)
        except StreamEndedError:
            if not self._leave(caller):
                raise
            return None
        else:
            if not result.HasField("error"):
                return result
            failure = Failure.of_message(result.error)
        assert failure.is_retryable, failure
        self.failures.append(failure)
        return None

    def _leave(self, caller: _Caller) -> bool:
        """Let a caller go on elsewhere if its server was bound to die."""
        if caller.server not in self._mortal:
            return False
        place = next(i for i, server in enumerate(self._servers) if server not in self._mortal)
        caller.server = self._servers[place]
        caller.session = self._sessions[place] if caller.session is not None else None
        return True


async def _unary(server: LockServer, command: lock_pb2.SessionCommand) -> lock_pb2.SessionResult:
    """Make a call of its own of a command."""
    if command.HasField("acquire"):
        return lock_pb2.SessionResult(acquire=await server.locks.Acquire(command.acquire))
    if command.HasField("release"):
        return lock_pb2.SessionResult(release=await server.locks.Release(command.release))
    stream = server.locks.KeepAlive()
    try:
        await stream.write(command.renew)
        answer = await stream.read()
        assert isinstance(answer, lock_pb2.KeepAliveResponse), "the stream ended before its answer"
        return lock_pb2.SessionResult(renew=answer)
    finally:
        stream.cancel()
