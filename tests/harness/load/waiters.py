"""An acquire that waits, as a call of its own or as a command of a session, and the ways to give it up."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from harness.load.failures import Failure
from harness.load.session_caller import SessionCaller, StreamEndedError
from harness.processes.servers import LockServer, acquire_request, new_lease_id, now_ms, until
from redfence_proto.rich_error import from_trailing_metadata
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import ACQUIRE_OUTCOME_GRANTED, RELEASE_OUTCOME_RELEASED

TTL_MS = 60_000
"""So long that no lease of a test ends by itself. Only a wake-up explains the grant of a held lock."""
WAIT_MS = 15_000
"""Long for a busy machine, and far shorter than a lease. A waiter without a wake-up gets WAIT_TIMEOUT."""


Answer = lock_pb2.AcquireResponse | Failure | None
"""None: there was none, for the caller gave up or the connection was lost."""


class Waiter:
    """One acquire under way.

    Args:
        session: to send it as a command; otherwise it is a unary call.
        timeout_s: the deadline of a unary call.
        fields: see `acquire_request`; long enough unless told otherwise.
    """

    def __init__(
        self,
        server: LockServer,
        resource: str,
        *,
        session: SessionCaller | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> None:
        fields = {"ttl_ms": TTL_MS, "wait_ms": WAIT_MS, "lease_id": new_lease_id(), **fields}
        self.lease_id: str = fields["lease_id"]
        self.resource = resource
        self.began_at_ms = now_ms()
        self.answered_at_ms = 0.0
        self._server = server
        self._session = session
        self._call: Any = None
        self._command: asyncio.Future[lock_pb2.SessionResult] | None = None
        if session is None:
            self._call = server.locks.Acquire(acquire_request(resource, **fields), timeout=timeout_s)
        else:
            self._command = session.acquire(resource, **fields)
            self._command_id = session.last_id
        self._answer = asyncio.create_task(self._wait())

    @property
    def done(self) -> bool:
        """Whether it was answered."""
        return self._answer.done()

    async def answer(self) -> Answer:
        """Return what it was answered."""
        return await asyncio.shield(self._answer)

    async def lease(self) -> lock_pb2.Lease:
        """Return what it was granted; anything else fails the test."""
        answer = await self.answer()
        assert isinstance(answer, lock_pb2.AcquireResponse), answer
        assert answer.outcome == ACQUIRE_OUTCOME_GRANTED, answer
        return answer.lease

    async def failure(self) -> Failure:
        """Return how it failed; anything else fails the test."""
        answer = await self.answer()
        assert isinstance(answer, Failure), answer
        return answer

    async def release(self) -> None:
        """End the lease by the same way."""
        if self._session is None:
            outcome = await self._server.release(self.resource, self.lease_id)
        else:
            outcome = (await self._session.release(self.resource, self.lease_id)).release.outcome
        assert outcome == RELEASE_OUTCOME_RELEASED, outcome

    async def position(self) -> int:
        """Return its place in the queue, as GetLock tells it."""
        return (await self._server.look(self.resource, lease_id=self.lease_id)).position

    def give_up(self) -> None:
        """Cancel the call, or send a cancel command."""
        if self._session is None:
            self._call.cancel()
        else:
            self._session.cancel_command(self._command_id)

    async def settle(self) -> None:
        """Release a possible grant once the server has forgotten the waiter, as the contract asks."""

        async def gone() -> bool:
            return await self.position() == 0

        await until(gone)
        await self._server.release(self.resource, self.lease_id)

    async def answered_within(self, seconds: float) -> bool:
        """Wait so long for the answer, and tell whether it came."""
        await asyncio.wait([self._answer], timeout=seconds)
        return self.done

    async def _wait(self) -> Answer:
        answer = await self._ended()
        self.answered_at_ms = now_ms()
        return answer

    async def _ended(self) -> Answer:
        try:
            if self._command is None:
                response: lock_pb2.AcquireResponse = await self._call
                return response
            result = await self._command
        except (asyncio.CancelledError, StreamEndedError):
            return None
        except grpc.aio.AioRpcError as error:
            # Without details it is not from the server: the connection was lost.
            return Failure.of_call(error) if from_trailing_metadata(error.trailing_metadata()) else None
        return Failure.of_message(result.error) if result.HasField("error") else result.acquire


async def line_up(
    server: LockServer, resource: str, count: int, *, session: SessionCaller | None = None, **fields: Any
) -> list[Waiter]:
    """Return so many acquires that wait in this order. No other waiter may come or go meanwhile."""
    before = (await server.look(resource)).waiters
    waiters: list[Waiter] = []
    for number in range(count):
        label = {"holder": f"waiter-{before + number}"}
        waiters.append(Waiter(server, resource, session=session, **{**label, **fields}))
        if session is None:
            # Calls of their own overtake each other; commands of one message do not.
            await server.until_waiting(resource, count=before + number + 1)
    await server.until_waiting(resource, count=before + count)
    return waiters
