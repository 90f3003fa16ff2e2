"""Callers that acquire and release without pause, and write down what they were told."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType
from typing import Self

import grpc

from harness.eventually import eventually
from harness.failures import Failure
from harness.servers import LockServer, acquire_request, new_lease_id, now_ms
from harness.session_caller import SessionCaller
from harness.token_history import TokenHistory
from redfence_proto.v1 import lock_pb2

# Long beside a hold, which takes a few ms; short beside a test, for what a broken connection orphans lasts as long.
TTL_MS = 2_000
WAIT_MS = 3_000
_RELEASE_TRIES_MAX = 200


class LockLoad:
    """A load within `async with`: half of the callers call, the other half share one session with each server.

    Attributes:
        history: every grant that was answered.
        failures: what callers were told otherwise, and had to retry.
    """

    def __init__(self, *servers: LockServer, callers: int = 16, resources: int = 4) -> None:
        self._servers = servers
        self._names = [f"load/{number}" for number in range(resources)]
        self._callers = callers
        self._inside: Counter[str] = Counter()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._sessions: list[SessionCaller] = []
        self.history = TokenHistory()
        self.failures: list[Failure] = []

    async def __aenter__(self) -> Self:
        self._sessions = [SessionCaller(server) for server in self._servers]
        self._tasks = [asyncio.create_task(self._work(caller)) for caller in range(self._callers)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

        def reached() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return len(self.history.grants) >= goal

        await eventually(reached, timeout_s=timeout_s, interval_s=0.002)

    async def _work(self, caller: int) -> None:
        server = self._servers[caller % len(self._servers)]
        # Neighbours differ in how they call, whatever the number of servers.
        session = self._sessions[caller % len(self._servers)] if caller // len(self._servers) % 2 else None
        turn = caller
        while not self._stopping:
            turn += 1
            await self._hold_once(server, session, self._names[turn % len(self._names)])

    async def _hold_once(self, server: LockServer, session: SessionCaller | None, name: str) -> None:
        lease_id, began_at_ms = new_lease_id(), now_ms()
        request = acquire_request(name, ttl_ms=TTL_MS, wait_ms=WAIT_MS, lease_id=lease_id)
        response = await self._call(server, session, lock_pb2.SessionCommand(acquire=request))
        if response is not None and response.acquire.HasField("lease"):
            self.history.note(response.acquire.lease, began_at_ms=began_at_ms)
            self._inside[name] += 1
            assert self._inside[name] == 1, "two holders at once"
            await asyncio.sleep(0)
            self._inside[name] -= 1
        release = lock_pb2.ReleaseRequest(resource=name, lease_id=lease_id)
        # Also after a failure: a caller that gives up says so.
        for _ in range(_RELEASE_TRIES_MAX):
            if await self._call(server, session, lock_pb2.SessionCommand(release=release)) is not None:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"no release in {_RELEASE_TRIES_MAX} tries: {self.failures[-1]}")

    async def _call(
        self, server: LockServer, session: SessionCaller | None, command: lock_pb2.SessionCommand
    ) -> lock_pb2.SessionResult | None:
        """Return the answer, or None if it is worth another try; any other failure is one of the test."""
        if session is not None:
            result = await session.send(command)
            failure = Failure.of_message(result.error) if result.HasField("error") else None
        else:
            result, failure = lock_pb2.SessionResult(), None
            try:
                if command.HasField("acquire"):
                    result.acquire.CopyFrom(await server.locks.Acquire(command.acquire))
                else:
                    result.release.CopyFrom(await server.locks.Release(command.release))
            except grpc.aio.AioRpcError as error:
                failure = Failure.of_call(error)
        if failure is None:
            return result
        assert failure.is_retryable, failure
        self.failures.append(failure)
        return None
