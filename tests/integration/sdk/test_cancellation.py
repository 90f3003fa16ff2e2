"""A cancelled or interrupted acquire leaves nothing behind: no lease, no waiter, no task."""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import redfence
from harness.doubles.grpc_fake import GrpcFake
from harness.processes.commands import CommandProcesses
from harness.processes.servers import LockServer, until_no_locks
from harness.time.eventually import eventually
from redfence._clock import SystemClock

# So long that nothing left behind goes away by itself during a test.
_TTL = 60
_TURNS_MAX = 5_000


async def test_an_acquire_cancelled_while_connecting_leaves_no_lease(fake: GrpcFake) -> None:
    for turns in range(12):
        async with redfence.AsyncClient(fake.address) as client:
            task = asyncio.create_task(client.acquire("r", ttl=_TTL))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            task.cancel()
            await asyncio.wait([task])
        assert fake.server.hold_of("r") is None


async def test_a_cancelled_release_goes_on_in_the_background(fake: GrpcFake) -> None:
    async with redfence.AsyncClient(fake.address) as client:
        lease = await client.acquire("r", ttl=_TTL)
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait([releasing])
        await eventually(lambda: fake.server.hold_of("r") is None)


@pytest.mark.slow
@pytest.mark.parametrize("is_queued", [False, True], ids=["coming", "queued"])
async def test_a_waiter_cancelled_after_any_number_of_turns_leaves_nothing(
    server: LockServer, *, is_queued: bool
) -> None:
    """The waiter enters the queue, waits, is handed the lock, or is in its body or at the exit.

    The lock is released meanwhile. The number of turns grows until the waiter is through before
    it is cancelled.
    """
    task_count = len(asyncio.all_tasks())
    cancelled, finished = 0, 0
    tokens: list[int] = []
    async with redfence.AsyncClient(server.target) as holder, redfence.AsyncClient(server.target) as client:
        await client.cluster_status()

        async def work() -> None:
            async with client.lock("r", ttl=_TTL) as lease:
                tokens.append(lease.token)
                await asyncio.sleep(0)

        for turns in itertools.count():
            assert turns < _TURNS_MAX
            # Here the next caller waits for what the cancelled one may have left: it would be a minute.
            held = await holder.acquire("r", ttl=_TTL, wait=5)
            tokens.append(held.token)
            task = asyncio.create_task(work())
            if is_queued:
                await server.until_waiting("r")
            releasing = asyncio.create_task(held.release())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert await releasing
            if task.cancelled():
                cancelled, finished = cancelled + 1, 0
            elif (finished := finished + 1) == 3:
                break
        await server.until_waiting("r", count=0)
        await until_no_locks(server.nodes)
    assert cancelled > 20
    assert tokens == sorted(set(tokens))
    await eventually(lambda: len(asyncio.all_tasks()) == task_count)


_UNCAUGHT = {
    "closing": "with redfence.Client(sys.argv[1]) as client: client.acquire('r', ttl=60, wait=None)",
    "not closing": "redfence.Client(sys.argv[1]).acquire('r', ttl=60, wait=None)",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", _UNCAUGHT.values(), ids=_UNCAUGHT)
async def test_ctrl_c_ends_a_program_that_waits_for_ever_as_it_ends_any_other(
    server: LockServer, commands: CommandProcesses, script: str
) -> None:
    """The waiting line raises KeyboardInterrupt, SIGINT ends the program, and the queue is empty."""
    held = (await server.acquire("r", ttl_ms=60_000)).lease
    waiting = commands.start(sys.executable, "-c", f"import sys, redfence\n{script}", server.target)
    await server.until_waiting("r", timeout_s=15)
    waiting.send_signal(signal.SIGINT)
    assert await waiting.wait(timeout_s=5) == -signal.SIGINT
    assert waiting.stderr.endswith("KeyboardInterrupt\n")
    await server.until_waiting("r", count=0)
    await server.release("r", held.lease_id)
    assert (await server.acquire("r")).lease.fencing_token > held.fencing_token


_TWO_WAITING = """
import sys, threading, redfence
client = redfence.Client(sys.argv[1])

def wait():
    with client.lock("r", ttl=60, wait=7200, holder="thread"):
        print("granted", flush=True)

thread = threading.Thread(target=wait)
thread.start()
try:
    client.acquire("r", ttl=60, wait=7200, holder="main")
except KeyboardInterrupt:
    print("interrupted", flush=True)
    thread.join()
client.close()
"""


@pytest.mark.slow
async def test_ctrl_c_ends_the_main_threads_wait_and_other_threads_wait_on(
    server: LockServer, commands: CommandProcesses
) -> None:
    held = (await server.acquire("r", ttl_ms=60_000)).lease
    waiting = commands.start(sys.executable, "-c", _TWO_WAITING, server.target)
    await server.until_waiting("r", count=2, timeout_s=15)
    waiting.send_signal(signal.SIGINT)
    await waiting.wait_for_line("interrupted")
    await server.until_waiting("r", count=1)
    async with redfence.AsyncClient(server.target) as client:
        assert [each.holder for each in (await client.get_lock("r")).queue] == ["thread"]
    await server.release("r", held.lease_id)
    await waiting.wait_for_line("granted")
    assert await waiting.wait() == 0
    await until_no_locks(server.nodes)


class _InterruptingClock(SystemClock):
    """Raises KeyboardInterrupt when the main thread reads it, as a Ctrl-C at that instant does."""

    def __init__(self) -> None:
        self._looks_left = math.inf

    @contextmanager
    def interrupting(self, *, after_looks: int) -> Iterator[None]:
        """Interrupt once within the block, after so many readings, if there are more."""
        self._looks_left = after_looks
        try:
            yield
        finally:
            self._looks_left = math.inf

    def now_ms(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self._looks_left -= 1
            if self._looks_left < 0:
                self._looks_left = math.inf
                raise KeyboardInterrupt
        return super().now_ms()


async def test_ctrl_c_in_the_middle_of_an_acquire_leaves_no_lease(fake: GrpcFake) -> None:
    """Ctrl-C comes before the acquire begins, before it is sent, and before the caller waits for it."""
    clock = _InterruptingClock()
    with redfence.Client(fake.address, clock=clock) as client:
        for looks in itertools.count():
            try:
                with clock.interrupting(after_looks=looks):
                    lease = client.acquire("r", ttl=_TTL, wait=5)
            except KeyboardInterrupt:
                await eventually(lambda: fake.server.hold_of("r") is None and not fake.server.waiters("r"))
            else:
                assert lease.release()
                break
        assert looks >= 2


def test_ctrl_c_between_two_instructions_leaves_no_lease(
    fake: GrpcFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client releases the grant of an acquire that was interrupted before the caller got hold of it."""
    with redfence.Client(fake.address) as client:
        core = client._session._core
        begin = core.acquire

        def begin_and_be_interrupted(*args: Any, **more: Any) -> None:
            begin(*args, **more)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(core, "acquire", begin_and_be_interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.acquire("r", ttl=_TTL)
        assert client.acquire("r", ttl=_TTL, wait=5).token == 2


async def test_ctrl_c_in_the_middle_of_a_release_does_not_keep_it_from_leaving(fake: GrpcFake) -> None:
    clock = _InterruptingClock()
    with redfence.Client(fake.address, clock=clock) as client:
        for looks in itertools.count():
            lease = client.acquire("r", ttl=_TTL)
            try:
                with clock.interrupting(after_looks=looks):
                    assert lease.release()
            except KeyboardInterrupt:
                if lease.state is redfence.LeaseState.RELEASED:
                    await eventually(lambda: fake.server.hold_of("r") is None, timeout_s=1)
                else:
                    assert lease.release()
            else:
                break
        assert looks >= 2
