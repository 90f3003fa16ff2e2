"""Order, wake-ups and leaving of waiters: the product's service over fake nodes, on virtual time."""

from __future__ import annotations

import asyncio

import pytest
from unit.redfence_server.service_world import (
    HOLDER,
    TTL_MS,
    R,
    call_off,
    held,
    lease_id,
    servers,
    settle,
    token_of,
)

from harness.time.virtual_loop import LoopClock
from redfence_server.locking.node import Held, Release
from redfence_server.model import Lease
from redfence_server.waiting.acquiring import NotGranted

pytestmark = pytest.mark.virtual_time


async def test_waiters_are_granted_in_the_order_of_their_arrival() -> None:
    (server,) = await held()
    waiting = [server.wait(lease_id(number)) for number in range(300)]
    await settle()
    began_ms, mints = LoopClock().now_ms(), server.mints()
    holder = HOLDER
    for number, task in enumerate(waiting):
        assert await server.release(holder)
        await task
        assert token_of(task) == 2 + number
        assert not any(later.done() for later in waiting[number + 1 :])
        holder = lease_id(number)
    assert server.mints() - mints == len(waiting)
    assert not any(isinstance(each, Release) for each in server.sent)
    assert LoopClock().now_ms() == began_ms
    await server.release(holder)
    assert server.at_rest()


async def test_an_acquire_that_does_not_wait_is_tried_once_past_the_queue() -> None:
    (server,) = await held()
    waiting = server.wait(lease_id(1))
    await settle()
    began_ms = LoopClock().now_ms()
    refused = await server.wait(lease_id(2), wait_ms=0)
    assert refused == NotGranted(Held(HOLDER.digest, 1, "holder ff", TTL_MS - 2), waited=False)
    assert LoopClock().now_ms() == began_ms
    assert await server.waiters() == 1
    await call_off(waiting)
    assert server.at_rest()


async def test_a_wait_that_is_over_tells_its_place_and_the_holder() -> None:
    """The present holder was granted the lock after the waiter came."""
    (server,) = await held()
    waiting = [server.wait(lease_id(number)) for number in range(3)]
    last = server.wait(lease_id(9), wait_ms=2_000)
    await call_off(waiting[1])
    view = (await server.service.get_lock(R, digest=lease_id(9).digest)).queue
    assert (view.count, view.position) == (3, 3)
    assert [label for label, _ in view.first] == ["holder 00", "holder 02", "holder 09"]
    await server.release(HOLDER)
    outcome = await last
    assert isinstance(outcome, NotGranted)
    assert (outcome.waited, outcome.position) == (True, 2)
    assert outcome.current is not None
    assert outcome.current.holder == "holder 00"
    assert outcome.current.remaining_ms == pytest.approx(TTL_MS - 2_000, abs=2)
    assert (await server.service.get_lock(R, digest=lease_id(9).digest)).queue.position == 0
    await call_off(waiting[2])


async def test_a_release_through_another_server_wakes_the_first_waiter_and_nobody_else() -> None:
    here, there = await held(2)
    waiting = [here.wait(lease_id(number)) for number in range(50)]
    await asyncio.sleep(1)
    mints, released_ms = here.mints(), LoopClock().now_ms()
    await there.release(HOLDER)
    await waiting[0]
    assert LoopClock().now_ms() == released_ms
    assert here.mints() - mints == 1
    await asyncio.sleep(1)
    assert [task.done() for task in waiting].count(True) == 1
    assert here.mints() - mints == 1
    await call_off(*waiting[1:])


async def test_the_notice_of_a_node_that_refused_after_the_try_wakes_the_waiter_alone() -> None:
    """Two refusals decide a try, before the third node answers. The other two may send no notice."""
    here, there = await held(2)
    waiting = here.wait(lease_id(1))
    await settle()
    here.links[0].unreachable = True  # its notice is lost
    there.links[1].hold_requests = True  # its release is late
    released_ms = LoopClock().now_ms()
    await there.release(HOLDER)
    await settle()
    here.links[0].unreachable = False
    await waiting
    assert token_of(waiting) == 2
    assert LoopClock().now_ms() - released_ms < 101


async def test_a_server_that_does_not_wait_hears_nothing() -> None:
    here, there, elsewhere = servers(3)
    heard: dict[str, int] = {}
    for server, name in ((here, "here"), (there, "there"), (elsewhere, "elsewhere")):
        for link in server.links:
            link.listen(lambda notice, name=name: heard.update({name: heard.get(name, 0) + 1}))  # type: ignore[misc]
    await there.acquire(HOLDER)
    waiting = here.wait(lease_id(1))
    assert isinstance(await elsewhere.wait(lease_id(2), wait_ms=0), NotGranted)
    await settle()
    await there.release(HOLDER)
    await waiting
    await here.release(lease_id(1))
    await settle()
    assert heard == {"here": 3}


async def test_a_lease_that_is_renewed_through_the_same_server_costs_no_try() -> None:
    (server,) = await held()
    waiting = server.wait(lease_id(1))
    await asyncio.sleep(0.2)
    mints = server.mints()
    for _ in range(30):
        await asyncio.sleep(TTL_MS / 3 / 1000)
        await server.service.renew(R, HOLDER)
        await server.service.renew(R, lease_id(7))
    renewed_ms = LoopClock().now_ms()
    assert server.mints() == mints
    await waiting
    assert TTL_MS <= LoopClock().now_ms() - renewed_ms <= TTL_MS + 50


async def test_a_lease_that_ends_while_its_own_grant_is_being_read_is_not_missed() -> None:
    """The caller repeats its Acquire at another server and releases there."""
    here, there = await held(2)
    first, second = here.wait(lease_id(1)), here.wait(lease_id(2))
    await settle()
    here.every(hold_replies=True)
    await there.release(HOLDER)
    for link in here.links:
        link.answer(3)  # the notices; the head's mints are applied and not answered yet
    await settle()
    await there.acquire(lease_id(1))
    await there.release(lease_id(1))
    released_ms = LoopClock().now_ms()
    here.deliver()
    await asyncio.wait([first, second])
    assert token_of(second) == 3
    assert LoopClock().now_ms() - released_ms < 10


async def test_an_idle_waiter_sends_nothing_to_any_node() -> None:
    (server,) = servers()
    await server.acquire(HOLDER, ttl_ms=300_000)
    waiting = [server.wait(lease_id(number)) for number in range(20)]
    await asyncio.sleep(0.2)
    sent = len(server.sent)
    await asyncio.sleep(299)
    assert len(server.sent) == sent
    await call_off(*waiting)


@pytest.mark.parametrize(
    "gone_after", ["the release was read", "it was told", "a node answered", "all nodes answered"]
)
async def test_a_handover_to_a_waiter_that_goes_away_goes_to_the_next_one(gone_after: str) -> None:
    (server,) = await held()
    first, second = server.wait(lease_id(1)), server.wait(lease_id(2))
    await settle()
    server.every(hold_requests=True)
    released: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    server.service.begin_release(R, HOLDER, released.set_result)
    if gone_after != "the release was read":
        await settle()
    for link in server.links[: {"a node answered": 1, "all nodes answered": 3}.get(gone_after, 0)]:
        link.deliver()
        link.answer()
    first.cancel()
    await asyncio.sleep(0)
    server.deliver()
    assert await released is True
    granted = await second
    assert isinstance(granted, Lease)
    assert first.cancelled()
    assert LoopClock().now_ms() < 100
    await server.release(lease_id(2))
    assert server.at_rest()
    assert not any(link.state.holds for link in server.links)
