"""What becomes of calls that meet nodes just as these have to be looked at anew, with the product's own links, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from harness.fake_node import FakeNodeState
from harness.joining_commands import Formation
from harness.simulated.network import Network, NodeHost
from harness.simulated.processes import ProcessClock, ProcessLoop
from harness.simulated.redis import SimulatedRedis
from harness.simulated.servers import ServerHost
from harness.virtual_loop import LoopClock
from harness.waiting_links import Chance
from redfence_server import deferred_commands, kept_commands, node_connection, node_link
from redfence_server.lock_node import (
    LOOK_MS_MAX,
    Command,
    Held,
    Inspect,
    NodeState,
    Renew,
    Renewed,
    Reply,
    Silence,
    Undo,
    Vouch,
)
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.node_link import NodeLink
from redfence_server.quorum import Refusal, ReleaseVerdict, RenewVerdict, TokenVerdict
from redfence_server.redlock import AttemptGranted, Order, Redlock

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
        """Let another server give the nodes new admission ids: they have vouched for the one that is to come back."""
        for host in self.left:
            host.redis.state.admission = self.chance.hex_id()

    def vouch(self) -> None:
        """Let this server itself do so."""
        for link in self.links[1:]:
            link.send(Vouch(self.chance.hex_id(), 0, link.report().high + 2**20, 2**32))

    async def until_looked(self, times: int) -> None:
        """Return when a node has been looked at anew for the so many-th time since it was given up first."""
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
        outcome = await self.lock.attempt(Order(resource, A, TTL_MS, "holder"))
        assert isinstance(outcome, AttemptGranted)
        return outcome


def _host(index: int) -> NodeHost:
    clock, name = ProcessClock(offset_ms=1e12), f"node-{index}"
    redis = SimulatedRedis(clock_ms=clock.now_ms, appendfsync="always", name=name)
    redis.state.restore(
        FakeNodeState(
            admission=f"{index + 1:032x}",
            formation=Formation("cluster", index, 3, TTL_MS_MAX),
            run_id=redis.run_id,
            durable=True,
        )
    )
    return NodeHost(redis, name)


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


def on_processes(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on a loop that knows processes."""

    async def run() -> None:
        await test()

    with asyncio.Runner(loop_factory=ProcessLoop) as runner:
        runner.run(run())


async def renewed(here: Site) -> bool:
    """Renew A; tell whether it is held."""
    return (await here.lock.renew(resource=R, digest=A)).verdict is RenewVerdict.ACTIVE


async def released(here: Site) -> bool:
    """Release A; tell whether it was held, and is not any more."""
    outcome = await here.lock.release(resource=R, digest=A, ttl_ms_max=TTL_MS_MAX)
    return outcome.verdict is ReleaseVerdict.RELEASED and not here.holders()


async def handed_over(here: Site) -> bool:
    """Hand A over to B; tell whether A was held, and is not any more."""
    order = Order(R, B, TTL_MS, "next")
    attempt, ended = here.lock.hand_over(order, ends=A, ttl_ms_max=TTL_MS_MAX)
    verdict = (await ended).verdict
    attempt.give_up()
    return verdict is ReleaseVerdict.RELEASED and A not in here.holders()


async def seen(here: Site) -> bool:
    """Look; tell whether both nodes show A."""
    return all(isinstance(reply, Held) for reply in (await here.lock.inspect(R))[1:])


async def live(here: Site) -> bool:
    """Tell whether A's token is live."""
    return (await here.lock.check_token(resource=R, token=1)).verdict.verdict is TokenVerdict.LIVE


def tell_both(here: Site, command: Command) -> list[tuple[Reply, float]]:
    """Send a command to both nodes; return the list in which each answer is told, and when."""
    told: list[tuple[Reply, float]] = []
    for link in here.links[1:]:
        link.send(command, lambda reply: told.append((reply, LoopClock().now_ms())))
    return told


def call_for(resource: str, number: int, here: Site) -> AcquireCall:
    """Make an Acquire that does not wait."""
    lease = LeaseId(f"{number:032x}")
    return AcquireCall(
        resource, lease, TTL_MS, "caller", 0, here.server.clock.now_ms(), answer_within_ms=None
    )


@pytest.mark.parametrize("why", [Site.void, Site.vouch], ids=lambda why: why.__name__)
@pytest.mark.parametrize("ask", [renewed, released, handed_over, seen, live], ids=lambda ask: ask.__name__)
def test_what_is_refused_is_asked_again_after_the_look_and_its_answer_is_told(
    ask: Callable[[Site], Awaitable[bool]], why: Callable[[Site], None]
) -> None:
    """Nobody hears of it: neither that nodes were looked at, nor that a release or renewal found nothing to end or renew."""

    async def test() -> None:
        async with site() as here:
            why(here)
            assert await ask(here)
            assert all(link.report().state is NodeState.READY for link in here.links[1:])

    on_processes(test)


def test_what_is_refused_again_and_again_is_answered_all_the_same() -> None:
    """Two nodes come back at a time, driven by two servers: each vouch makes a new id."""

    async def test() -> None:
        async with site() as here:
            here.void()
            asking = asyncio.ensure_future(released(here))
            for times in (1, 2, 3):
                # What waited for the look is on its way then.
                await here.until_looked(times)
                here.void()
            assert not asking.done()
            assert await asking

    on_processes(test)


def test_a_look_that_takes_too_long_is_no_answer_and_what_ends_a_hold_is_carried_out_later() -> None:
    """The wait has a bound, also for what comes meanwhile."""

    async def test() -> None:
        async with site() as here:
            here.void()
            began_ms = LoopClock().now_ms()
            first = asyncio.ensure_future(here.lock.release(resource=R, digest=A, ttl_ms_max=TTL_MS_MAX))
            await asyncio.sleep(0.006)
            here.block()
            await asyncio.sleep(0.3)
            second = asyncio.ensure_future(here.lock.renew(resource=R, digest=A))
            assert (await first).verdict is ReleaseVerdict.NO_QUORUM
            assert (await second).verdict is RenewVerdict.AT_RISK
            assert LOOK_MS_MAX <= LoopClock().now_ms() - began_ms <= LOOK_MS_MAX + 20
            told = await here.lock.inspect(R)
            assert set(told) == {Silence.UNREACHABLE}, "who comes later does not wait"
            assert LoopClock().now_ms() - began_ms <= LOOK_MS_MAX + 20
            here.unblock()
            await asyncio.sleep(10)
            assert not here.holders()

    on_processes(test)


def test_a_thousand_releases_that_wait_for_a_look_push_out_no_undo() -> None:
    """An undo that is dropped leaves a hold of a failed attempt, which blocks the lock until its ttl ends."""

    async def test() -> None:
        async with site() as here:
            names = [f"resource-{number}" for number in range(1_000)]
            for name in names:
                await here.acquire(name)
            failed = await here.acquire("undone")
            here.void()
            ended = [
                asyncio.ensure_future(here.lock.release(resource=name, digest=A, ttl_ms_max=TTL_MS_MAX))
                for name in names
            ]
            # Until it is connected again, and looks.
            await asyncio.sleep(0.01)
            here.block()
            for link in here.links:
                link.send(Undo("undone", failed.nonce, here.server.clock.now_ms() + TTL_MS))
            await asyncio.sleep(0.4)
            here.unblock()
            verdicts = {(await each).verdict for each in ended}
            assert verdicts == {ReleaseVerdict.RELEASED}
            assert here.holders("undone") == []

    on_processes(test)


def test_an_answer_is_told_once_also_after_it_was_told_that_there_is_none() -> None:
    """Of what waits for a look, and is given up, sent or lost."""

    async def test() -> None:
        for block_s in (0.0, 2.0):
            async with site() as here:
                here.void()
                told = tell_both(here, Renew(R, A))
                await asyncio.sleep(0.006)
                here.block()
                await asyncio.sleep(block_s)
                here.unblock()
                await asyncio.sleep(3)
                assert len(told) == 2

    on_processes(test)


def test_what_is_refused_for_longer_than_a_look_may_take_is_told_so() -> None:
    """However often the nodes are looked at meanwhile."""

    async def test() -> None:
        async with site() as here:
            here.void()
            began_ms = LoopClock().now_ms()
            told = tell_both(here, Renew(R, A))
            while len(told) < 2 and LoopClock().now_ms() < began_ms + 2 * LOOK_MS_MAX:
                here.void()
                await asyncio.sleep(0.002)
            assert {reply for reply, _ in told} == {Silence.NOT_ADMITTED}
            assert max(at_ms for _, at_ms in told) <= began_ms + LOOK_MS_MAX + 20

    on_processes(test)


def test_more_than_may_wait_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That nothing came of it; those who may wait do."""
    monkeypatch.setattr(deferred_commands, "_DEFERRED_MAX", 3)

    async def test() -> None:
        async with site() as here:
            here.void()
            began_ms = LoopClock().now_ms()
            told = [tell_both(here, Renew(R, A)) for _ in range(5)]
            await asyncio.sleep(1)
            firsts = [
                reply
                for each in told
                for reply, at_ms in each
                if reply is Silence.NOT_ADMITTED and at_ms < began_ms + 20
            ]
            assert len(firsts) == 2 * (5 - 3)
            assert sum(isinstance(reply, Renewed) for each in told for reply, _ in each) == 2 * 3

    on_processes(test)


def test_a_node_that_turns_out_to_be_away_is_told_of_at_once() -> None:
    """Nobody waits for the rest of a look that has come to nothing."""

    async def test() -> None:
        async with site() as here:
            here.void()
            began_ms = LoopClock().now_ms()
            told = tell_both(here, Renew(R, A))
            await asyncio.sleep(0.004)
            for host in here.left:
                host.kill()
            await asyncio.sleep(1)
            assert [reply for reply, _ in told] == [Silence.UNREACHABLE] * 2
            assert max(at_ms for _, at_ms in told) <= began_ms + 200

    on_processes(test)


def test_a_server_that_ends_meanwhile_tells_whoever_waits_at_once() -> None:
    """It does not let them wait for the end of the look."""

    async def test() -> None:
        async with site() as here:
            here.void()
            began_ms = LoopClock().now_ms()
            told = tell_both(here, Renew(R, A))
            await asyncio.sleep(0.006)
            here.block()
            assert here.server.cluster is not None
            await here.server.cluster.close()
            await asyncio.sleep(0)
            assert [reply for reply, _ in told] == [Silence.DISCONNECTED] * 2
            assert max(at_ms for _, at_ms in told) <= began_ms + 50

    on_processes(test)


def test_what_came_to_nothing_while_a_node_was_away_pushes_out_nothing_that_it_is_to_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mint that never went to it leaves nothing there to undo."""
    monkeypatch.setattr(kept_commands, "_KEPT_MAX", 10)

    async def test() -> None:
        async with site() as here:
            assert await released(here)
            assert R in here.hosts[0].redis.state.holds, "it is away, and does not know"
            await here.acquire("held")
            for _ in range(20):
                refused = await here.lock.attempt(Order("held", B, TTL_MS, "another"))
                assert isinstance(refused, Refusal)
            here.hosts[0].start()
            await asyncio.sleep(5)
            assert here.links[0].report().state is NodeState.READY
            assert R not in here.hosts[0].redis.state.holds

    on_processes(test)


def test_attempts_that_meet_a_look_push_out_no_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many callers tries again and again meanwhile."""
    monkeypatch.setattr(kept_commands, "_KEPT_MAX", 10)

    async def test() -> None:
        async with site() as here:
            failed = await here.acquire("undone")
            assert here.server.service is not None
            here.void()
            calls = [
                asyncio.ensure_future(
                    here.server.service.acquire(call_for(f"resource-{number}", number, here))
                )
                for number in range(20)
            ]
            await asyncio.sleep(0.01)
            here.block()
            for link in here.links:
                link.send(Undo("undone", failed.nonce, here.server.clock.now_ms() + TTL_MS))
            await asyncio.sleep(0.4)
            here.unblock()
            assert all(isinstance(each, Lease) for each in await asyncio.gather(*calls))
            await asyncio.sleep(1)
            assert here.holders("undone") == []

    on_processes(test)


def test_what_finds_no_room_on_a_connection_is_sent_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not only on the next connection, which may be made next year."""
    monkeypatch.setattr(node_connection, "_UNANSWERED_MAX", 5)

    async def test() -> None:
        async with site() as here:
            failed = await here.acquire("undone")
            for link in here.links[1:]:
                for _ in range(5):
                    link.send(Inspect(R))
                link.send(Undo("undone", failed.nonce, here.server.clock.now_ms() + TTL_MS))
            changes = [link.report().state_changes for link in here.links]
            await asyncio.sleep(5)
            assert here.holders("undone") == []
            assert [link.report().state_changes for link in here.links] == changes, (
                "the connections are the same"
            )

    on_processes(test)


def test_a_node_that_is_late_with_many_commands_is_sent_few_of_them_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once would make it later still."""
    monkeypatch.setattr(node_connection, "_UNANSWERED_MAX", 5)
    monkeypatch.setattr(node_link, "_KEPT_PER_PULSE", 2)

    async def test() -> None:
        async with site() as here:
            link = here.links[1]
            for number in range(5 + 7):
                link.send(Undo("undone", f"nonce-{number}", here.server.clock.now_ms() + TTL_MS))
            counts = []
            for _ in range(5_000):
                await asyncio.sleep(0.001)
                counts.append(len(link._kept._kept))
            assert list(dict.fromkeys(counts)) == [7, 5, 3, 1, 0]

    on_processes(test)
