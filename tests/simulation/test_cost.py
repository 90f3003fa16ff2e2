"""The cost of a pair of acquire and release, counted and not timed: a change that raises it fails here.

A whole server without its gRPC library runs over simulated nodes. A bound may be raised with a reason; after
an improvement, lower it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Self, cast

import grpc
import pytest

import redfence_proto
import redfence_server
from harness.simulation import network
from harness.simulation.network import Network, NodeHost
from harness.simulation.processes import Chance, ProcessClock, now_ms, on_processes
from harness.simulation.redis import SimulatedRedis
from harness.simulation.servers import ServerHost
from redfence_proto.v1 import lock_pb2
from redfence_server.api.streams import SessionStream
from redfence_server.sharing.shares import ShareLimits, Shares
from redfence_server.sharing.turns import COMMANDS_PER_PART

PAIRS = 10
CALLS_PER_PAIR_MAX = 396
"""Calls that the server's code makes or takes, of Python and built-in functions, with three nodes."""


class Peer:
    """The context of a Session whose peer sends the acquires in one message, and then their releases."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[object] = asyncio.Queue()
        self.results_per_message: list[int] = []

    def peer(self) -> str:
        return "peer"

    async def read(self) -> object:
        return await self.requests.get()

    async def write(self, response: lock_pb2.SessionResponse) -> None:
        self.results_per_message.append(len(response.results))
        releases = lock_pb2.SessionRequest()
        for result in response.results:
            if result.HasField("acquire"):
                assert result.acquire.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
                lease = result.acquire.lease
                command = releases.commands.add(id=result.id + PAIRS)
                command.release.resource, command.release.lease_id = lease.resource, lease.lease_id
            else:
                assert result.release.outcome == lock_pb2.RELEASE_OUTCOME_RELEASED
        self.requests.put_nowait(releases if releases.commands else grpc.aio.EOF)


class GreedyPeer(Peer):
    """The context of a Session that ends when each acquire has its answer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    async def write(self, response: lock_pb2.SessionResponse) -> None:
        self.results_per_message.append(len(response.results))
        if sum(self.results_per_message) == self.count:
            self.requests.put_nowait(grpc.aio.EOF)


def shares_of(server: ServerHost) -> Shares:
    assert server.cluster is not None
    limits = ShareLimits(commands=10_000, connections=0, buffered_bytes=2**30, new_names_per_second=1_000)
    return Shares(limits, has_room=server.cluster.has_room, clock=server.clock)


async def serve_pairs(server: ServerHost, chance: Chance, shares: Shares) -> list[int]:
    """Serve all pairs at the same time; return the results in each message to the peer."""
    peer = Peer()
    await serve_acquires(peer, PAIRS, server, chance, shares)
    return peer.results_per_message


async def serve_acquires(
    peer: Peer, count: int, server: ServerHost, chance: Chance, shares: Shares, *, prefix: str = "orders"
) -> None:
    """Serve a Session whose peer sends so many acquires in its first message."""
    assert server.service is not None
    acquires = lock_pb2.SessionRequest()
    for number in range(1, count + 1):
        acquire = acquires.commands.add(id=number).acquire
        acquire.resource = f"{prefix}/{number}"
        acquire.lease_id = chance.hex_id()
        acquire.ttl.seconds = acquire.wait_timeout.seconds = 30
        acquire.holder = "worker"
    peer.requests.put_nowait(acquires)
    stream = SessionStream(
        cast("grpc.aio.ServicerContext[Any, Any]", peer),
        service=server.service,
        clock=server.clock,
        randomness=chance,
        commands_max=1_000,
        draining=lock_pb2.Draining(),
        shares=shares,
        peer="peer",
    )
    await stream.serve()


class CallCounter:
    """Counts the calls that the product's code makes or takes."""

    _FOLDERS = tuple(str(Path(each.__file__ or "").parent) for each in (redfence_server, redfence_proto))

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event in {"call", "c_call"} and frame.f_code.co_filename.startswith(self._FOLDERS):
            self.calls[frame.f_code.co_qualname] += 1


@on_processes
async def test_a_pair_costs_bounded_calls_and_batches_and_leaves_no_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes: Counter[object] = Counter()
    write = network.Connection.write

    def counted(connection: network.Connection, data: Any) -> None:
        if b"EVALSHA" in data:
            writes[connection] += 1
        write(connection, data)

    monkeypatch.setattr(network.Connection, "write", counted)
    chance = Chance(1)
    hosts = [_host(index) for index in range(3)]
    server = ServerHost("server", hosts, Network(chance, latency_ms=(0.1, 0.1)), chance)
    try:
        await server.until_serving()
        shares = shares_of(server)
        await serve_pairs(server, chance, shares)
        writes.clear()
        gc.collect()
        gc.disable()
        with CallCounter() as counter:
            results = await serve_pairs(server, chance, shares)
        garbage = gc.collect()
    finally:
        gc.enable()
        await server.end()
    assert results == [PAIRS, PAIRS], "results of one turn leave in one message"
    assert list(writes.values()) == [2, 2, 2], "the commands of one message leave in one write to each node"
    assert garbage / PAIRS < 1, "a command makes no reference cycle"
    per_pair = sum(counter.calls.values()) / PAIRS
    assert per_pair < CALLS_PER_PAIR_MAX, counter.calls.most_common(20)


def _host(index: int) -> NodeHost:
    clock, name = ProcessClock(offset_ms=1e12), f"node-{index}"
    redis = SimulatedRedis(clock_ms=clock.now_ms, appendfsync="always", name=name)
    return NodeHost(redis, name).form(index, 3, 60_000)


@on_processes
async def test_too_many_new_names_slow_their_stream_and_no_other_one() -> None:
    """The test runs on virtual time, so the work itself takes no time."""
    chance, count = Chance(1), 50 * COMMANDS_PER_PART
    hosts = [_host(index) for index in range(3)]
    server = ServerHost("server", hosts, Network(chance, latency_ms=(0.1, 0.1)), chance)
    await server.until_serving()
    shares = shares_of(server)
    await serve_pairs(server, chance, shares)
    shares.new_names.per_second = 1
    began_ms = now_ms()
    flood = asyncio.create_task(
        serve_acquires(GreedyPeer(count), count, server, chance, shares, prefix="new")
    )
    for _ in range(10):
        await serve_pairs(server, chance, shares)
    assert not flood.done()
    assert now_ms() - began_ms < 10
    await flood
    assert now_ms() - began_ms > 49 * 2
    await server.end()
