"""Two processes at one node index, each seen by another server: each rule of the fence is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from harness.doubles.fake_node import attempt
from harness.simulation.history import Grant, History, letters
from harness.simulation.mutants import DIRECTED, MUTANTS
from harness.simulation.network import Network, NodeHost
from harness.simulation.processes import Chance, ProcessClock, ProcessLoop, now_ms
from harness.simulation.redis import SimulatedRedis
from harness.simulation.servers import ServerHost
from harness.simulation.world import Rules
from redfence_server.locking.attempt import AttemptGranted
from redfence_server.locking.node import NodeState
from redfence_server.locking.quorum import RenewVerdict, TokenVerdict
from redfence_server.locking.redlock import Order, Redlock, begun
from redfence_server.membership.examination import Phase

R = "resource"
TTL_MS = 1_000


@dataclass(slots=True)
class Site:
    """Two servers, three nodes, and what the callers of the servers were told.

    Attributes:
        first: reaches the old process and one other node.
        second: reaches the newcomer, once there is one.
        grants: the last one of each lease.
    """

    rules: Rules
    chance: Chance
    ttl_ms: int = TTL_MS
    clocks: Sequence[ProcessClock] = ()
    hosts: list[NodeHost] = field(default_factory=list)
    servers: list[ServerHost] = field(default_factory=list)
    history: History = field(default_factory=History)
    grants: dict[str, Grant] = field(default_factory=dict)

    async def begin(self) -> None:
        """Start everything."""
        self.network = Network(self.chance, latency_ms=(1, 2))
        self.clocks = [ProcessClock(offset_ms=1e12) for _ in range(3)]
        for index in range(3):
            self.hosts.append(self.new_process(index, f"node-{index}").form(index, 3, self.ttl_ms))
        self.servers += [self.new_server(f"server-{number}") for number in range(2)]
        for server in self.servers:
            await server.until_serving()
            await self.until_ready(server, 3)

    network: Network = field(init=False)

    @property
    def first(self) -> ServerHost:
        return self.servers[0]

    @property
    def second(self) -> ServerHost:
        return self.servers[1]

    def new_server(self, name: str) -> ServerHost:
        """Start another server."""
        return ServerHost(name, self.hosts, self.network, self.chance)

    def new_process(self, index: int, name: str) -> NodeHost:
        """Return an empty process."""
        clock_ms = self.clocks[index].now_ms
        redis = SimulatedRedis(clock_ms=clock_ms, appendfsync="always", name=name)
        redis.state = self.rules.node()
        redis.state.wipe()
        return NodeHost(redis, name)

    def copy_of(self, index: int) -> NodeHost:
        """Return a process that has started with the data of a node."""
        copy = self.new_process(index, "copy")
        copy.redis.restart(self.hosts[index].redis.state)
        return copy

    def lead_away(self, server: ServerHost, newcomer: NodeHost, index: int = 0) -> None:
        """Let an index lead a server to another process."""
        server.routed[index] = newcomer
        self.hosts[index].disconnect(server.process, "the address leads elsewhere")

    def cut(self, server: ServerHost, index: int) -> None:
        """Let nothing pass between a server and a node any more."""
        host = server.routed.get(index, self.hosts[index])
        self.network.block(server, host)
        host.disconnect(server.process, "cut off")

    async def until_ready(self, server: ServerHost, count: int, *, within_s: float = 30.0) -> None:
        """Return when so many nodes vote for a server."""
        assert server.cluster is not None
        links = server.cluster.links
        async with asyncio.timeout(within_s):
            await until(lambda: sum(link.report().state is NodeState.READY for link in links) >= count)

    def _lock(self, server: ServerHost) -> Redlock:
        assert server.cluster is not None
        return Redlock(server.cluster.links, clock=server.clock, randomness=self.chance)

    async def acquire(self, server: ServerHost, lease: str) -> bool:
        """Try to grant a lease."""
        began_ms = now_ms()
        told = await attempt(self._lock(server), Order(R, lease * 64, self.ttl_ms, "holder"))
        if not isinstance(told, AttemptGranted):
            return False
        self.history.minted(R, lease, told.token)
        grant = Grant(R, lease, told.token, began_ms, now_ms(), began_ms + self.ttl_ms * 0.99 - 2)
        self.history.granted(grant)
        self.grants[lease] = grant
        return True

    async def keep(self, server: ServerHost, lease: str) -> None:
        """Renew a lease again and again."""
        while True:
            began_ms = now_ms()
            renewed = (await begun(partial(self._lock(server).renew, R, lease * 64))).verdict
            if renewed.verdict is RenewVerdict.ACTIVE:
                self.history.renewed(self.grants[lease], began_ms + self.ttl_ms * 0.99 - 2)
            await asyncio.sleep(0.05)

    async def check(self, server: ServerHost, token: int) -> None:
        """Ask whether a token is live: a superseded one never is."""
        told = await begun(partial(self._lock(server).check_token, R, token))
        greatest = max(grant.token for grant in self.history.grants[R])
        if told.verdict.verdict is TokenVerdict.LIVE and token < greatest:
            self.history.problem(f"S: token {token} is live after {greatest}")

    async def release(self, server: ServerHost, lease: str) -> None:
        """End a lease."""
        if lease in self.grants:
            self.grants[lease].until_ms = min(self.grants[lease].until_ms, now_ms())
        await begun(partial(self._lock(server).release, R, lease * 64, ttl_ms_max=TTL_MS))

    async def insist(self, server: ServerHost, lease: str, *, for_s: float) -> bool:
        """Try again and again to grant a lease; tell whether it was granted."""
        end_ms = now_ms() + for_s * 1000
        while now_ms() < end_ms:
            if await self.acquire(server, lease):
                return True
            await asyncio.sleep(0.003)
        return False


async def until(condition: Callable[[], object]) -> None:
    """Return when it is so."""
    while not condition():  # noqa: ASYNC110  (on virtual time)
        await asyncio.sleep(0.0001)


async def _newcomer(site: Site, kept: int) -> None:
    lost = 3 - kept
    site.cut(site.first, lost)
    assert await site.acquire(site.first, "a")
    keeping = asyncio.create_task(site.keep(site.first, "a"))
    site.lead_away(site.second, site.new_process(0, "newcomer"))
    assert await site.insist(site.second, "b", for_s=10)
    keeping.cancel()


async def an_empty_newcomer_while_a_holder_renews_through_the_old_process(site: Site) -> None:
    """The first server is left with the old process and node 1."""
    await _newcomer(site, kept=1)


async def the_same_with_the_last_node(site: Site) -> None:
    """The first server is left with the old process and node 2."""
    await _newcomer(site, kept=2)


async def a_copy_that_shows_proof(site: Site) -> None:
    """The second server grants through the copy, and then the first one tries through the old process."""
    site.cut(site.first, 2)
    assert await site.acquire(site.first, "a")
    await site.release(site.first, "a")
    site.lead_away(site.second, site.copy_of(0))
    await asyncio.sleep(0.1)
    await site.until_ready(site.second, 3)
    site.cut(site.second, 1)
    assert await site.insist(site.second, "b", for_s=10)
    await site.release(site.second, "b")
    await asyncio.sleep(0.1)
    await site.insist(site.first, "c", for_s=2)


async def a_question_that_meets_the_fence(site: Site) -> None:
    """Node 1 refuses, is unreachable until another lease is granted, and then shows the old hold."""
    site.cut(site.first, 2)
    site.cut(site.second, 2)
    assert await site.acquire(site.first, "a")
    site.network.unblock(site.second, site.hosts[2])
    await site.until_ready(site.second, 3)
    await asyncio.sleep(1.1)  # a connection that has lasted so long is made again at once
    assert await site.insist(site.first, "a", for_s=1)
    keeping = [asyncio.create_task(site.keep(server, "a")) for server in site.servers]
    site.lead_away(site.second, site.new_process(0, "newcomer"))
    fenced = site.hosts[1].redis.state
    await until(lambda: fenced.known_floors)
    keeping.pop(0).cancel()
    asking = asyncio.create_task(site.check(site.first, site.grants["a"].token))
    await asyncio.sleep(0.0085)  # the first server has connected to node 1 again, and asks what it is
    site.network.block(site.first, site.hosts[1])
    assert await site.insist(site.second, "b", for_s=0.5)
    site.network.unblock(site.first, site.hosts[1])
    await asking
    keeping[0].cancel()


async def two_newcomers_fenced_at_one_moment(site: Site) -> None:
    """Each server reaches one of them, and then a node of its own beside it."""
    site.hosts[0].redis.state.wipe()
    site.lead_away(site.second, site.new_process(0, "newcomer"))
    for connection in list(site.hosts[0].connections):
        connection.reset("it was wiped")
    await asyncio.sleep(3 * TTL_MS / 1000)
    site.cut(site.first, 2)
    site.cut(site.second, 1)
    for lease in "abcd":
        server = site.servers[lease in "bd"]
        await site.insist(server, lease, for_s=0.3)
        await site.release(server, lease)


async def an_old_snapshot_with_an_old_counter(site: Site) -> None:
    """Node 2 has missed the grants since, and node 1 is away when the node is back."""
    assert await site.acquire(site.first, "a")
    snapshot = site.hosts[0].redis.state.save()
    for server in site.servers:
        site.cut(server, 2)
    for _ in range(5):
        await site.release(site.first, "a")
        assert await site.acquire(site.first, "a")
    await site.release(site.first, "a")
    for route in site.network.routes.values():
        route.unblock()
    await site.until_ready(site.first, 3)
    site.hosts[0].kill()
    site.hosts[0].redis.restart(snapshot)
    site.hosts[0].start()
    await asyncio.sleep(0.1)
    await site.until_ready(site.first, 3)
    site.cut(site.first, 1)
    assert await site.insist(site.first, "b", for_s=2)


async def a_server_that_starts_after_a_clock_was_set(site: Site) -> None:
    """The hold of node 0 has ended early; the servers that saw why have noted it on the node."""
    for server in site.servers:
        site.cut(server, 2)
    assert await site.acquire(site.first, "a")
    keeping = asyncio.create_task(site.keep(site.first, "a"))
    await asyncio.sleep(1)
    keeping.cancel()
    site.network.unblock(site.second, site.hosts[2])
    await site.until_ready(site.second, 3)
    site.clocks[0].set_by(60_000)
    keeping = asyncio.create_task(site.keep(site.first, "a"))
    async with asyncio.timeout(10):
        await until(lambda: site.hosts[0].redis.state.distrusted_until_ms)
    site.grants["a"].until_ms = now_ms() + TTL_MS / 2
    site.servers.append(site.new_server("third"))
    await site.servers[-1].until_serving()
    site.cut(site.servers[-1], 1)
    await site.insist(site.servers[-1], "b", for_s=0.2)
    keeping.cancel()


async def a_newcomer_that_gets_a_reserved_floor(site: Site) -> None:
    """The old process restarted with proof and reserved a floor; its driver ended before it told a peer."""
    assert await site.acquire(site.first, "z")
    await site.release(site.first, "z")
    old = site.hosts[0]
    site.cut(site.second, 0)
    old.kill()
    old.redis.restart(old.redis.state)
    old.start()
    await until(lambda: old.redis.state.reserved)
    await site.servers.pop(0).end()
    [second] = site.servers
    second.routed[0] = site.new_process(0, "newcomer")
    await site.until_ready(second, 3)
    site.cut(second, 2)
    assert await site.acquire(second, "a")
    keeping = asyncio.create_task(site.keep(second, "a"))
    third = site.new_server("third")
    site.servers.append(third)
    await third.until_serving()
    await site.until_ready(third, 3)
    site.cut(third, 1)
    await site.insist(third, "b", for_s=0.3)
    keeping.cancel()


async def a_superseded_peer(site: Site) -> None:
    """Index 1 has a new process. A copy of node 0 and node 2 know it; a new server has the old address."""
    await site.servers.pop().end()
    [first] = site.servers
    successor = site.new_process(1, "successor")
    site.lead_away(first, successor, 1)
    await asyncio.sleep(2)
    await site.until_ready(first, 3)
    copy = site.copy_of(0)
    site.cut(first, 2)
    last = site.hosts[2]
    last.kill()
    last.redis.appendfsync = "everysec"  # so it restarts without proof, and has forgotten nothing
    last.redis.restart(last.redis.state)
    last.start()
    third = site.new_server("third")
    third.routed[0] = copy
    await asyncio.sleep(0.5)
    await third.end()
    fourth = site.new_server("fourth")
    fourth.routed |= {0: copy, 1: successor}
    site.servers.append(fourth)
    await asyncio.sleep(4)
    site.cut(fourth, 1)
    await _compete(site, first, fourth)


async def a_stranger_at_the_address_of_a_peer(site: Site) -> None:
    """It is a node of another cluster, without a vote, beside a copy of node 0."""
    site.cut(site.first, 1)
    stranger = site.new_process(2, "stranger").form(2, 3, site.ttl_ms, cluster_id="another cluster")
    stranger.redis.state.admission, stranger.redis.state.phase = "e" * 32, Phase.QUARANTINED
    site.lead_away(site.second, stranger, 2)
    await asyncio.sleep(0.2)
    site.lead_away(site.second, site.copy_of(0))
    await asyncio.sleep(3)
    await _compete(site, site.first, site.second)


async def _compete(site: Site, one: ServerHost, other: ServerHost) -> None:
    for _ in range(3):
        for server, lease in ((one, "c"), (other, "d")):
            await site.acquire(server, lease)
        for server, lease in ((one, "c"), (other, "d")):
            await site.release(server, lease)


Scenario = Callable[[Site], Coroutine[Any, Any, None]]
SEEDS = range(5)
# A question is made again for no longer than 0.8 s, and a wait has to end within that time.
SHORT_TTL_MS: dict[Scenario, int] = {a_question_that_meets_the_fence: 200}


def broken(scenario: Scenario, rules: Rules, seed: int) -> set[str]:
    """Return the letters of the promises that a scenario breaks."""

    async def run() -> set[str]:
        site = Site(rules, Chance(seed), SHORT_TTL_MS.get(scenario, TTL_MS))
        await site.begin()
        try:
            await scenario(site)
        finally:
            for server in site.servers:
                await server.end()
        return letters(site.history.problems)

    with ExitStack() as stack:
        for where, what, instead in rules.patches:
            stack.enter_context(patch.object(where, what, instead))
        with asyncio.Runner(loop_factory=ProcessLoop) as runner:
            return runner.run(run())


SHOWN_BY: dict[str, tuple[Scenario, set[str]]] = {
    "wait before fence": (an_empty_newcomer_while_a_holder_renews_through_the_old_process, {"L"}),
    "no wait": (an_empty_newcomer_while_a_holder_renews_through_the_old_process, {"L"}),
    "fence keeps admission ids": (an_empty_newcomer_while_a_holder_renews_through_the_old_process, {"L"}),
    "others not heeded": (an_empty_newcomer_while_a_holder_renews_through_the_old_process, {"L"}),
    "fence asks f nodes": (the_same_with_the_last_node, {"L"}),
    "no fence for a durable restart": (a_copy_that_shows_proof, {"T2"}),
    "fence for anybody": (two_newcomers_fenced_at_one_moment, {"T1", "T2"}),
    "a poll combines answers from before and after": (a_question_that_meets_the_fence, {"S"}),
    "a reserved floor counts as voted": (a_newcomer_that_gets_a_reserved_floor, {"L"}),
    "nodes without a vote not heeded": (a_superseded_peer, {"T1", "T2", "L"}),
    "any node is a peer": (a_stranger_at_the_address_of_a_peer, {"T2", "L"}),
    "mint ignores the floor": (an_old_snapshot_with_an_old_counter, {"T2"}),
    "clocks not watched": (a_server_that_starts_after_a_clock_was_set, {"L"}),
    "votes count before the clock is known": (a_server_that_starts_after_a_clock_was_set, {"L"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", {shown for shown, _ in SHOWN_BY.values()}, ids=lambda each: each.__name__
)
def test_no_promise_is_broken(scenario: Scenario) -> None:
    """Tokens are unique and grow, and leases exclude each other."""
    for seed in SEEDS:
        assert broken(scenario, Rules(), seed) == set()


@pytest.mark.parametrize("mutant", SHOWN_BY)
def test_a_mutant_is_caught(mutant: str) -> None:
    """Each rule is needed: without it the scenario that it is for breaks a promise."""
    scenario, letters = SHOWN_BY[mutant]
    rules = {**MUTANTS, **DIRECTED}[mutant]
    assert any(letters & broken(scenario, rules, seed) for seed in SEEDS)


def test_every_mutant_has_a_scenario() -> None:
    """None is only written down."""
    assert set(DIRECTED) <= set(SHOWN_BY)


@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_power_loss_of_all_nodes_grants_go_on_within_10_s(seed: int) -> None:
    """The time is virtual and counts from the last start; each node proves that it forgot nothing."""

    async def lose_power(site: Site) -> None:
        assert await site.acquire(site.first, "a")
        for host in site.hosts:
            host.kill()
        for host in site.hosts:
            await asyncio.sleep(site.chance.uniform(0.1, 3))
            host.redis.restart(host.redis.state)
            host.start()
        assert await site.insist(site.second, "b", for_s=10)

    assert broken(lose_power, Rules(), seed) == set()


def test_a_server_takes_the_old_process_back_once_the_new_one_is_gone() -> None:
    """It is told of its own fence only after the old process has voted again; it still knows what it did."""

    async def lose_the_copy(site: Site) -> None:
        copy = site.new_process(0, "copy")
        copy.redis.restart(site.hosts[0].redis.state)
        site.lead_away(site.second, copy)
        await until(lambda: site.hosts[1].redis.state.known_floors)
        copy.kill()
        del site.second.routed[0]
        await asyncio.sleep(1)
        for server in site.servers:
            await site.until_ready(server, 3)

    assert broken(lose_the_copy, Rules(), 0) == set()
