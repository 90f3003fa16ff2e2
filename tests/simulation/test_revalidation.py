"""A call that meets nodes to be examined again is made again as a whole; its caller sees no error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from harness.doubles.fake_node import attempt
from harness.simulation.network import Network, NodeHost
from harness.simulation.processes import Chance, ProcessClock, on_processes
from harness.simulation.redis import SimulatedRedis
from harness.simulation.servers import ServerHost
from harness.time.virtual_loop import LoopClock
from redfence_server.locking.attempt import AttemptGranted
from redfence_server.locking.node import (
    REVALIDATION_MS_MAX,
    Held,
    Inspect,
    NodeState,
    NoReply,
    Undo,
)
from redfence_server.locking.quorum import ReleaseVerdict, RenewVerdict, TokenVerdict
from redfence_server.locking.redlock import Order, Redlock, Verdict, begun
from redfence_server.locking.tally import Refusal
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.nodes import connection as node_connection
from redfence_server.nodes import link as node_link
from redfence_server.nodes import replay_queue
from redfence_server.nodes.link import NodeLink

R, A, B = "resource", "a" * 64, "b" * 64
TTL_MS = 60_000
TTL_MS_MAX = 300_000


@dataclass(slots=True)
class Site:
    """A server with two of its three nodes; without the third, both have to answer."""

    server: ServerHost
    hosts: Sequence[NodeHost]
    links: Sequence[NodeLink]
    network: Network
    chance: Chance
    lock: Redlock

    @property
    def left(self) -> Sequence[NodeHost]:
        """The nodes that are there."""
        return self.hosts[1:]

    def void(self) -> None:
        """Give the nodes new admission ids, as a fence that another server raises does."""
        for host in self.left:
            host.redis.state.admission = self.chance.hex_id()

    async def until_examined(self, times: int) -> None:
        """Return when a node has been examined again for the so many-th time since it was given up first."""
        link = self.links[1]
        while link.report().state_changes < 1 + 2 * times or link.report().state is not NodeState.READY:  # noqa: ASYNC110  (on virtual time)
            await asyncio.sleep(0.0005)

    def block(self) -> None:
        """Let nothing arrive at the nodes."""
        for host in self.left:
            self.network.route(self.server, host).blocked = True

    def unblock(self) -> None:
        """Let all of it arrive."""
        for host in self.left:
            self.network.route(self.server, host).unblock()

    def holders(self, resource: str = R) -> list[str]:
        """Return whose the lock is on the nodes that are there, where it is somebody's."""
        states = [host.redis.state for host in self.left]
        return [state.holds[resource].digest for state in states if resource in state.holds]

    async def acquire(self, resource: str = R) -> AttemptGranted:
        """Grant a lock to A."""
        outcome = await attempt(self.lock, Order(resource, A, TTL_MS, "holder"))
        assert isinstance(outcome, AttemptGranted)
        return outcome


def _host(index: int) -> NodeHost:
    clock, name = ProcessClock(offset_ms=1e12), f"node-{index}"
    redis = SimulatedRedis(clock_ms=clock.now_ms, appendfsync="always", name=name)
    return NodeHost(redis, name).form(index, 3, TTL_MS_MAX)


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """Yield a site in which A holds the lock."""
    chance = Chance(1)
    hosts = [_host(index) for index in range(3)]
    network = Network(chance, latency_ms=(1, 2))
    server = ServerHost("server", hosts, network, chance)
    try:
        await server.until_serving()
        assert server.cluster is not None
        links = server.cluster.links
        lock = Redlock(links, clock=server.clock, randomness=chance)
        here = Site(server, hosts, links, network, chance, lock)
        await here.acquire()
        hosts[0].kill()
        await asyncio.sleep(1)
        yield here
    finally:
        await server.end()


async def renewed(here: Site) -> bool:
    """Renew A; tell whether it is held."""
    return (await begun(partial(here.lock.renew, R, A))).verdict.verdict is RenewVerdict.ACTIVE


async def released(here: Site) -> bool:
    """Release A; tell whether it was held, and is not any more."""
    outcome = await begun(partial(here.lock.release, R, A, ttl_ms_max=TTL_MS_MAX))
    return outcome.verdict is ReleaseVerdict.RELEASED and not here.holders()


async def handed_over(here: Site) -> bool:
    """Hand A over to B; tell whether A was held, and is not any more."""
    order = Order(R, B, TTL_MS, "next")
    ended: asyncio.Future[Verdict[ReleaseVerdict]] = asyncio.get_running_loop().create_future()
    handover = here.lock.hand_over(order, release_first=A, ttl_ms_max=TTL_MS_MAX, on_verdict=ended.set_result)
    verdict = (await ended).verdict
    handover.give_up()
    return verdict is ReleaseVerdict.RELEASED and A not in here.holders()


async def seen(here: Site) -> bool:
    """Look; tell whether both nodes show A."""
    return all(isinstance(reply, Held) for reply in (await begun(partial(here.lock.inspect, R))).replies[1:])


async def live(here: Site) -> bool:
    """Tell whether A's token is live."""
    return (await begun(partial(here.lock.check_token, R, 1))).verdict.verdict is TokenVerdict.LIVE


def call_for(resource: str, number: int, here: Site) -> AcquireCall:
    """Make an Acquire that does not wait."""
    lease = LeaseId(f"{number:032x}")
    return AcquireCall(
        resource, lease, TTL_MS, "caller", 0, here.server.clock.now_ms(), answer_within_ms=None
    )


@pytest.mark.parametrize("ask", [renewed, released, handed_over, seen, live], ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("times", [1, 3])
@on_processes
async def test_what_is_refused_is_asked_again_after_the_examination_and_its_answer_is_told(
    ask: Callable[[Site], Awaitable[bool]], times: int
) -> None:
    """Also if the nodes are fenced again and again: a release is not told NOT_HELD by its own repetition."""
    async with site() as here:
        here.void()
        asking = asyncio.ensure_future(ask(here))
        for number in range(1, times):
            await here.until_examined(number)
            here.void()
        assert await asking


@on_processes
async def test_an_examination_that_takes_too_long_is_no_answer() -> None:
    """The wait has a bound, also for a renewal that comes meanwhile; a later question does not wait."""
    async with site() as here:
        here.void()
        began_ms = LoopClock().now_ms()
        first = begun(partial(here.lock.release, R, A, ttl_ms_max=TTL_MS_MAX))
        await asyncio.sleep(0.006)
        here.block()
        await asyncio.sleep(0.3)
        second = begun(partial(here.lock.renew, R, A))
        assert (await first).verdict is ReleaseVerdict.NO_QUORUM
        assert REVALIDATION_MS_MAX <= LoopClock().now_ms() - began_ms <= REVALIDATION_MS_MAX + 100
        assert set((await begun(partial(here.lock.inspect, R))).replies) == {NoReply.UNREACHABLE}
        assert (await second).verdict.verdict is RenewVerdict.AT_RISK
        assert LoopClock().now_ms() - began_ms <= REVALIDATION_MS_MAX + 100
        here.unblock()
        await asyncio.sleep(10)
        assert not here.holders()


@on_processes
async def test_a_mint_that_never_went_to_a_node_pushes_out_no_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It leaves nothing there to undo."""
    monkeypatch.setattr(replay_queue, "_KEPT_MAX", 10)
    async with site() as here:
        assert await released(here)
        assert R in here.hosts[0].redis.state.holds, "it is away, and does not know"
        await here.acquire("held")
        for _ in range(20):
            refused = await attempt(here.lock, Order("held", B, TTL_MS, "another"))
            assert isinstance(refused, Refusal)
        here.hosts[0].start()
        await asyncio.sleep(5)
        assert here.links[0].report().state is NodeState.READY
        assert R not in here.hosts[0].redis.state.holds


@on_processes
async def test_acquires_and_releases_that_meet_an_examination_succeed_and_push_out_no_undo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many callers try again and again meanwhile. A lost undo would block the lock until its ttl ends."""
    monkeypatch.setattr(replay_queue, "_KEPT_MAX", 10)
    async with site() as here:
        failed = await here.acquire("undone")
        for number in range(20):
            await here.acquire(f"held-{number}")
        service = here.server.service
        assert service is not None
        here.void()
        calls = [
            asyncio.ensure_future(service.acquire(call_for(f"resource-{number}", number, here)))
            for number in range(20)
        ]
        ended = [
            begun(partial(here.lock.release, f"held-{number}", A, ttl_ms_max=TTL_MS_MAX))
            for number in range(20)
        ]
        await asyncio.sleep(0.01)
        here.block()
        for link in here.links:
            link.send(Undo("undone", failed.nonce, here.server.clock.now_ms() + TTL_MS))
        await asyncio.sleep(0.4)
        here.unblock()
        assert all(isinstance(each, Lease) for each in await asyncio.gather(*calls))
        assert {(await each).verdict for each in ended} == {ReleaseVerdict.RELEASED}
        await asyncio.sleep(1)
        assert here.holders("undone") == []


@on_processes
async def test_what_finds_no_room_on_a_connection_is_sent_a_little_at_each_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only on the next connection, and not all at once, which would make a late node later still."""
    monkeypatch.setattr(node_connection, "_UNANSWERED_MAX", 20)
    monkeypatch.setattr(node_link, "_REPLAYED_PER_HEARTBEAT", 2)
    async with site() as here:
        failed = await here.acquire("undone")
        changes = [link.report().state_changes for link in here.links]
        link = here.links[1]
        for _ in range(20):
            link.send(Inspect(R))
        for number in range(6):
            link.send(Undo("undone", f"nonce-{number}", here.server.clock.now_ms() + TTL_MS))
        link.send(Undo("undone", failed.nonce, here.server.clock.now_ms() + TTL_MS))
        counts = []
        for _ in range(10_000):
            await asyncio.sleep(0.001)
            counts.append(len(link._commands._replay_queue._commands))
        assert list(dict.fromkeys(counts)) == [7, 5, 3, 1, 0]
        assert "undone" not in here.hosts[1].redis.state.holds
        assert [each.report().state_changes for each in here.links] == changes, "the connection is the same"
