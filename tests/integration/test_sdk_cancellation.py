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
from harness.doubles.grpc_fake import GrpcFake, serving
from harness.processes.commands import CommandProcesses
from harness.processes.servers import LockServer, until_no_locks
from harness.time.eventually import eventually
from redfence._clock import SystemClock


@pytest.fixture
def fake() -> Iterator[GrpcFake]:
    """A server behind real gRPC that tells what it holds."""
    with serving() as grpc_fake:
        yield grpc_fake


async def _left(task: asyncio.Task[redfence.AsyncLease]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.slow
async def test_an_acquire_cancelled_at_any_moment_leaves_no_lease(fake: GrpcFake) -> None:
    """Cancelled after every number of turns of the loop, from before the send to after the grant: nothing stays held."""
    async with redfence.AsyncClient(fake.address) as client:
        await client.cluster_status()
        cancelled = 0
        for turns in range(60):
            task = asyncio.create_task(client.acquire(f"r/{turns}", ttl=60))
            for _ in range(turns):
                await asyncio.sleep(0.0002 if turns > 20 else 0)
            task.cancel()
            try:
                await (await task).release()
            except asyncio.CancelledError:
                cancelled += 1
        # The first turns surely came before the answer; how many more is a matter of speed.
        assert cancelled >= 10
        await eventually(lambda: not any(fake.server.hold_of(f"r/{turns}") for turns in range(60)))
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_an_acquire_cancelled_while_connecting_leaves_no_lease(fake: GrpcFake) -> None:
    """The same on a client that has no link yet and is closed at once."""
    for turns in range(12):
        async with redfence.AsyncClient(fake.address) as client:
            task = asyncio.create_task(client.acquire("r", ttl=60))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            task.cancel()
            await asyncio.wait([task])
        assert fake.server.hold_of("r") is None


async def test_a_cancelled_wait_leaves_no_waiter(fake: GrpcFake) -> None:
    """The server forgets who gave up, so the lock is not granted to a ghost."""
    async with redfence.AsyncClient(fake.address) as client:
        held = await client.acquire("r", ttl=10)
        waiting = asyncio.create_task(client.acquire("r", ttl=10))
        await eventually(lambda: fake.server.waiters("r") == 1)
        waiting.cancel()
        await _left(waiting)
        await eventually(lambda: fake.server.waiters("r") == 0)
        await held.release()
        assert (await client.acquire("r", ttl=10, wait=0)).token == held.token + 1


async def test_a_timeout_around_an_acquire_cleans_up_too(fake: GrpcFake) -> None:
    """asyncio.timeout is a cancellation like any other."""
    async with redfence.AsyncClient(fake.address) as client:
        held = await client.acquire("r", ttl=10)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.acquire("r", ttl=10)
        await held.release()
        await eventually(lambda: fake.server.waiters("r") == 0)
        assert fake.server.hold_of("r") is None


async def test_a_cancelled_release_goes_on_in_the_background(fake: GrpcFake) -> None:
    """Whoever gives up waiting for the answer has still given the lock back."""
    async with redfence.AsyncClient(fake.address) as client:
        lease = await client.acquire("r", ttl=60)
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait([releasing])
        await eventually(lambda: fake.server.hold_of("r") is None)


async def test_a_cancelled_body_is_left_with_the_lock_released(fake: GrpcFake) -> None:
    """The caller's CancelledError stays one, and the lease ends at once."""
    async with redfence.AsyncClient(fake.address) as client:
        entered = asyncio.Event()

        async def work() -> None:
            async with client.lock("r", ttl=60):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fake.server.hold_of("r") is None


# So long that nothing which is left behind goes away by itself during a test.
_TTL = 60
_TURNS_MAX = 5_000


@pytest.mark.slow
@pytest.mark.parametrize("is_queued", [False, True], ids=["coming", "queued"])
async def test_a_waiter_cancelled_after_any_number_of_turns_leaves_nothing(
    server: LockServer, *, is_queued: bool
) -> None:
    """Entering the queue, waiting, handed the lock, in its body, at the exit: the next caller has the lock, and nothing is left.

    The lock is released meanwhile. The number of turns grows until the waiter is through before it is cancelled.
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


async def test_a_client_that_is_left_with_its_waiters_leaves_none(server: LockServer) -> None:
    """Fifty wait and are cancelled with the client's block, while the lock is released: the queue is empty, and nobody holds it."""
    async with redfence.AsyncClient(server.target) as holder:
        held = await holder.acquire("r", ttl=_TTL)
        async with redfence.AsyncClient(server.target) as client:
            waiting = [asyncio.create_task(client.acquire("r", ttl=_TTL)) for _ in range(50)]
            await server.until_waiting("r", count=50)
            releasing = asyncio.create_task(held.release())
            await asyncio.sleep(0)
        assert await releasing
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(each) for each in outcomes} <= {redfence.ClosedError, redfence.AsyncLease}
        await server.until_waiting("r", count=0)
        await until_no_locks(server.nodes)


_WAITING = """
import sys, redfence
client = redfence.Client(sys.argv[1])
print("waiting", flush=True)
try:
    client.acquire("r", ttl=60)
except KeyboardInterrupt:
    client.close()
    print("interrupted", flush=True)
"""


@pytest.mark.slow
async def test_ctrl_c_ends_a_waiting_thread_at_once_and_leaves_no_waiter(
    fake: GrpcFake, commands: CommandProcesses
) -> None:
    """A process that waits in the client for threads can be interrupted, and the server forgets it."""
    async with redfence.AsyncClient(fake.address) as client:
        held = await client.acquire("r", ttl=60)
        waiting = commands.start(sys.executable, "-c", _WAITING, fake.address)
        await eventually(lambda: fake.server.waiters("r") == 1, timeout_s=15, interval_s=0.01)
        waiting.send_signal(signal.SIGINT)
        assert await waiting.wait(timeout_s=5) == 0
        assert "interrupted" in waiting.stdout
        assert fake.server.waiters("r") == 0
        await held.release()
        assert fake.server.hold_of("r") is None


_UNCAUGHT = {
    "closing": "with redfence.Client(sys.argv[1]) as client: client.acquire('r', ttl=60, wait=None)",
    "not closing": "redfence.Client(sys.argv[1]).acquire('r', ttl=60, wait=None)",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", _UNCAUGHT.values(), ids=_UNCAUGHT)
async def test_ctrl_c_ends_a_program_that_waits_for_ever_as_it_ends_any_other(
    server: LockServer, commands: CommandProcesses, script: str
) -> None:
    """KeyboardInterrupt in the waiting line, the status of a program that SIGINT has ended, and nobody in the queue any more."""
    async with redfence.AsyncClient(server.target) as client:
        held = await client.acquire("r", ttl=_TTL)
        waiting = commands.start(sys.executable, "-c", f"import sys, redfence\n{script}", server.target)
        await server.until_waiting("r", timeout_s=15)
        waiting.send_signal(signal.SIGINT)
        assert await waiting.wait(timeout_s=5) == -signal.SIGINT
        assert waiting.stderr.endswith("KeyboardInterrupt\n")
        await server.until_waiting("r", count=0)
        await held.release()
        assert (await client.acquire("r", ttl=_TTL, wait=0)).token > held.token


@pytest.mark.slow
async def test_a_wait_of_hours_is_interrupted_while_others_of_the_same_client_wait_on(
    server: LockServer, commands: CommandProcesses
) -> None:
    """Ctrl-C is the main thread's: it leaves the queue at once, and the other thread's wait keeps its place."""
    async with redfence.AsyncClient(server.target) as client:
        held = await client.acquire("r", ttl=_TTL)
        waiting = commands.start(sys.executable, "-c", _TWO_WAITING, server.target)
        await server.until_waiting("r", count=2, timeout_s=15)
        waiting.send_signal(signal.SIGINT)
        await waiting.wait_for_line("interrupted")
        await server.until_waiting("r", count=1)
        assert [each.holder for each in (await client.get_lock("r")).queue] == ["thread"]
        assert await held.release()
        await waiting.wait_for_line("granted")
        assert await waiting.wait() == 0
    await until_no_locks(server.nodes)


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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: str(number.name))
async def test_a_signal_ends_redfence_lock_while_it_waits(
    server: LockServer, commands: CommandProcesses, number: signal.Signals
) -> None:
    """Before there is a command: 128 + n at once, nothing was run, and nobody is in the queue any more."""
    async with redfence.AsyncClient(server.target) as client:
        await client.acquire("r", ttl=_TTL)
        run = commands.start_redfence("lock", "r", "--server", server.target, "--", "echo", "ran")
        await server.until_waiting("r", timeout_s=15)
        run.send_signal(number)
        assert await run.wait(timeout_s=5) == 128 + number
        assert (run.stdout, run.stderr) == ("", "")
        await server.until_waiting("r", count=0)


class _InterruptingClock(SystemClock):
    """Raises KeyboardInterrupt when the main thread looks at it, as Ctrl-C does that comes just then."""

    def __init__(self) -> None:
        self._looks_left = math.inf

    @contextmanager
    def interrupting(self, *, after_looks: int) -> Iterator[None]:
        """Do so once within the block, after that many looks, if there are more."""
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
    """Before it was begun, before it was sent, before anybody waits for it: the lock is not held by nobody for ever."""
    clock = _InterruptingClock()
    with redfence.Client(fake.address, clock=clock) as client:
        for looks in itertools.count():
            try:
                with clock.interrupting(after_looks=looks):
                    lease = client.acquire("r", ttl=60, wait=5)
            except KeyboardInterrupt:
                await eventually(lambda: fake.server.hold_of("r") is None and not fake.server.waiters("r"))
            else:
                assert lease.release()
                break
        assert looks >= 2


def test_ctrl_c_between_two_instructions_leaves_no_lease(
    fake: GrpcFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The acquire is under way and nobody holds it in hand: what it is granted is released."""
    with redfence.Client(fake.address) as client:
        core = client._session._core
        begin = core.acquire

        def begin_and_be_interrupted(*args: Any, **more: Any) -> None:
            begin(*args, **more)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(core, "acquire", begin_and_be_interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.acquire("r", ttl=60)
        assert client.acquire("r", ttl=60, wait=5).token == 2


async def test_ctrl_c_in_the_middle_of_a_release_does_not_keep_it_from_leaving(fake: GrpcFake) -> None:
    """The lock is free as soon as if nobody had interrupted."""
    clock = _InterruptingClock()
    with redfence.Client(fake.address, clock=clock) as client:
        for looks in itertools.count():
            lease = client.acquire("r", ttl=60)
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
