"""Servers that take turns, and what ends a wait: the product's service over fake nodes, on virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from unit.redfence_server.service_world import (
    FOREVER_MS,
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
from redfence_server.errors import DrainingError, NoQuorumError, TooManyWaitersError, ValidityExhaustedError
from redfence_server.locking.node import Mint
from redfence_server.locking.quorum import RenewVerdict
from redfence_server.model import Lease
from redfence_server.waiting.schedule import HAND_OVERS_MAX
from redfence_server.waiting.waiter_limiter import WaiterLimits

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("repeats", [False, True])
async def test_handovers_are_bounded_while_another_server_waits(
    repeats: bool,  # noqa: FBT001  (a parameter of the test)
) -> None:
    here, there = servers(2)
    await here.acquire(HOLDER)
    mine = [here.wait(lease_id(number)) for number in range(40)]
    await settle()
    other = there.wait(lease_id(99))
    await settle()
    holder, handed_over = HOLDER, 0
    while not other.done():
        await here.release(holder)
        await asyncio.wait(
            [*[task for task in mine if not task.done()], other], return_when="FIRST_COMPLETED"
        )
        holder = lease_id(handed_over)
        handed_over += not other.done()
        if repeats and handed_over == 10:
            await here.wait(holder)
            await settle()
    assert handed_over == HAND_OVERS_MAX
    await there.release(lease_id(99))
    await mine[HAND_OVERS_MAX]
    await call_off(*mine[HAND_OVERS_MAX + 1 :])


async def test_a_queue_that_is_kept_for_its_turn_knows_nothing_of_who_comes_later() -> None:
    here, there = servers(2)
    await here.acquire(HOLDER)
    first, other = here.wait(lease_id(1)), there.wait(lease_id(99))
    await settle()
    await here.release(HOLDER)
    await first
    await call_off(other)
    later = here.wait(lease_id(2))
    await settle()
    released_ms = LoopClock().now_ms()
    await there.release(lease_id(1))
    await later
    assert LoopClock().now_ms() == released_ms
    await here.release(lease_id(2))
    await asyncio.sleep(TTL_MS / 1000 + 1)
    assert here.at_rest()


@pytest.mark.parametrize("wait_ms", [150, FOREVER_MS])
async def test_a_grant_that_came_too_late_is_tried_again_while_the_wait_lasts(wait_ms: int) -> None:
    (server,) = servers()
    server.every(hold_replies=True)
    waiting = server.wait(lease_id(1), ttl_ms=100, wait_ms=wait_ms)
    await asyncio.sleep(0.2)
    server.deliver()
    if wait_ms < FOREVER_MS:
        with pytest.raises(ValidityExhaustedError):
            await waiting
        return
    granted = await waiting
    assert isinstance(granted, Lease)
    assert granted.token == 2
    assert granted.validity_ms > 200 + 90


async def test_without_a_quorum_everybody_who_waits_is_told_at_once() -> None:
    (server,) = await held()
    waiting = [server.wait(lease_id(number)) for number in range(100)]
    await asyncio.sleep(1)
    for link in server.links[:2]:
        link.hold_requests = True
    await asyncio.sleep(TTL_MS / 1000)
    assert not any(task.done() for task in waiting)
    for link in server.links:
        link.time_out()
    await settle()
    assert all(isinstance(task.exception(), NoQuorumError) for task in waiting)
    assert server.at_rest()


async def test_waiters_stay_while_broken_connections_are_made_again() -> None:
    (server,) = await held()
    waiting = [server.wait(lease_id(number)) for number in range(3)]
    await asyncio.sleep(0.05)
    server.every(hold_requests=True)
    await asyncio.sleep(0.1)
    assert isinstance(server.sent[-1], Mint), "the head tries"
    for link in server.links:
        link.break_connection()
    await settle()
    for link in server.links:
        link.settle()
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in waiting)
    await server.release(HOLDER)
    await settle()
    assert token_of(waiting[0]) == 2
    await call_off(*waiting[1:])


@pytest.mark.parametrize(("may_return", "lasted_ms"), [(False, 200), (True, 1_000)])
async def test_a_wait_without_a_quorum_fails_once_no_quorum_may_return(
    *, may_return: bool, lasted_ms: float
) -> None:
    """While one may return the wait goes on; at its end the waiter does not report the lock as held."""
    (server,) = await held()
    server.service._acquirer.quorum_may_return = lambda: may_return
    server.every(unreachable=True)
    with pytest.raises(NoQuorumError):
        await server.wait(lease_id(1), wait_ms=1_000)
    assert lasted_ms - 200 <= LoopClock().now_ms() <= lasted_ms + 10


async def test_a_drain_sends_everybody_away_and_undoes_what_is_under_way_for_nobody() -> None:
    (server,) = await held()
    waiting = [server.wait(lease_id(number)) for number in range(3)]
    await settle()
    server.every(hold_requests=True)
    releasing = asyncio.ensure_future(server.release(HOLDER))
    await settle()
    server.service.drain()
    with pytest.raises(DrainingError):
        await server.acquire(lease_id(9))
    server.deliver()
    await asyncio.wait(waiting)
    assert await releasing
    assert token_of(waiting[0]) == 2
    assert all(isinstance(task.exception(), DrainingError) for task in waiting[1:])
    # Leases are kept and ended to the last.
    assert (await server.service.renew(R, lease_id(0))).verdict is RenewVerdict.ACTIVE
    assert await server.release(lease_id(0))
    assert server.at_rest()


async def test_a_waiter_that_is_refused_while_the_server_drains_is_sent_away() -> None:
    here, _there = await held(2)
    here.every(hold_replies=True)
    waiting = here.wait(lease_id(1))
    await settle()
    here.service.drain()
    here.deliver()
    with pytest.raises(DrainingError):
        await waiting
    assert LoopClock().now_ms() < 10


@pytest.mark.parametrize(
    ("limits", "elsewhere"),
    [
        (WaiterLimits(server=1, resource=9, connection=9), None),
        (WaiterLimits(server=9, resource=1, connection=9), ("other", "x")),
        (WaiterLimits(server=9, resource=9, connection=1), (R, "y")),
    ],
    ids=["server", "resource", "connection"],
)
async def test_each_limit_is_told_by_its_name_and_leaving_makes_room(
    limits: WaiterLimits, elsewhere: tuple[str, str] | None, request: pytest.FixtureRequest
) -> None:
    (server,) = servers(limits=limits)
    for resource in (R, "other"):
        await server.wait(HOLDER, wait_ms=0, resource=resource)
    waiting = [server.wait(lease_id(1), connection="x")]
    await settle()
    with pytest.raises(TooManyWaitersError) as refused:
        await server.wait(lease_id(2), connection="x")
    assert (refused.value.scope, refused.value.limit) == (request.node.callspec.id, 1)
    free = await server.wait(lease_id(3), resource="free", connection="x")
    assert isinstance(free, Lease), "a grant at once needs no room"
    if elsewhere:
        resource, connection = elsewhere
        waiting.append(server.wait(lease_id(4), resource=resource, connection=connection))
    await call_off(waiting.pop(0))
    waiting.append(server.wait(lease_id(2), connection="x"))
    await settle()
    assert not any(task.done() for task in waiting)
    await call_off(*waiting)
    assert server.at_rest()


async def test_a_peer_leaves_as_many_places_free_as_it_has() -> None:
    (server,) = servers(limits=WaiterLimits(server=12, resource=99, connection=99))
    await server.wait(HOLDER, wait_ms=0)
    waiting: list[asyncio.Task[Any]] = []
    for peer, part in (("greedy", 6), ("second", 3), ("third", 2), ("fourth", 1)):
        waiting += [server.wait(lease_id(len(waiting) + 1 + each), peer=peer) for each in range(part)]
        await settle()
        with pytest.raises(TooManyWaitersError) as refused:
            await server.wait(lease_id(99), peer=peer)
        told = (refused.value.scope, refused.value.limit)
        assert told == (("server", 12) if peer == "fourth" else ("peer", part))
    await call_off(*waiting)
    assert server.at_rest()


async def test_a_refused_peer_is_told_how_many_may_wait_now() -> None:
    """Its own count can be greater than the limit, if others came later."""
    (server,) = servers(limits=WaiterLimits(server=12, resource=99, connection=99))
    await server.wait(HOLDER, wait_ms=0)
    waiting = [server.wait(lease_id(number), peer="early") for number in range(1, 7)]
    await settle()
    waiting += [server.wait(lease_id(number), peer="late") for number in range(7, 10)]
    await settle()
    with pytest.raises(TooManyWaitersError) as refused:
        await server.wait(lease_id(99), peer="early")
    assert (refused.value.scope, refused.value.limit) == ("peer", 5)
    await call_off(waiting.pop(0), waiting.pop(0))
    waiting.append(server.wait(lease_id(99), peer="early"))
    await settle()
    assert not waiting[-1].done(), "four waited, and five may"
    await call_off(*waiting)
    assert server.at_rest()


async def test_the_first_callers_keep_their_places_when_too_many_come_at_once() -> None:
    (server,) = servers(limits=WaiterLimits(server=9, resource=3, connection=9))
    await server.acquire(HOLDER)
    crowd = [server.wait(lease_id(number)) for number in range(6)]
    await settle()
    assert [task.done() for task in crowd] == [False] * 3 + [True] * 3
    await call_off(*crowd[:3])
    assert server.at_rest()


async def test_a_repeated_acquire_of_the_holder_does_not_queue_for_itself() -> None:
    here, there = await held(2)
    waiting = here.wait(lease_id(1))
    await asyncio.sleep(1)
    again = await here.wait(HOLDER)
    assert isinstance(again, Lease)
    assert again.token == 1
    assert LoopClock().now_ms() < 1_002
    # The other server has handed the lock over, so this server knows an earlier holder.
    successor = there.wait(lease_id(2))
    await settle()
    await there.release(HOLDER)
    await successor
    began_ms = LoopClock().now_ms()
    again = await here.wait(lease_id(2))
    assert isinstance(again, Lease)
    assert again.token == token_of(successor)
    assert LoopClock().now_ms() - began_ms < 110
    assert not waiting.done()
    await call_off(waiting)


@pytest.mark.parametrize("leaves", [0, 1, 2])
async def test_a_repeated_waiting_acquire_has_the_place_of_the_first_that_is_left(leaves: int) -> None:
    (server,) = await held()
    waiting = []
    for number in range(3):
        waiting.append(server.wait(lease_id(1)))
        other = server.wait(lease_id(10 + number))
        await settle()
        waiting.append(other)
    same = waiting[::2]

    async def place() -> int:
        return (await server.service.get_lock(R, digest=lease_id(1).digest)).queue.position

    assert await place() == 1
    await call_off(same.pop(leaves))
    assert await place() == (2 if leaves == 0 else 1)
    if leaves == 0:
        await call_off(waiting[1])
    await server.release(HOLDER)
    await asyncio.wait(same)
    assert [token_of(task) for task in same] == [2, 2]
    assert await place() == 0
    await call_off(*[task for task in waiting if not task.done()])
    await server.release(lease_id(1))
    assert server.at_rest()


async def test_a_release_by_a_lease_that_does_not_hold_the_lock_disturbs_nobody() -> None:
    (server,) = await held()
    waiting = server.wait(lease_id(1))
    await settle()
    mints = server.mints()
    assert not await server.release(lease_id(7))
    assert server.mints() == mints
    assert await server.release(HOLDER)
    assert not await server.release(HOLDER)
    await waiting
    assert server.mints() == mints + 1
