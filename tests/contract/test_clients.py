"""One suite for both clients, on the server in memory, on the same behind gRPC, and on the real one."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import redfence
from harness.load.threaded import Threaded
from redfence._core.calls import ProbeCall
from redfence._messages.requests import acquire_order, write_acquire
from redfence._transport.links import AsyncLink
from redfence_proto.v1 import lock_pb2

# The ttl of renewed leases; the machine may stand still for a second without a loss.
_RENEWED_TTL_S = 2.0


@pytest.fixture
def name() -> str:
    """A resource of this test's own: the real server is shared."""
    return f"contract/{uuid.uuid4().hex}"


async def _until_waited_for(client: Any, name: str, *, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while (await client.get_lock(name)).waiters != count:  # noqa: ASYNC110  (another process sets no event)
            await asyncio.sleep(0.005)


async def test_a_lock_is_held_in_its_body_and_free_after_it(client: Any, name: str) -> None:
    async with client.lock(name, ttl=10, holder="me") as lease:
        assert lease.resource == name
        states = [lease.state]
        assert 5 < lease.remaining() < 10
        assert not lease.lost.is_set()
        lease.raise_if_lost()
        report = await client.get_lock(name)
        assert (report.current.holder, report.current.token) == ("me", lease.token)
        assert 5 < report.current.remaining <= 10
    states.append(lease.state)
    assert states == [redfence.LeaseState.ACTIVE, redfence.LeaseState.RELEASED]
    assert (await client.get_lock(name)).current is None


async def test_a_lock_delay_is_shown_and_bounded_by_the_greatest_ttl(client: Any, name: str) -> None:
    async with client.lock(name, ttl=10, lock_delay=5):
        current = (await client.get_lock(name)).current
        assert (current.lock_delay, current.closed) == (5, False)
        assert current.remaining <= 10
    assert (await client.get_lock(name)).current is None, "a release opens the lock at once"
    with pytest.raises(redfence.InvalidArgumentError, match="lock_delay"):
        await client.acquire(name, ttl=10, lock_delay=300)
    with pytest.raises(redfence.InvalidArgumentError, match="lock_delay must not be negative"):
        await client.acquire(name, ttl=10, lock_delay=-1)


async def test_a_held_lock_that_is_tried_once_raises_and_the_body_is_not_entered(
    make_client: Callable[[], Any], name: str
) -> None:
    client, other = make_client(), make_client()
    async with other.lock(name, ttl=10, holder="them") as held:
        entered = False

        async def attempt() -> None:
            nonlocal entered
            async with client.lock(name, ttl=10, wait=0):
                entered = True

        with pytest.raises(redfence.LockHeldError) as refused:
            await attempt()
        assert not entered
        told = (refused.value.resource, refused.value.holder, refused.value.token)
        assert told == (name, "them", held.token)
        assert refused.value.remaining is not None
        assert 5 < refused.value.remaining <= 10


async def test_waiters_are_granted_in_the_order_in_which_they_came(
    make_client: Callable[[], Any], name: str
) -> None:
    first, second, other = make_client(), make_client(), make_client()
    held = await other.acquire(name, ttl=10)
    granted: list[str] = []
    tokens: list[int] = []

    async def take_turn(client: Any, label: str) -> None:
        lease = await client.acquire(name, ttl=10, holder=label)
        granted.append(label)
        tokens.append(lease.token)
        assert await lease.release()

    labels = ["a", "b", "c", "d"]
    turns = []
    for count, (client, label) in enumerate(zip((first, second) * 2, labels, strict=True), 1):
        turns.append(asyncio.create_task(take_turn(client, label)))
        await _until_waited_for(other, name, count=count)
    reports = [await client.get_lock(name) for client in (first, second, other)]
    assert [each.holder for each in reports[0].queue] == labels
    assert all(0 <= later.waited <= earlier.waited for earlier, later in itertools.pairwise(reports[0].queue))
    assert [report.position for report in reports] == [1, 2, 0]
    assert await held.release()
    await asyncio.wait_for(asyncio.gather(*turns), 10)
    assert granted == labels
    assert held.token < tokens[0]
    assert tokens == sorted(set(tokens))
    assert (await other.get_lock(name)).queue == ()


async def test_a_waiter_that_leaves_lets_the_others_move_up(
    make_client: Callable[[], Any], name: str
) -> None:
    clients, other = [make_client() for _ in range(3)], make_client()
    held = await other.acquire(name, ttl=10)
    waiting = []
    for count, client in enumerate(clients, 1):
        waiting.append(asyncio.create_task(client.acquire(name, ttl=10, holder=str(count))))
        await _until_waited_for(other, name, count=count)
    await clients[1].close()
    with pytest.raises(redfence.ClosedError):
        await waiting[1]
    await _until_waited_for(other, name, count=2)
    report = await clients[2].get_lock(name)
    assert ([each.holder for each in report.queue], report.position) == (["1", "3"], 2)
    assert await held.release()
    first = await asyncio.wait_for(waiting[0], 5)
    assert await first.release()
    third = await asyncio.wait_for(waiting[2], 5)
    assert held.token < first.token < third.token
    assert await third.release()
    assert (await other.get_lock(name)).current is None


async def test_a_wait_that_runs_out_tells_the_place_it_had(make_client: Callable[[], Any], name: str) -> None:
    client, other = make_client(), make_client()
    held_by_them = await other.acquire(name, ttl=10, holder="them")
    waiting = asyncio.create_task(client.acquire(name, ttl=10))
    await _until_waited_for(other, name)
    with pytest.raises(
        redfence.AcquireTimeoutError, match=r"held by 'them' after 0.1 s; still 2nd in line$"
    ) as ran_out:
        await client.acquire(name, ttl=10, wait=0.1)
    assert isinstance(ran_out.value, TimeoutError)
    assert ran_out.value.position == 2
    assert (await client.get_lock(name)).waiters == 1
    with pytest.raises(redfence.LockHeldError, match=r"is held by 'them'$") as held:
        await client.acquire(name, ttl=10, wait=0)
    assert held.value.position == 0
    await client.close()
    with pytest.raises(redfence.ClosedError):
        await waiting
    assert await held_by_them.release()


async def test_a_cancel_of_itself_is_answered_and_cancels_nothing(service: Any, name: str) -> None:
    async with service.make_async_client() as holder, service.make_async_client() as client:
        held = await holder.acquire(name, ttl=10)
        session = client._session
        link = await session._connector.connect(session._endpoints.current(), timeout_ms=5000)
        try:
            waiting = lock_pb2.SessionCommand(id=1)
            order = acquire_order(name, ttl=10, wait=60, holder="", max_hold=None)
            write_acquire(waiting, order, lease_id=uuid.uuid4().hex, wait_ms=60_000)
            await link.send(lock_pb2.SessionRequest(commands=[waiting]))
            await _until_waited_for(holder, name)
            for command_id in (2, 3):
                probe = lock_pb2.SessionCommand(id=command_id)
                ProbeCall().write(probe, now_ms=0.0)
                await link.send(lock_pb2.SessionRequest(commands=[probe]))
                echo = lock_pb2.SessionResult(id=command_id, cancel=lock_pb2.CancelResult(found=False))
                assert await _next_result(link) == echo
            assert await held.release()
            granted = await _next_result(link)
            assert (granted.id, granted.acquire.outcome) == (1, lock_pb2.ACQUIRE_OUTCOME_GRANTED)
            assert granted.acquire.lease.fencing_token > held.token
        finally:
            await link.close()


async def _next_result(link: AsyncLink) -> lock_pb2.SessionResult:
    response = await asyncio.wait_for(link.receive(), 5)
    assert response is not None
    (result,) = response.results
    return result


@pytest.mark.slow
async def test_a_wait_for_ever_outlasts_a_lease_that_is_renewed_and_one_that_is_left(
    make_client: Callable[[], Any], name: str
) -> None:
    client, other = make_client(), make_client()
    held = await other.acquire(name, ttl=_RENEWED_TTL_S, max_hold=1.25 * _RENEWED_TTL_S)
    lease = await asyncio.wait_for(client.acquire(name, ttl=10), 15)
    assert held.lost.is_set()
    with pytest.raises(redfence.LeaseLostError) as lost:
        held.raise_if_lost()
    assert lost.value.reason is redfence.LossReason.MAX_HOLD
    assert lease.token > held.token
    assert lease.remaining() > 5


async def test_a_refusal_tells_that_a_lost_lease_keeps_the_lock_closed(client: Any, name: str) -> None:
    lost = await client.acquire(name, ttl=0.2, lock_delay=60, max_hold=0.1, holder="them")
    async with asyncio.timeout(5):
        while not (await client.get_lock(name)).current.closed:  # noqa: ASYNC110  (time closes it)
            await asyncio.sleep(0.005)
    with pytest.raises(
        redfence.LockHeldError, match=r"is closed by the lock delay of a lost lease of 'them'$"
    ) as now:
        await client.acquire(name, ttl=10, wait=0)
    with pytest.raises(
        redfence.AcquireTimeoutError, match="still closed by the lock delay of a lost lease"
    ) as later:
        await client.acquire(name, ttl=10, wait=0.1)
    for error in (now.value, later.value):
        assert error.closed
        assert (error.token, error.holder) == (lost.token, "them")
        assert 0 < (error.remaining or 0) <= 60


async def test_a_release_tells_whether_it_ended_the_lease_and_may_be_repeated(client: Any, name: str) -> None:
    lease = await client.acquire(name, ttl=10)
    assert await lease.release() is True
    assert await lease.release() is False
    assert lease.remaining() == 0.0
    assert not lease.lost.is_set()
    with pytest.raises(redfence.LeaseLostError) as over:
        lease.raise_if_lost()
    assert over.value.reason is redfence.LossReason.RELEASED


@pytest.mark.slow
async def test_a_lease_is_kept_alive_far_beyond_its_ttl(client: Any, name: str) -> None:
    async with client.lock(name, ttl=_RENEWED_TTL_S) as lease:
        await asyncio.sleep(2 * _RENEWED_TTL_S)
        lease.raise_if_lost()
        assert (await client.check_token(name, lease.token)).live


async def test_what_the_body_raises_goes_on_and_the_lock_is_free(client: Any, name: str) -> None:
    async def fail() -> None:
        async with client.lock(name, ttl=10):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail()
    assert (await client.get_lock(name)).current is None


async def test_a_token_is_live_while_its_lease_is_held(client: Any, name: str) -> None:
    assert not (await client.check_token(name, 1)).live
    async with client.lock(name, ttl=10, holder="me") as lease:
        report = await client.check_token(lease)
        assert report.live
        assert report.current.holder == "me"
        assert not (await client.check_token(name, lease.token + 1)).live
    assert not (await client.check_token(name, lease.token)).live


async def test_the_clusters_state_is_told(client: Any, name: str) -> None:
    async with client.lock(name, ttl=10) as lease:
        report = await client.cluster_status()
    assert max(node.high for node in report.nodes) >= lease.token
    assert report.ready
    assert report.max_ttl == 300.0
    assert [node.index for node in report.nodes] == list(range(len(report.nodes)))
    for node in report.nodes:
        assert node.durability is not redfence.Durability.UNKNOWN
        # All on one machine.
        assert node.clock_offset is not None
        assert abs(node.clock_offset) < 1


async def test_a_ttl_beyond_the_clusters_bound_is_refused_by_the_server(client: Any, name: str) -> None:
    with pytest.raises(redfence.InvalidArgumentError) as refused:
        await client.acquire(name, ttl=3600)
    assert refused.value.error_reason == "INVALID_TTL"
    assert await (await client.acquire(name, ttl=10)).release()


async def test_a_burst_of_acquisitions_is_granted_on_one_stream(client: Any, name: str) -> None:
    count = 30 if "Threaded" in type(client).__name__ else 300

    async def once(number: int) -> int:
        lease = await client.acquire(f"{name}/{number}", ttl=10)
        assert await lease.release()
        return int(lease.token)

    tokens = await asyncio.gather(*(once(number) for number in range(count)))
    assert len(tokens) == count
    assert all(token > 0 for token in tokens)


async def test_clients_that_contend_never_are_inside_together(
    make_client: Callable[[], Any], name: str
) -> None:
    inside, most, tokens = 0, 0, []

    async def work(client: Any) -> None:
        nonlocal inside, most
        for _ in range(5):
            async with client.lock(name, ttl=10) as lease:
                inside += 1
                most = max(most, inside)
                tokens.append(lease.token)
                await asyncio.sleep(0.001)
                inside -= 1

    clients = [make_client(), make_client()]
    await asyncio.wait_for(asyncio.gather(*(work(client) for client in clients * 2)), 30)
    assert most == 1
    assert len(tokens) == 20
    assert tokens == sorted(set(tokens))


def test_a_lock_of_threads_can_be_entered_again_but_not_twice_at_once(service: Any, name: str) -> None:
    with service.make_client() as client:
        lock = client.lock(name, ttl=10)
        with lock as first, pytest.raises(RuntimeError, match="already entered"):
            lock.__enter__()
        with lock as second:
            assert second.token > first.token


async def test_a_lock_of_asyncio_can_be_entered_again_but_not_twice_at_once(service: Any, name: str) -> None:
    async with service.make_async_client() as client:
        lock = client.lock(name, ttl=10)
        async with lock as first:
            with pytest.raises(RuntimeError, match="already entered"):
                await lock.__aenter__()
        async with lock as second:
            assert second.token > first.token


def test_each_call_of_a_decorated_function_holds_a_lease_of_its_own(service: Any, name: str) -> None:
    with service.make_client() as client:
        lock: redfence.Lock = client.lock(name, ttl=10)
        inside: list[int] = []

        @lock
        def double(number: int, *, times: int = 2) -> int:
            """Multiply."""
            report = client.get_lock(name)
            inside.append(report.current.token)
            return number * times

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(double, range(3))) == [0, 2, 4]
        assert double(5, times=3) == 15
        assert len(set(inside)) == 4
        assert (double.__name__, double.__doc__) == ("double", "Multiply.")
        assert client.get_lock(name).current is None
        with lock:
            assert lock.locked()


async def test_each_call_of_a_decorated_task_holds_a_lease_of_its_own(service: Any, name: str) -> None:
    async with service.make_async_client() as client:
        lock: redfence.AsyncLock = client.lock(name, ttl=10)
        inside: list[int] = []

        @lock
        async def double(number: int, *, times: int = 2) -> int:
            """Multiply."""
            report = await client.get_lock(name)
            inside.append(report.current.token)
            return number * times

        assert await asyncio.gather(*map(double, range(3))) == [0, 2, 4]
        assert await double(5, times=3) == 15
        assert len(set(inside)) == 4
        assert (double.__name__, double.__doc__) == ("double", "Multiply.")
        assert (await client.get_lock(name)).current is None
        async with lock:
            assert lock.locked()


async def test_a_lock_and_a_lease_tell_whether_they_are_held(service: Any, name: str) -> None:
    with service.make_client() as client:
        lock = client.lock(name, ttl=10)
        told = [lock.locked()]
        with lock as lease:
            told += [lock.locked(), lease.owned()]
            lease.release()
            told += [lock.locked(), lease.owned()]
        assert told == [False, True, True, False, False]
        with lock:
            assert lock.locked()
            assert not lease.owned()
        assert not lock.locked()
    async with service.make_async_client() as waking:
        lock = waking.lock(name, ttl=10)
        told = [lock.locked()]
        async with lock as lease:
            told += [lock.locked(), lease.owned()]
        assert [*told, lock.locked(), lease.owned()] == [False, True, True, False, False]


async def test_try_run_runs_only_if_the_lock_is_free(make_client: Callable[[], Any], name: str) -> None:
    client, other = make_client(), make_client()
    threads = isinstance(client, Threaded)
    ran: list[Any] = []

    async def task(number: int) -> None:
        ran.append((number, (await client.get_lock(name)).current.holder))

    def function(number: int) -> None:
        ran.append((number, client.inner.get_lock(name).current.holder))

    job = function if threads else task
    async with other.lock(name, ttl=10):
        assert await client.try_run(name, job, 1, ttl=10) is False
    assert await client.try_run(name, job, 2, ttl=10, holder="me") is True
    assert ran == [(2, "me")]

    async def nested_task() -> None:
        await client.acquire(name, ttl=10, wait=0)

    def nested_function() -> None:
        client.inner.acquire(name, ttl=10, wait=0)

    with pytest.raises(redfence.LockHeldError):
        await client.try_run(name, nested_function if threads else nested_task, ttl=10)
    assert (await client.get_lock(name)).current is None


async def test_a_closed_client_says_so(client: Any, name: str) -> None:
    lease = await client.acquire(name, ttl=10)
    await client.close()
    await client.close()
    assert lease.lost.is_set()
    with pytest.raises(redfence.LeaseLostError) as lost:
        lease.raise_if_lost()
    assert lost.value.reason is redfence.LossReason.CLIENT_CLOSED
    assert await lease.release() is False
    for call in (client.acquire(name, ttl=10), client.get_lock(name)):
        with pytest.raises(redfence.ClosedError):
            await call


async def test_a_closed_clients_lease_is_free_for_others(make_client: Callable[[], Any], name: str) -> None:
    client, other = make_client(), make_client()
    closed = await client.acquire(name, ttl=60)
    await client.close()
    lease = await other.acquire(name, ttl=10, wait=5)
    assert closed.remaining() == 0
    assert lease.remaining() > 5
    assert await lease.release()


@pytest.mark.parametrize("ended_by", ["release", "close"])
async def test_the_end_of_a_lease_wakes_those_who_wait_for_its_loss(
    client: Any, name: str, ended_by: str
) -> None:
    lease = await client.acquire(name, ttl=60)
    lost = asyncio.create_task(lease.lost.wait())
    await asyncio.sleep(0.05)
    await (lease.release() if ended_by == "release" else client.close())
    assert await lost is (ended_by == "close")


async def test_misuse_is_told_before_anything_is_sent(client: Any, name: str) -> None:
    for arguments in ({"ttl": "10"}, {"ttl": 0}, {"ttl": 10, "holder": 7}):
        with pytest.raises(redfence.InvalidArgumentError):
            await client.acquire(name, **arguments)
    for wait in (-1, math.nan, math.inf, True, "5"):
        with pytest.raises(redfence.InvalidArgumentError, match=r"^wait ") as wrong:
            await client.acquire(name, ttl=10, wait=wait)
        assert wrong.value.field == "wait"
    with pytest.raises(redfence.InvalidArgumentError):
        await client.get_lock("")
    with pytest.raises(redfence.InvalidArgumentError):
        await client.check_token(name, 0)
