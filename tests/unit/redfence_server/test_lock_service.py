"""What the lock server does for its callers, on virtual time over fake nodes."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import pytest
from unit.redfence_server.service_world import TTL_MS, R, fake_nodes, lock_service

from harness.doubles.waiting import keeps_no_waiter
from harness.time.virtual_loop import LoopClock
from redfence_server.errors import NoQuorumError, RedfenceServerError
from redfence_server.locking.node import Held, Mint, Undo
from redfence_server.locking.quorum import RenewVerdict, TokenVerdict
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.waiting.acquiring import NotGranted
from redfence_server.waiting.schedule import TrySchedule
from redfence_server.waiting.waiter_limiter import WaiterLimits

pytestmark = pytest.mark.virtual_time

MINE, THEIRS = LeaseId("a" * 32), LeaseId("b" * 32)
FOREVER_MS = 600_000


def call(
    lease: LeaseId = MINE, *, wait_ms: int = 0, ttl_ms: int = TTL_MS, answer_within_ms: float | None = None
) -> AcquireCall:
    return AcquireCall(
        R, lease, ttl_ms, f"holder {lease.digest[:2]}", wait_ms, LoopClock().now_ms(), answer_within_ms
    )


def now_ms() -> float:
    return LoopClock().now_ms()


async def test_a_free_lock_is_granted_at_once_with_a_validity_from_the_arrival() -> None:
    assert await lock_service(fake_nodes()).acquire(call()) == Lease(1, TTL_MS - 102)
    assert now_ms() == 0


async def test_a_waiter_gets_the_lock_soon_after_its_release() -> None:
    nodes = fake_nodes()
    server, other = lock_service(nodes), lock_service(nodes)
    await other.acquire(call(THEIRS))
    waiting = asyncio.ensure_future(server.acquire(call(wait_ms=FOREVER_MS)))
    await asyncio.sleep(3)
    assert not waiting.done()
    assert (await server.get_lock(R)).queue.count == 1
    await other.release(R, THEIRS)
    released_ms = now_ms()
    lease = await waiting
    assert isinstance(lease, Lease)
    assert lease.token == 2
    assert now_ms() - released_ms < 1
    # A half of a per mille of the three seconds is for the clocks.
    assert lease.validity_ms == pytest.approx(now_ms() + TTL_MS - 102 - 1.5, abs=1)
    assert (await server.get_lock(R)).queue.count == 0


@pytest.mark.parametrize(
    ("wait_ms", "answer_within_ms", "ends_ms"), [(1_000, None, (998, 1_002)), (FOREVER_MS, 1_000, (850, 950))]
)
async def test_a_wait_ends_when_it_was_asked_to_and_before_the_callers_deadline(
    wait_ms: int, answer_within_ms: float | None, ends_ms: tuple[int, int]
) -> None:
    server = lock_service(fake_nodes())
    await server.acquire(call(THEIRS))
    outcome = await server.acquire(call(wait_ms=wait_ms, answer_within_ms=answer_within_ms))
    assert isinstance(outcome, NotGranted)
    assert outcome.waited
    assert ends_ms[0] <= now_ms() <= ends_ms[1]


@pytest.mark.parametrize("deadline_ms", [10, 40, 99])
async def test_a_short_deadline_leaves_time_to_be_granted_and_to_be_told(deadline_ms: int) -> None:
    server = lock_service(fake_nodes())
    assert isinstance(await server.acquire(call(answer_within_ms=deadline_ms)), Lease)
    started_ms = now_ms()
    lost = await server.acquire(call(THEIRS, wait_ms=FOREVER_MS, answer_within_ms=deadline_ms))
    assert isinstance(lost, NotGranted)
    assert now_ms() - started_ms < deadline_ms


async def test_an_attempt_that_outlasts_the_callers_deadline_is_undone() -> None:
    nodes = fake_nodes()
    for node in nodes:
        node.hold_replies = True
    with pytest.raises(NoQuorumError):
        await lock_service(nodes).acquire(call(answer_within_ms=1_000))
    assert now_ms() == pytest.approx(950, abs=2)
    await asyncio.sleep(0.001)
    assert all(any(isinstance(each, Undo) for each in node.sent) for node in nodes)
    assert not any(node.state.holds for node in nodes)


async def test_without_a_quorum_the_call_fails_at_once_even_if_it_would_wait() -> None:
    nodes = fake_nodes()
    nodes[0].unreachable = nodes[2].unreachable = True
    with pytest.raises(NoQuorumError) as told:
        await lock_service(nodes).acquire(call(wait_ms=FOREVER_MS))
    assert told.value.silent == "0=unreachable,2=unreachable"
    assert now_ms() < 5


async def test_a_split_that_lasts_is_told_after_a_bounded_number_of_tries() -> None:
    nodes = fake_nodes()
    for node in nodes[1:]:
        node.state.apply(Mint(R, f"{node.index}" * 64, "left", "", TTL_MS), 0.0)
    assert isinstance(await lock_service(nodes).acquire(call()), NotGranted)
    assert len([each for each in nodes[0].sent if isinstance(each, Mint)]) == 4


async def test_a_renewal_that_comes_too_late_is_at_risk_and_a_lost_one_is_lost() -> None:
    nodes = fake_nodes()
    server = lock_service(nodes)
    await server.acquire(call(ttl_ms=1_000))
    assert (await server.renew(R, MINE)).validity_ms == 1_000 - 12
    for node in nodes:
        node.hold_replies = True
    task = asyncio.ensure_future(server.renew(R, MINE))
    await asyncio.sleep(0.99)
    for node in nodes:
        node.answer()
    assert (await task).verdict is RenewVerdict.AT_RISK
    for node in nodes:
        node.settle()
    await asyncio.sleep(2)
    assert (await server.renew(R, MINE)).verdict is RenewVerdict.LOST


async def test_looking_and_checking_need_a_quorum_of_answers() -> None:
    nodes = fake_nodes()
    server = lock_service(nodes)
    await server.acquire(call())
    assert (await server.check_token(R, 1)).verdict is TokenVerdict.LIVE
    assert (await server.check_token(R, 2)).verdict is TokenVerdict.NOT_LIVE
    nodes[0].unreachable = True
    assert (await server.get_lock(R)).current == Held(MINE.digest, 1, f"holder {MINE.digest[:2]}", TTL_MS)
    nodes[1].unreachable = True
    with pytest.raises(NoQuorumError):
        await server.get_lock(R)
    with pytest.raises(NoQuorumError):
        await server.check_token(R, 1)
    with pytest.raises(NoQuorumError):
        await server.release(R, MINE)


@pytest.mark.parametrize("waiters", [1, 1_400])
@pytest.mark.parametrize("step", ["send", "granted"])
async def test_a_defect_reaches_its_caller_and_leaves_the_lock_and_the_queue_free(
    waiters: int, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns of the waiters behind do not nest."""

    def break_down(*_: object, **__: object) -> bool:
        raise RuntimeError("inner words")

    nodes = fake_nodes()
    server = lock_service(nodes)
    await server.acquire(call(THEIRS))
    tasks = [
        asyncio.ensure_future(server.acquire(call(LeaseId(f"{number:032x}"), wait_ms=FOREVER_MS)))
        for number in range(waiters)
    ]
    await asyncio.sleep(0.01)
    if step == "send":
        monkeypatch.setattr(nodes[1], "send", break_down)
    else:
        monkeypatch.setattr(TrySchedule, "granted", break_down)
    await asyncio.sleep(TTL_MS / 1000 + 1)
    await asyncio.wait(tasks)
    assert all(isinstance(task.exception(), RuntimeError) for task in tasks)
    monkeypatch.undo()
    await asyncio.sleep(0.01)
    hold = nodes[0].state.holds.get(R)
    assert hold is None or hold.digest == THEIRS.digest, "the mint before the defect is undone"
    assert keeps_no_waiter(server._queues)
    assert isinstance(await server.acquire(call(wait_ms=1_000)), Lease)


@pytest.mark.parametrize("end", ["no quorum", "deadline", "too many waiters"])
async def test_a_call_that_fails_makes_no_reference_cycle(end: str) -> None:
    """The garbage collector runs rarely, and failures come by the thousand."""
    nodes = fake_nodes()
    server = lock_service(nodes, limits=WaiterLimits(server=1, resource=1, connection=1))
    await server.acquire(call(THEIRS, ttl_ms=300_000))
    waits = asyncio.ensure_future(
        server.acquire(call(wait_ms=FOREVER_MS if end == "too many waiters" else 0))
    )
    await asyncio.sleep(0.01)
    for node in nodes:
        node.unreachable = end == "no quorum"
        node.hold_replies = end == "deadline"

    async def fail(number: int) -> None:
        lease = LeaseId(f"{number:032x}")
        wait_ms, deadline_ms = (100, None) if end == "too many waiters" else (0, 50)
        with suppress(RedfenceServerError):
            await server.acquire(call(lease, wait_ms=wait_ms, answer_within_ms=deadline_ms))
            raise AssertionError("it was to fail")
        if end == "no quorum":
            with suppress(NoQuorumError):
                await server.release(R, lease)

    await fail(0)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for number in range(1, 11):
            await fail(number)
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, RedfenceServerError)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        waits.cancel()
        await asyncio.wait([waits])
