"""A cancelled or interrupted acquire leaves nothing behind: no lease, no waiter, no task."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import pytest

import redfence
from harness.doubles.grpc_fake import GrpcFake
from harness.processes.commands import CommandProcesses
from harness.processes.servers import LockServer, until_no_locks
from harness.time.eventually import eventually
from redfence.testing import FakeLockServer

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


class Interruption:
    """Raises KeyboardInterrupt before one instruction of redfence in this thread, as Ctrl-C can."""

    def __init__(self, *, after_instructions: int) -> None:
        self.left = after_instructions

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        if not frame.f_globals["__name__"].startswith("redfence."):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self._trace


def _lock(client: redfence.Client) -> None:
    with client.lock("r", ttl=_TTL):
        pass


def _acquire(client: redfence.Client) -> None:
    lease = client.acquire("r", ttl=_TTL)
    lease.release()


@pytest.mark.slow
# Python reports, and then drops, what is raised within `__del__`.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("use", [_lock, _acquire])
def test_ctrl_c_at_any_instruction_leaves_no_lease(use: Callable[[redfence.Client], None]) -> None:
    with FakeLockServer() as fake:
        client = fake.client()
        for instructions in itertools.count():
            interrupted = False
            try:
                with Interruption(after_instructions=instructions) as interruption:
                    use(client)
            except KeyboardInterrupt:
                interrupted = True
            deadline_s = time.monotonic() + 10
            while fake.holder("r") is not None or fake.waiters("r"):
                assert time.monotonic() < deadline_s, f"leaked after {instructions} instructions"
                time.sleep(0.0005)
            if interruption.left >= 0:
                break
        assert not interrupted
        assert instructions > 100


def test_a_signal_handler_may_call_the_client_at_any_instruction() -> None:
    """Handlers run in the main thread, in the middle of any call."""
    with FakeLockServer() as fake:
        client = fake.client()
        calls = 0
        ends_s = time.monotonic() + 0.5

        def call(*_: object) -> None:
            nonlocal calls
            with client.lock(f"handler/{calls}", ttl=_TTL, wait=1):
                calls += 1
            if time.monotonic() < ends_s:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + calls % 100 / 1e5)

        before = signal.signal(signal.SIGALRM, call)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            while time.monotonic() < ends_s:
                _lock(client)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert calls > 10
