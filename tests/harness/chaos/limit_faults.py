"""Faults of limits and clocks: no more clients, memory or file descriptors, a node's clock that is set, a server's that stops or is slow."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random
from urllib.parse import urlsplit

import hiredis

from harness.chaos.fault_injection import (
    STORAGE,
    FaultInjection,
    FaultInjector,
    every_server,
    network_of,
    node_of,
    server_of,
    until_seen_by_all,
)
from harness.chaos.recorder import now_s
from harness.chaos.services import ServerProcess
from harness.processes.ports import HOST
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import new_lease_id, until

_STANDARD_FILES = 3
_STEP_MS = 30_000.0
_ANSWER_S = 5.0
_CLIENTS_DEFAULT = 10_000
# Of the true time; a lease allows for 0.01.
_SLOW_RATIO = 0.015
# For so long at most the servers with a true clock may grant nothing: as long as a connection may take.
_NO_GRANT_S = 1.5
_TRY_S = 0.05
# A fault of before may keep the nodes from voting for so long.
_GRANTS_S = 10.0


class _Console:
    """One connection to a node that stays, so that it can take back a limit which keeps new ones out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._replies = hiredis.Reader()

    async def call(self, *words: str | int) -> object:
        """Send one command and return its reply.

        Raises:
            hiredis.ReplyError: the reply is an error.
        """
        # Its stub says a tuple of one.
        self._writer.write(hiredis.pack_command(words))  # type: ignore[arg-type]
        async with asyncio.timeout(_ANSWER_S):
            while (reply := self._replies.gets()) is False:
                received = await self._reader.read(64 * 1024)
                assert received, "the node has closed the connection"
                self._replies.feed(received)
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply


@asynccontextmanager
async def _console(node: RedisNode) -> AsyncIterator[_Console]:
    reader, writer = await asyncio.open_connection(HOST, node.port)
    try:
        console = _Console(reader, writer)
        await console.call("AUTH", urlsplit(node.url).password or "")
        yield console
    finally:
        writer.close()


def clients_limited(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a node takes no new connection, and those there were are reset."""
    place = random.randrange(len(injector.cluster.nodes))
    node = injector.cluster.nodes[place]
    exits = AsyncExitStack()

    async def begin() -> None:
        console = await exits.enter_async_context(_console(node))
        exits.push_async_callback(console.call, "CONFIG", "SET", "maxclients", _CLIENTS_DEFAULT)
        await console.call("CONFIG", "SET", "maxclients", 1)
        for server in injector.cluster.servers:
            server.proxies[place].reset()

    return FaultInjection(
        "maxclients",
        node_of(place),
        random.uniform(0.5, 4.0),
        begin=begin,
        heal=exits.aclose,
        takes={node_of(place), network_of(place)},
    )


def memory_limited(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a node is out of memory, evicts nothing and refuses whatever would take some."""
    place = random.randrange(len(injector.cluster.nodes))
    node = injector.cluster.nodes[place]

    async def begin() -> None:
        await node.call("CONFIG", "SET", "maxmemory", 1)

    async def heal() -> None:
        await node.call("CONFIG", "SET", "maxmemory", 0)

    return FaultInjection(
        "maxmemory noeviction",
        node_of(place),
        random.uniform(0.5, 4.0),
        begin=begin,
        heal=heal,
        takes={node_of(place)},
    )


def files_limited(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a server may open no more files, and its connections to one node, or to all, are reset."""
    place = random.randrange(len(injector.cluster.servers))
    server = injector.cluster.servers[place]
    count = random.choice((1, len(injector.cluster.nodes)))
    lost = random.sample(range(len(injector.cluster.nodes)), count)
    before: list[tuple[int, tuple[int, int]]] = []

    async def begin() -> None:
        # One that has just been started would die of it.
        await server.until_serving()
        pid = server.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        before.append((pid, (soft, hard)))
        # The limit is on the number that a new file gets: a lost connection leaves a low one, so none but the standard files'
        # may be below it. What is open stays so.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_STANDARD_FILES, hard))
        for node in lost:
            server.proxies[node].reset()

    async def heal() -> None:
        for pid, limits in before:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    return FaultInjection(
        "no more files",
        f"{server_of(place)}, {', '.join(map(node_of, lost))} lost",
        random.uniform(0.5, 4.0),
        begin=begin,
        heal=heal,
        takes={server_of(place), *map(network_of, lost)},
    )


def clock_stepped(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a node's clock is set by half a minute, and back again."""
    place = random.randrange(len(injector.cluster.nodes))
    node = injector.cluster.nodes[place]
    step_ms = random.choice((-_STEP_MS, _STEP_MS))
    stepped: list[float] = []

    async def begin() -> None:
        stepped.append(step_ms)
        await node.step_clock(step_ms)

    async def heal() -> None:
        for each in stepped:
            await node.step_clock(-each)

    return FaultInjection(
        "clock stepped",
        f"{node_of(place)} by {step_ms / 1000:+g} s",
        random.uniform(0.5, 5.0),
        begin=begin,
        heal=heal,
        takes={node_of(place)},
        moves_clocks=True,
    )


def server_clock_wrong(injector: FaultInjector, random: Random) -> FaultInjection:
    """Draw: a server's clock stands still for a moment, or runs slow for some seconds; nothing else is wrong. The other servers go on granting."""
    cluster = injector.cluster
    place = random.randrange(len(cluster.servers))
    server = cluster.servers[place]
    wrong_s = random.choice((random.uniform(0.1, 0.5), random.uniform(2.0, 4.0)))
    loss_s = wrong_s if wrong_s < 1.0 else wrong_s * _SLOW_RATIO
    others = {server_of(each): other for each, other in enumerate(cluster.servers) if each != place}
    grants: list[asyncio.Task[None]] = []

    async def begin() -> None:
        assert server.clock is not None, "this server has the machine's clock"
        await asyncio.gather(*(until_seen_by_all(injector, each) for each in range(len(cluster.nodes))))
        for name, other in others.items():
            await until(partial(other.grants, f"probe/{new_lease_id()}", ttl_ms=100), timeout_s=_GRANTS_S)
            grants.append(asyncio.create_task(_grant(injector, other, name)))
        server.clock.lag(loss_s * 1000, over_ms=wrong_s * 1000)

    async def heal() -> None:
        for task in grants:
            task.cancel()
        await asyncio.gather(*grants, return_exceptions=True)
        assert server.clock is not None
        server.clock.lag(0.0, over_ms=1.0)
        injector.broken += await cluster.set_right()

    return FaultInjection(
        "server clock wrong",
        f"{server_of(place)} {'stands still' if loss_s == wrong_s else 'is slow'} for {wrong_s * 1000:.0f} ms",
        # What the clock shows is compared with the nodes' twice a second.
        wrong_s + random.uniform(1.0, 2.0),
        begin=begin,
        heal=heal,
        # No other fault may keep the others from granting.
        takes={
            *(name(each) for each in range(len(cluster.nodes)) for name in (node_of, network_of)),
            *every_server(injector),
            # To set everything right concerns it as well.
            STORAGE,
        },
    )


async def _grant(injector: FaultInjector, server: ServerProcess, name: str) -> None:
    """Acquire new resources without an end, and note once that nothing was granted for too long."""
    granted_s = now_s()
    while now_s() - granted_s < _NO_GRANT_S:
        if await server.grants(f"probe/{new_lease_id()}", ttl_ms=100):
            granted_s = now_s()
        await asyncio.sleep(_TRY_S)
    injector.broken.append(f"{name}, whose clock is true, granted nothing for {_NO_GRANT_S:g} s")
