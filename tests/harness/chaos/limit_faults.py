"""Faults of limits and clocks: no more clients, no more memory, no more file descriptors, and a node's clock that is set."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from urllib.parse import urlsplit

import hiredis

from harness.chaos.strike import Stage, Strike, network_of, node_of, server_of
from harness.ports import HOST
from harness.redis_nodes import RedisNode

_STANDARD_FILES = 3
_STEP_MS = 30_000.0
_ANSWER_S = 5.0
_CLIENTS_DEFAULT = 10_000


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


def clients_limited(stage: Stage, random: Random) -> Strike:
    """Draw: a node takes no new connection, and those there were are reset."""
    place = random.randrange(len(stage.cluster.nodes))
    node = stage.cluster.nodes[place]
    exits = AsyncExitStack()

    async def begin() -> None:
        console = await exits.enter_async_context(_console(node))
        exits.push_async_callback(console.call, "CONFIG", "SET", "maxclients", _CLIENTS_DEFAULT)
        await console.call("CONFIG", "SET", "maxclients", 1)
        for server in stage.cluster.servers:
            server.proxies[place].reset()

    return Strike(
        "maxclients",
        node_of(place),
        random.uniform(0.5, 4.0),
        begin=begin,
        heal=exits.aclose,
        takes={node_of(place), network_of(place)},
    )


def memory_limited(stage: Stage, random: Random) -> Strike:
    """Draw: a node is out of memory, evicts nothing and refuses whatever would take some."""
    place = random.randrange(len(stage.cluster.nodes))
    node = stage.cluster.nodes[place]

    async def begin() -> None:
        await node.call("CONFIG", "SET", "maxmemory", 1)

    async def heal() -> None:
        await node.call("CONFIG", "SET", "maxmemory", 0)

    return Strike(
        "maxmemory noeviction",
        node_of(place),
        random.uniform(0.5, 4.0),
        begin=begin,
        heal=heal,
        takes={node_of(place)},
    )


def files_limited(stage: Stage, random: Random) -> Strike:
    """Draw: a server may open no more files, and its connections to one node, or to all, are reset."""
    place = random.randrange(len(stage.cluster.servers))
    server = stage.cluster.servers[place]
    count = random.choice((1, len(stage.cluster.nodes)))
    lost = random.sample(range(len(stage.cluster.nodes)), count)
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

    return Strike(
        "no more files",
        f"{server_of(place)}, {', '.join(map(node_of, lost))} lost",
        random.uniform(0.5, 4.0),
        begin=begin,
        heal=heal,
        takes={server_of(place), *map(network_of, lost)},
    )


def clock_stepped(stage: Stage, random: Random) -> Strike:
    """Draw: a node's clock is set by half a minute, and back again."""
    place = random.randrange(len(stage.cluster.nodes))
    node = stage.cluster.nodes[place]
    step_ms = random.choice((-_STEP_MS, _STEP_MS))
    stepped: list[float] = []

    async def begin() -> None:
        stepped.append(step_ms)
        await node.step_clock(step_ms)

    async def heal() -> None:
        for each in stepped:
            await node.step_clock(-each)

    return Strike(
        "clock stepped",
        f"{node_of(place)} by {step_ms / 1000:+g} s",
        random.uniform(0.5, 5.0),
        begin=begin,
        heal=heal,
        takes={node_of(place)},
        moves_clocks=True,
    )
