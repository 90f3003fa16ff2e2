"""The faults of a simulated cluster: each seed draws some kinds and injects them at random moments."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final

from harness.simulation.processes import Process, now_ms
from redfence_server.membership import fence
from redfence_server.membership.examination import Phase

if TYPE_CHECKING:
    from harness.simulation.network import NodeHost
    from harness.simulation.processes import Chance
    from harness.simulation.world import World

# Between two looks of a server at a node's clock, and what a slow network adds.
_LOOKS_MS: Final = 2_000.0
Profile = Callable[["Chance"], list[str]]
Fault = Callable[["World"], Coroutine[Any, Any, None]]
FAULTS: Final[dict[str, Fault]] = {}


def _fault(strike: Fault) -> Fault:
    FAULTS[strike.__name__.replace("_", " ")] = strike
    return strike


async def _pause(world: World, process: Process, *, longest_ttls: float) -> None:
    process.pause()
    await asyncio.sleep(world.chance.uniform(0.01, longest_ttls * world.ttl_ms_max / 1000))
    process.resume()


@_fault
async def holder_paused(world: World) -> None:
    """SIGSTOP, past its lease."""
    await _pause(world, world.chance.choice(world.holders).process, longest_ttls=3)


@_fault
async def holder_killed(world: World) -> None:
    """Kill -9, with whatever it holds and whatever is under way for it; and a new run some time later."""
    holder = world.chance.choice(world.holders)
    if holder.process.runs:
        holder.kill()
        await asyncio.sleep(world.chance.uniform(0.01, 1.0))
        holder.restart()


@_fault
async def server_paused(world: World) -> None:
    """SIGSTOP."""
    await _pause(world, world.chance.choice(world.servers).process, longest_ttls=3)


@_fault
async def server_killed(world: World) -> None:
    """Kill -9, and a new run some time later."""
    server = world.chance.choice(world.servers)
    if server.process.alive:
        server.kill()
        await asyncio.sleep(world.chance.uniform(0.01, 1.0))
        server.start()


@_fault
async def node_paused(world: World) -> None:
    """SIGSTOP: it takes everything and answers nothing."""
    await _pause(world, world.chance.choice(world.nodes.hosts).process, longest_ttls=2)


async def _restart(world: World, host: NodeHost, *, wiped: bool) -> None:
    host.kill(wiped=wiped)
    await asyncio.sleep(world.chance.uniform(0.001, 0.5))
    world.nodes.start(host)


@_fault
async def node_restarted(world: World) -> None:
    """Kill -9; what it remembers depends on how it writes to disk."""
    host = world.chance.choice(world.nodes.hosts)
    if host.process.alive and (host.redis.appendfsync == "always" or world.nodes.may_forget(host)):
        await _restart(world, host, wiped=False)


@_fault
async def node_wiped(world: World) -> None:
    """It comes back empty; or is emptied while it runs."""
    host = world.chance.choice(world.nodes.hosts)
    if not host.process.alive or not world.nodes.may_forget(host):
        return
    if world.chance.random() < 0.5:
        await _restart(world, host, wiped=True)
    else:
        host.redis.state.wipe()
        world.nodes.lost.add(world.nodes.hosts.index(host))


@_fault
async def connection_reset(world: World) -> None:
    """One connection breaks."""
    connections = [each for host in world.nodes.hosts for each in host.connections]
    if connections:
        world.chance.choice(connections).reset("reset")
    await asyncio.sleep(0)


@_fault
async def partition(world: World) -> None:
    """Cut some servers off from some nodes, both ways or one way; messages under way may still arrive."""
    chance = world.chance
    servers = [each for each in world.servers if chance.random() < 0.6]
    hosts = [each for each in world.nodes.hosts if chance.random() < 0.5]
    ways = chance.choice(("there", "back", "both", "both"))
    routes = [
        world.network.route(*ends)
        for server in servers
        for host in hosts
        for ends in _ends(server, host, ways)
    ]
    for route in routes:
        route.blocked = True
    await asyncio.sleep(chance.uniform(0.05, 2.0))
    if chance.random() < 0.5:
        for host in hosts:
            for connection in list(host.connections):
                connection.reset("cut off")
    for route in routes:
        route.unblock()


def _ends(server: object, host: object, ways: str) -> Iterator[tuple[object, object]]:
    if ways != "back":
        yield server, host
    if ways != "there":
        yield host, server


@_fault
async def slow_network(world: World) -> None:
    """Every message between one server and the nodes takes long."""
    server = world.chance.choice(world.servers)
    routes = [
        world.network.route(*ends) for host in world.nodes.hosts for ends in _ends(server, host, "both")
    ]
    before = [route.latency_ms for route in routes]
    for route in routes:
        route.latency_ms = (1.0, world.chance.choice((20.0, 200.0, 700.0)))
    await asyncio.sleep(world.chance.uniform(0.1, 1.5))
    for route, latency_ms in zip(routes, before, strict=True):
        route.latency_ms = latency_ms


@_fault
async def callers_lose_messages(world: World) -> None:
    """Requests and answers between callers and servers are lost, and requests arrive twice."""
    for holder in world.holders:
        holder.wire.loss, holder.wire.duplicates = 0.1, 0.1
    await asyncio.sleep(world.chance.uniform(0.2, 2.0))
    for holder in world.holders:
        holder.wire.loss = holder.wire.duplicates = 0.0


@_fault
async def clock_set(world: World) -> None:
    """Set a node's clock forward or back. Where no server sees it, only tokens are promised."""
    history = world.history
    place = world.chance.randrange(len(world.nodes.clocks))
    by_ms = world.chance.choice((-30_000.0, -700.0, -50.0, 50.0, 700.0, 30_000.0))
    history.clocks_were_set_back |= by_ms < 0
    history.clocks_set_at_ms.append(now_ms())
    # A new server knows no earlier time. A server sees only the sum of two jumps between two samples.
    if "server killed" in world.kinds or now_ms() - world.clock_set_at_ms.get(place, -math.inf) < _LOOKS_MS:
        history.clocks_missed_at_ms.append(now_ms())
    world.clock_set_at_ms[place] = now_ms()
    world.nodes.clocks[place].set_by(by_ms)
    await asyncio.sleep(0)


@_fault
async def counters_dropped(world: World) -> None:
    """Idle counters are gone before their time."""
    for resource in world.resources:
        world.chance.choice(world.nodes.hosts).redis.state.drop_counter(resource)
    await asyncio.sleep(0)


async def _double(world: World, *, copied: bool) -> None:
    """Let one index lead some servers to another process for a while, and the others to the old one."""
    chance = world.chance
    index = chance.randrange(len(world.nodes.hosts))
    old = world.nodes.hosts[index]
    is_fit = index not in world.nodes.newcomers and old.process.alive and world.nodes.may_forget(old)
    if len(world.servers) < 2 or not is_fit:
        return
    newcomer = world.nodes.begin_double(index, world.struck.total(), copied=copied)
    if copied:
        world.watches.append(asyncio.create_task(_watch_copy(world, newcomer)))
    led_away = chance.sample(world.servers, chance.randint(1, len(world.servers) - 1))
    for server in led_away:
        server.routed[index] = newcomer
        old.disconnect(server.process, "the address leads to another process")
    await asyncio.sleep(chance.uniform(0.05, 4 * world.ttl_ms_max / 1000))
    if index in world.nodes.newcomers:
        world.nodes.end_double(index, world.servers)


async def _watch_copy(world: World, copy: NodeHost) -> None:
    """Excuse what a copy may cost: until the greatest ttl after it has got its vote, or after its end."""
    began_ms, place = now_ms(), len(world.history.copies)
    world.history.copies.append((began_ms, math.inf))
    before = copy.redis.state.admission
    while copy.process.alive and (  # noqa: ASYNC110  (it is on virtual time)
        copy.redis.state.phase is not Phase.READY or copy.redis.state.admission == before
    ):
        await asyncio.sleep(0.01)
    world.history.copies[place] = (began_ms, now_ms() + fence.wait_ms(world.ttl_ms_max) + 10)


@_fault
async def another_process(world: World) -> None:
    """An index leads some servers to an empty process; the old one lives on for the others."""
    await _double(world, copied=False)


@_fault
async def copied_data(world: World) -> None:
    """An index leads some servers to a copy of the old process, which shows proof that it forgot nothing."""
    if all(host.redis.appendfsync == "always" for host in world.nodes.hosts):
        await _double(world, copied=True)


@_fault
async def power_lost(world: World) -> None:
    """Every node dies at once; each remembers everything, and starts when it pleases."""
    hosts = world.nodes.hosts
    if world.nodes.newcomers or not all(h.process.alive and h.redis.appendfsync == "always" for h in hosts):
        return
    for host in hosts:
        host.kill()
    for host in world.chance.sample(hosts, len(hosts)):
        await asyncio.sleep(world.chance.uniform(0.001, 0.3))
        if not host.process.alive:
            world.nodes.start(host)


@_fault
async def server_clock_wrong(world: World) -> None:
    """Stop or slow a server's own clock. It must not tell other servers that nodes' clocks were set."""
    server = world.chance.choice(world.servers)
    rate = world.chance.choice((0.0, 0.985))
    server.clock.go_at(rate)
    await asyncio.sleep(world.chance.uniform(0.1, 1.0) if rate == 0.0 else world.chance.uniform(0.5, 4.0))
    server.clock.go_at(server.clock.usual_rate)
    noted = [host.redis.state.distrusted_until_ms for host in world.nodes.hosts]
    if any(noted) and "clock set" not in world.struck:
        world.history.problem("D: nodes are distrusted for a server's wrong clock")


async def strike(world: World, kinds: list[str]) -> None:
    """Go on striking, several at once at times, until cancelled."""
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(world.chance.expovariate(3.0))
            kind = world.chance.choice(kinds)
            world.history.event("fault", kind)
            world.struck[kind] += 1
            group.create_task(FAULTS[kind](world))


def some(chance: Chance) -> list[str]:
    """Return some kinds."""
    return chance.sample(sorted(FAULTS), chance.randint(1, 5))


def forgetful(chance: Chance) -> list[str]:
    """Return what makes nodes forget what others never knew."""
    return ["node wiped", "node restarted", "partition", "server killed", *some(chance)[:2]]


def timely(chance: Chance) -> list[str]:
    """Return what moves clocks, under the eyes of servers that stay up."""
    others = sorted(FAULTS.keys() - {"clock set", "server killed"})
    return ["clock set", "callers lose messages", *chance.sample(others, chance.randint(0, 3))]


def impatient(chance: Chance) -> list[str]:
    """Return what makes callers try again, and nodes disagree."""
    return [
        "callers lose messages",
        "counters dropped",
        "slow network",
        "connection reset",
        *some(chance)[:2],
    ]


def doubled(chance: Chance) -> list[str]:
    """Return what puts two processes at one index, between servers that hold and grant through either."""
    ours = chance.choice((["another process"], ["copied data"], ["another process", "copied data"]))
    return [*ours, *ours, "callers lose messages", *some(chance)[:2]]


def powerless(chance: Chance) -> list[str]:
    """Return what lets all durable nodes restart, and servers be wrong about the time."""
    return ["power lost", "server clock wrong", "node restarted", *some(chance)[:2]]


PROFILES: Final = (some, forgetful, impatient, timely, doubled, powerless)
DOUBLING: Final = {"another process", "copied data"}
DURABLE: Final = {"copied data", "power lost"}
