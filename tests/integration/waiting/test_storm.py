"""A thousand waiters give up at random instants under load, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from harness.history.token_history import TokenHistory
from harness.load.failures import Failure
from harness.load.session_caller import SessionCaller
from harness.load.waiters import TTL_MS, Waiter
from harness.processes.leftovers import open_files, running_tasks
from harness.processes.servers import FormedNodes, LockServer, Serve, now_ms, until, until_no_locks
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import ERROR_REASON_CANCELLED

pytestmark = pytest.mark.slow

SEED_VARIABLE = "REDFENCE_STORM_SEED"
NAMES = [f"storm/{number}" for number in range(5)]
# Holders of these may die with the lock. A hold that is left on another name stays.
MORTAL_NAMES, MORTAL_TTL_MS = NAMES[:2], 1_000
STORM_S = 2.0
# Long enough that most waiters give up before they are served, on any machine.
HOLD_S_MAX = 0.08
COMMANDS, CALLS, STREAMS, WAITERS_OF_A_STREAM = 400, 400, 20, 10
STAYING, MORTAL = 150, 6


class Storm:
    """Waiters and holders on two servers.

    Attributes:
        history: every grant that was answered.
        ends: how many ended in which way.
    """

    def __init__(self, servers: list[LockServer], *, seed: int) -> None:
        self._random = random.Random(seed)
        self._servers = servers
        self.history = TokenHistory()
        self.ends: Counter[str] = Counter()

    async def rage(self, *, scale: float = 1.0) -> None:
        """Return when all have left."""
        async with AsyncExitStack() as stack:
            connections = [
                await stack.enter_async_context(server.on_own_connection())
                for server in self._servers
                for _ in range(2)
            ]
            sessions = [(each, await stack.enter_async_context(SessionCaller(each))) for each in connections]
            pick = self._random
            async with asyncio.TaskGroup() as everybody:
                for _ in range(int(COMMANDS * scale)):
                    there, session = pick.choice(sessions)
                    everybody.create_task(self._cancel_a_command(there, session))
                for _ in range(int(CALLS * scale)):
                    everybody.create_task(self._cancel_a_call(pick.choice(connections)))
                for _ in range(int(STREAMS * scale)):
                    everybody.create_task(self._cancel_a_stream(pick.choice(connections)))
                for _ in range(int(STAYING * scale)):
                    there, session = pick.choice(sessions)
                    everybody.create_task(self._stay(there, session))
                for number in range(int(MORTAL * scale)):
                    there, session = pick.choice(sessions)
                    name = MORTAL_NAMES[number % len(MORTAL_NAMES)]
                    everybody.create_task(self._die(there, session, name))

    async def _cancel_a_command(self, there: LockServer, session: SessionCaller) -> None:
        await asyncio.sleep(self._instant())
        waiter = self._arrive(there, session)
        if not await waiter.answered_within(self._instant()):
            waiter.give_up()
        await self._serve(there, waiter, "command")

    async def _cancel_a_call(self, there: LockServer) -> None:
        await asyncio.sleep(self._instant())
        waiter = self._arrive(there)
        if not await waiter.answered_within(self._instant()):
            waiter.give_up()
        await self._serve(there, waiter, "call")

    async def _cancel_a_stream(self, there: LockServer) -> None:
        await asyncio.sleep(self._instant())
        async with SessionCaller(there) as session:
            serving = [
                asyncio.create_task(self._serve(there, self._arrive(there, session), "stream"))
                for _ in range(WAITERS_OF_A_STREAM)
            ]
            await asyncio.wait(serving, timeout=self._instant())
        await asyncio.gather(*serving)

    async def _stay(self, there: LockServer, session: SessionCaller) -> None:
        await asyncio.sleep(self._instant())
        await self._serve(there, self._arrive(there, session), "patience")

    async def _die(self, there: LockServer, session: SessionCaller, name: str) -> None:
        await asyncio.sleep(self._instant())
        waiter = Waiter(there, name, session=session, ttl_ms=MORTAL_TTL_MS)
        self.history.note(await waiter.lease(), began_at_ms=waiter.began_at_ms)
        self.ends["died with the lock"] += 1

    def _arrive(self, there: LockServer, session: SessionCaller | None = None) -> Waiter:
        ttl_ms = self._random.choice((MORTAL_TTL_MS, TTL_MS))
        return Waiter(there, self._random.choice(NAMES), session=session, ttl_ms=ttl_ms)

    async def _serve(self, there: LockServer, waiter: Waiter, how: str) -> None:
        """Release the grant, or check that the server cancelled the wait."""
        answer = await waiter.answer()
        if isinstance(answer, lock_pb2.AcquireResponse):
            grant = self.history.note(await waiter.lease(), began_at_ms=waiter.began_at_ms)
            await asyncio.sleep(self._random.uniform(0, HOLD_S_MAX))
            released = await there.release(waiter.resource, waiter.lease_id)
            # A machine that stalls for a second ends the shorter leases.
            in_time = now_ms() < self.history.end_ms(grant)
            assert released == lock_pb2.RELEASE_OUTCOME_RELEASED or not in_time
            self.ends[f"{how} granted"] += 1
            return
        if isinstance(answer, Failure):
            # The waiter has nothing to release, so the server must leave nothing.
            assert answer.reason == ERROR_REASON_CANCELLED, answer
        else:
            await waiter.settle()
        self.ends[f"{how} cancelled"] += 1

    def _instant(self) -> float:
        return self._random.uniform(0, STORM_S / 2)


async def test_after_a_storm_of_cancellations_nothing_is_left_and_tokens_are_unique(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Commands, calls and streams are cancelled while others are served or die. A seed repeats the run."""
    seed = int(os.environ.get(SEED_VARIABLE, "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"\n{SEED_VARIABLE}={seed}")
    nodes = await formed_nodes(3)
    servers = [await serve(nodes, node_timeout_ms=10_000) for _ in range(2)]
    # From now on gRPC keeps its sockets open for the life of the process and the servers.
    await Storm(servers, seed=seed).rage(scale=0.05)
    tasks, files = running_tasks(), open_files()
    storm = Storm(servers, seed=seed)
    await storm.rage()
    print(dict(sorted(storm.ends.items())))
    assert sum(storm.ends[f"{how} cancelled"] for how in ("command", "call", "stream")) > 500
    assert min(storm.ends[f"{how} cancelled"] for how in ("command", "call", "stream")) > 50
    storm.history.check()
    await until_no_locks(nodes)
    for server in servers:
        for name in NAMES:
            assert (await server.look(name)).waiters == 0

    async def as_before() -> bool:
        gc.collect()
        return not (running_tasks() - tasks or open_files() - files)

    try:
        await until(as_before)
    except AssertionError:
        raise AssertionError(f"left over: {running_tasks() - tasks}, {open_files() - files}") from None
