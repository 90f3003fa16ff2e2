"""Waiting for a held lock: the product's service over fake nodes, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from harness.doubles.fake_node import FakeNode
from harness.doubles.waiting import keeps_no_waiter
from harness.time.eventually import eventually
from harness.time.virtual_loop import LoopClock, on_virtual_time
from redfence_server.errors import DrainingError, NoQuorumError, TooManyWaitersError, ValidityExhaustedError
from redfence_server.lock_service import LockService, NotGranted
from redfence_server.locking.node import Command, Mint, Release, Undo
from redfence_server.locking.redlock import Redlock
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.randomness import SystemRandomness
from redfence_server.waiting.schedule import HAND_OVERS_MAX
from redfence_server.waiting.waiter_limiter import WaiterLimits

R = "orders/42"
TTL_MS = 10_000
FOREVER_MS = 3_600_000
HOLDER = LeaseId("f" * 32)


def lease_id(number: int) -> LeaseId:
    return LeaseId(f"{number:032x}")


@dataclass(slots=True, eq=False)
class Server:
    """One server with links of its own to the nodes."""

    links: list[FakeNode]
    service: LockService

    def wait(
        self,
        lease: LeaseId,
        *,
        wait_ms: int = FOREVER_MS,
        ttl_ms: int = TTL_MS,
        connection: str = "",
        resource: str = R,
        answer_within_ms: float | None = None,
    ) -> asyncio.Task[Lease | NotGranted]:
        call = AcquireCall(
            *(resource, lease, ttl_ms, f"holder {lease.secret[-2:]}", wait_ms, LoopClock().now_ms()),
            answer_within_ms=answer_within_ms,
            connection=connection,
        )
        return asyncio.ensure_future(self.service.acquire(call))

    async def acquire(self, lease: LeaseId, *, ttl_ms: int = TTL_MS) -> Lease:
        granted = await self.wait(lease, wait_ms=0, ttl_ms=ttl_ms)
        assert isinstance(granted, Lease)
        return granted

    async def release(self, lease: LeaseId) -> bool:
        return await self.service.release(R, lease)

    @property
    def sent(self) -> Sequence[Command]:
        return self.links[0].sent

    def every(self, **settings: bool) -> None:
        """Set these attributes of every link."""
        for link in self.links:
            for name, value in settings.items():
                setattr(link, name, value)

    def deliver(self) -> None:
        """Let everything arrive that is under way."""
        for link in self.links:
            link.settle()

    def mints(self) -> int:
        return sum(isinstance(each, Mint) for each in self.sent)

    async def waiters(self) -> int:
        return (await self.service.get_lock(R)).queue.count

    def at_rest(self) -> bool:
        return keeps_no_waiter(self.service._queues)


def servers(
    count: int = 1,
    *,
    nodes: int = 3,
    clock: LoopClock = LoopClock(),  # noqa: B008  (it has no state)
    limits: WaiterLimits = WaiterLimits(server=2_000, resource=1_500, connection=1_800),  # noqa: B008  (frozen)
) -> list[Server]:
    first = [FakeNode(index, now_ms=clock.now_ms, channel="server 0") for index in range(nodes)]
    wired = [first] + [
        [
            FakeNode(index, now_ms=clock.now_ms, channel=f"server {number}", state=first[index].state)
            for index in range(nodes)
        ]
        for number in range(1, count)
    ]
    randomness = SystemRandomness()
    return [
        Server(
            links,
            LockService(
                Redlock(links, clock=clock, randomness=randomness),
                clock=clock,
                randomness=randomness,
                ttl_ms_max=lambda: 300_000,
                limits=limits,
            ),
        )
        for links in wired
    ]


async def held(count: int = 1) -> list[Server]:
    """Return servers of which the last has granted the lock to HOLDER."""
    group = servers(count)
    await group[-1].acquire(HOLDER)
    return group


async def settle() -> None:
    """Let everything happen that needs no time."""
    await asyncio.sleep(0.001)


async def call_off(*tasks: asyncio.Task[Lease | NotGranted]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await settle()


def token_of(task: asyncio.Task[Lease | NotGranted]) -> int:
    granted = task.result()
    assert isinstance(granted, Lease)
    return granted.token


# --- order


@on_virtual_time
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


@on_virtual_time
async def test_an_acquire_that_does_not_wait_is_tried_once_past_the_queue() -> None:
    (server,) = await held()
    waiting = server.wait(lease_id(1))
    await settle()
    assert isinstance(await server.wait(lease_id(2), wait_ms=0), NotGranted)
    assert await server.waiters() == 1
    await call_off(waiting)
    assert server.at_rest()


@on_virtual_time
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


# --- waking up


@on_virtual_time
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


@on_virtual_time
async def test_a_server_that_does_not_wait_hears_nothing() -> None:
    here, there, elsewhere = servers(3)
    heard: dict[str, int] = {}
    for server, name in ((here, "here"), (there, "there"), (elsewhere, "elsewhere")):
        for link in server.links:
            link.listen(lambda notice, name=name: heard.update({name: heard.get(name, 0) + 1}))  # type: ignore[misc]
    await there.acquire(HOLDER)
    waiting = here.wait(lease_id(1))
    await settle()
    await there.release(HOLDER)
    await waiting
    await here.release(lease_id(1))
    await settle()
    assert heard == {"here": 3}


@on_virtual_time
async def test_without_notices_a_waiter_has_the_lock_when_the_time_of_the_hold_is_up() -> None:
    """A lost notice delays the waiter until the hold expires, and no longer."""
    here, there = servers(2)
    here.every(lose_notices=True)
    await there.acquire(HOLDER)
    waiting = here.wait(lease_id(1))
    await asyncio.sleep(1)
    await there.release(HOLDER)
    await waiting
    assert TTL_MS <= LoopClock().now_ms() <= TTL_MS + 50


@on_virtual_time
async def test_a_renewed_lease_costs_a_waiter_at_most_one_try_in_each_ttl() -> None:
    here, there = await held(2)
    waiting = here.wait(lease_id(1))
    for _ in range(30):
        await asyncio.sleep(TTL_MS / 3 / 1000)
        await there.service.renew(R, HOLDER)
    assert here.mints() <= 1 + 30 / 3 * 1.5
    await call_off(waiting)


@on_virtual_time
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


@on_virtual_time
async def test_a_lock_that_is_released_while_its_waiter_tries_is_not_missed() -> None:
    here, there = await held(2)
    here.every(hold_replies=True)
    waiting = here.wait(lease_id(1))
    await settle()
    await there.release(HOLDER)
    await settle()
    released_ms = LoopClock().now_ms()
    # Each refusal and the notice behind it, node by node: the decision falls with the second refusal.
    here.deliver()
    await waiting
    assert LoopClock().now_ms() == released_ms


@on_virtual_time
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


@pytest.mark.parametrize("in_the_middle_of_a_try", [False, True])
@on_virtual_time
async def test_a_waiter_that_was_told_a_long_time_is_served_when_a_shorter_one_is_up(
    *, in_the_middle_of_a_try: bool
) -> None:
    """The lock was handed over to a lease with a shorter ttl, and its holder died."""
    here, there = servers(2)
    await there.acquire(HOLDER, ttl_ms=300_000)
    successor = there.wait(lease_id(1), ttl_ms=1_000)
    await settle()
    here.every(hold_replies=in_the_middle_of_a_try)
    waiting = here.wait(lease_id(2))
    await settle()
    await there.release(HOLDER)
    await successor
    shorter_ms = LoopClock().now_ms()
    # The server reads the refusals together with the notice behind them.
    here.deliver()
    await waiting
    assert LoopClock().now_ms() - shorter_ms < 1_000 + 50


@on_virtual_time
async def test_one_notice_of_several_has_the_holder_looked_at_soon() -> None:
    """The other notices were lost."""
    here, there = await held(2)
    first, waiting = here.wait(lease_id(1)), here.wait(lease_id(2))
    await settle()
    await there.release(HOLDER)
    await first
    await asyncio.sleep(0.2)
    for link in here.links[1:]:
        link.lose_notices = True
    await there.release(lease_id(1))
    released_ms = LoopClock().now_ms()
    await waiting
    assert LoopClock().now_ms() - released_ms < 150


@on_virtual_time
async def test_a_waiter_behind_a_lease_granted_elsewhere_hears_of_its_end() -> None:
    """The first waiter's mint finds a hold that another server made for the same Acquire."""
    here, there = await held(2)
    first = here.wait(lease_id(1))
    await settle()
    behind = here.wait(lease_id(2))
    await settle()
    here.every(hold_replies=True)
    await there.release(HOLDER)
    await there.acquire(lease_id(1))
    here.deliver()
    await first
    await asyncio.sleep(0.05)
    await there.release(lease_id(1))
    released_ms = LoopClock().now_ms()
    await behind
    assert LoopClock().now_ms() - released_ms < 5


@on_virtual_time
async def test_an_idle_waiter_sends_nothing_to_any_node() -> None:
    (server,) = servers()
    await server.acquire(HOLDER, ttl_ms=300_000)
    waiting = [server.wait(lease_id(number)) for number in range(20)]
    await asyncio.sleep(0.2)
    sent = len(server.sent)
    await asyncio.sleep(299)
    assert len(server.sent) == sent
    await call_off(*waiting)


# --- leaving


@pytest.mark.parametrize(
    "gone_after", ["the release was read", "it was told", "a node answered", "all nodes answered"]
)
@on_virtual_time
async def test_a_handover_to_a_waiter_that_goes_away_goes_to_the_next_one(
    gone_after: str,
) -> None:
    (server,) = await held()
    first, second = server.wait(lease_id(1)), server.wait(lease_id(2))
    await settle()
    server.every(hold_requests=True)
    released = server.service.begin_release(R, HOLDER)
    if gone_after != "the release was read":
        await settle()
    for link in server.links[: {"a node answered": 1, "all nodes answered": 3}.get(gone_after, 0)]:
        link.deliver()
        link.answer()
    first.cancel()
    await asyncio.sleep(0)
    server.deliver()
    assert server.service.was_held(await released)
    granted = await second
    assert isinstance(granted, Lease)
    assert first.cancelled()
    assert LoopClock().now_ms() < 100
    await server.release(lease_id(2))
    assert server.at_rest()
    assert not any(link.state.holds for link in server.links)


@on_virtual_time
async def test_a_head_that_goes_away_while_it_tries_leaves_the_try_to_the_next_one() -> None:
    here, there = await held(2)
    first, second = here.wait(lease_id(1)), here.wait(lease_id(2))
    await asyncio.sleep(1)
    here.every(hold_replies=True)
    await there.release(HOLDER)
    for link in here.links:
        link.answer(3)  # the notices; the mints that they caused are applied, and not answered
    await settle()
    here.every(lose_notices=True)
    await call_off(first)
    here.deliver()
    await second
    assert token_of(second) == 3
    assert LoopClock().now_ms() < 1_100
    assert any(isinstance(each, Undo) for each in here.sent)


@pytest.mark.slow
@on_virtual_time
async def test_a_thousand_waiters_called_off_at_random_leave_nothing_behind() -> None:
    chance = random.Random(20_261_121)
    here, there = servers(2)
    tokens: list[int] = []

    async def client(number: int) -> None:
        server = chance.choice((here, there))
        task = server.wait(lease_id(number), ttl_ms=chance.choice((100, 300)))
        done, _ = await asyncio.wait([task], timeout=chance.expovariate(1.0))
        if not done:
            task.cancel()
            await asyncio.wait([task])
            return
        tokens.append(token_of(task))
        await asyncio.sleep(chance.choice((0, 0, 0.003, 0.02)))
        if chance.random() < 0.9:
            await chance.choice((here, there)).release(lease_id(number))

    clients = []
    for number in range(1_000):
        clients.append(asyncio.ensure_future(client(number)))
        await asyncio.sleep(chance.expovariate(500))
    await asyncio.gather(*clients)
    await asyncio.sleep(1)
    assert tokens == sorted(set(tokens))
    assert len(tokens) > 100
    assert here.at_rest()
    assert there.at_rest()
    assert not any(link.state._hold(R, LoopClock().now_ms()) for link in here.links)
    assert len(asyncio.all_tasks()) == 1


# --- taking turns


async def contend(here: Server, there: Server, *, grants: int, callers_each: int) -> list[str]:
    """Let callers at each server lock and release again and again; return which server granted, in order."""
    granted: list[str] = []

    async def caller(server: Server, name: str, first: int) -> None:
        for number in range(first, first + grants):
            lease = lease_id(number)
            await server.wait(lease)
            granted.append(name)
            await asyncio.sleep(0.0005)
            await server.release(lease)

    callers = [
        asyncio.ensure_future(caller(server, name, 10_000 * place))
        for place, (server, name) in enumerate([(here, "here"), (there, "there")] * callers_each, 1)
    ]
    await eventually(lambda: len(granted) >= grants, timeout_s=60, interval_s=0.01)
    for each in callers:
        each.cancel()
    await asyncio.wait(callers)
    return granted[:grants]


@pytest.mark.slow
@pytest.mark.parametrize("callers_each", [2, 3])
@on_virtual_time
async def test_two_servers_take_turns_and_neither_is_starved(callers_each: int) -> None:
    here, there = servers(2)
    granted = await contend(here, there, grants=2_000, callers_each=callers_each)
    assert min(granted.count("here"), granted.count("there")) >= 0.4 * len(granted)
    turns = (
        "".join("h" if name == "here" else "t" for name in granted).replace("ht", "h t").replace("th", "t h")
    )
    # The first grant of a turn is no handover. A hold takes 0.5 ms; a server yields for at most 12 ms.
    assert max(len(turn) for turn in turns.split()) <= 1 + HAND_OVERS_MAX + 12 / 0.5


@pytest.mark.parametrize("repeats", [False, True])
@on_virtual_time
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


@on_virtual_time
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


@on_virtual_time
async def test_rivals_that_split_the_nodes_part_without_any_notice() -> None:
    """Each of three servers holds one node: all undo, and one succeeds soon."""
    rivals = servers(3)
    for server in rivals:
        for link in server.links:
            link.lose_notices = link.hold_requests = True
    waiting = [server.wait(lease_id(number)) for number, server in enumerate(rivals)]
    await settle()
    for number, server in enumerate(rivals):
        server.links[number].deliver()
    for server in rivals:
        server.deliver()
    done, rest = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
    assert len(done) == 1
    assert LoopClock().now_ms() < 200
    await call_off(*rest)


@on_virtual_time
async def test_a_server_that_yields_to_nobody_takes_the_lock_again_soon() -> None:
    here, there = servers(2)
    await here.acquire(HOLDER)
    mine = [here.wait(lease_id(number)) for number in range(40)]
    other = there.wait(lease_id(99))
    await settle()
    await call_off(other)
    holder = HOLDER
    for number, task in enumerate(mine):
        await here.release(holder)
        await task
        holder = lease_id(number)
    assert LoopClock().now_ms() < 100
    await here.release(holder)


# --- circumstances


@pytest.mark.parametrize("wait_ms", [150, FOREVER_MS])
@on_virtual_time
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


@on_virtual_time
async def test_a_grant_that_has_ended_before_its_waiter_hears_of_it_is_undone() -> None:
    class JumpingClock(LoopClock):
        jumped_ms = 0.0

        def now_ms(self) -> float:
            return super().now_ms() + self.jumped_ms

    clock = JumpingClock()
    (server,) = servers(clock=clock)
    await server.acquire(HOLDER)
    waiting = server.wait(lease_id(1), ttl_ms=200)
    await settle()
    server.every(hold_replies=True)
    server.service.begin_release(R, HOLDER)
    await settle()
    server.deliver()
    clock.jumped_ms = 250
    granted = await waiting
    assert isinstance(granted, Lease)
    assert granted.token == 3
    assert granted.validity_ms > clock.now_ms()


@on_virtual_time
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


@on_virtual_time
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
@on_virtual_time
async def test_a_wait_without_a_quorum_fails_once_no_quorum_may_return(
    *, may_return: bool, lasted_ms: float
) -> None:
    """While one may return the wait goes on; at its end the waiter does not report the lock as held."""
    (server,) = await held()
    server.service._quorum_may_return = lambda: may_return
    server.every(unreachable=True)
    with pytest.raises(NoQuorumError):
        await server.wait(lease_id(1), wait_ms=1_000)
    assert lasted_ms - 200 <= LoopClock().now_ms() <= lasted_ms + 10


@on_virtual_time
async def test_a_drain_sends_everybody_away_and_undoes_what_is_under_way_for_nobody() -> None:
    (server,) = await held()
    waiting = [server.wait(lease_id(number)) for number in range(3)]
    await settle()
    server.every(hold_requests=True)
    releasing = asyncio.ensure_future(server.release(HOLDER))
    await settle()
    server.service.drain()
    server.deliver()
    await asyncio.wait(waiting)
    assert await releasing
    assert token_of(waiting[0]) == 2
    assert all(isinstance(task.exception(), DrainingError) for task in waiting[1:])
    assert await server.release(lease_id(0))
    assert server.at_rest()


@on_virtual_time
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


@on_virtual_time
async def test_each_limit_is_told_by_its_name_and_leaving_makes_room() -> None:
    (server,) = servers(limits=WaiterLimits(server=4, resource=3, connection=2))
    await server.acquire(HOLDER)
    waiting = [server.wait(lease_id(1), connection="x"), server.wait(lease_id(2), connection="x")]
    await settle()
    for refused, scope, limit in (
        (server.wait(lease_id(3), connection="x"), "connection", 2),
        (server.wait(lease_id(4), connection="y"), "", 0),
        (server.wait(lease_id(5), connection="z"), "resource", 3),
    ):
        await settle()
        if not scope:
            waiting.append(refused)
            assert not refused.done()
            continue
        error = refused.exception()
        assert isinstance(error, TooManyWaitersError)
        assert (error.scope, error.limit) == (scope, limit)
    free = await server.wait(lease_id(6), resource="free", connection="x")
    assert isinstance(free, Lease)
    waiting.append(server.wait(lease_id(7), resource="free", connection="z"))
    await settle()
    beyond = server.wait(lease_id(8), resource="free", connection="w")
    await settle()
    error = beyond.exception()
    assert isinstance(error, TooManyWaitersError)
    assert (error.scope, error.limit) == ("server", 4)
    await call_off(waiting.pop(0))
    waiting.append(server.wait(lease_id(3), connection="x"))
    await settle()
    assert not waiting[-1].done()
    await call_off(*waiting)
    assert server.at_rest()


@on_virtual_time
async def test_the_first_callers_keep_their_places_when_too_many_come_at_once() -> None:
    (server,) = servers(limits=WaiterLimits(server=9, resource=3, connection=9))
    await server.acquire(HOLDER)
    crowd = [server.wait(lease_id(number)) for number in range(6)]
    await settle()
    assert [task.done() for task in crowd] == [False] * 3 + [True] * 3
    await call_off(*crowd[:3])
    assert server.at_rest()


@on_virtual_time
async def test_a_repeated_acquire_of_the_holder_does_not_queue_for_itself() -> None:
    here, there = await held(2)
    waiting = here.wait(lease_id(1))
    await asyncio.sleep(1)
    again = await here.wait(HOLDER)
    assert isinstance(again, Lease)
    assert again.token == 1
    assert LoopClock().now_ms() < 1_002
    # What this server knows of the holder is out of date: the lock was handed over at the other one.
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
@on_virtual_time
async def test_a_repeated_waiting_acquire_has_the_place_of_the_first_that_is_left(
    leaves: int,
) -> None:
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


@on_virtual_time
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


@on_virtual_time
async def test_a_caller_that_came_during_a_grant_hears_of_its_release_elsewhere() -> None:
    here, there = servers(2)
    here.every(hold_replies=True)
    first = here.wait(lease_id(1))
    await settle()
    second = here.wait(lease_id(2))
    await settle()
    here.deliver()
    await first
    await settle()
    released_ms = LoopClock().now_ms()
    await there.release(lease_id(1))
    await second
    assert LoopClock().now_ms() == released_ms
