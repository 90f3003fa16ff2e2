"""AdminService.WatchLocks: what operators see of the locks of a cluster as they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from harness.http2.raw_client import Answer, RawClient
from harness.load.failures import Failure, failure_of
from harness.processes.metrics import scrape, value
from harness.processes.ports import HOST
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    call_counts,
    until,
    until_idle,
)
from redfence_proto.v1 import lock_pb2
from redfence_server import lock_watch
from redfence_server.api.messages import duration
from redfence_server.http2.wire import framed
from redfence_server.locking.node import Held

NAME = "orders/42"
INTERVAL_MS = 100
# Longer than any test waits.
DELAY_MS = 45_000
Kind = lock_pb2.LockEventKind
Event = tuple[str, str, int]


class Watcher:
    """One watch, with what it has told: (kind, resource, token)."""

    def __init__(self, server: LockServer, prefix: str = "", *, interval_ms: int = INTERVAL_MS) -> None:
        request = lock_pb2.WatchLocksRequest(prefix=prefix, interval=duration(interval_ms))
        self.call: Any = server.admin.WatchLocks(request)
        self.messages: list[lock_pb2.WatchLocksResponse] = []

    @property
    def events(self) -> list[Event]:
        return [
            (Kind.Name(each.kind).removeprefix("LOCK_EVENT_KIND_"), each.resource, each.lease.fencing_token)
            for message in self.messages
            for each in message.events
        ]

    async def until(self, reached: Callable[[], object], *, timeout_s: float = 5.0) -> None:
        """Read until what the watch has told is enough."""
        async with asyncio.timeout(timeout_s):
            while not reached():
                self.messages.append(await self.call.read())

    async def until_told(self, *events: Event) -> None:
        await self.until(lambda: set(events) <= set(self.events))

    async def until_pictures(self, count: int) -> None:
        await self.until(lambda: sum(each.HasField("taken_at") for each in self.messages) >= count)

    async def failure(self) -> Failure:
        """Read to the end, which is an error."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.until(lambda: False)
        return Failure.of_call(caught.value)

    def close(self) -> None:
        self.call.cancel()


def reads_at_most(count: int) -> list[tuple[str, int]]:
    """Return the options of a connection of its own that takes so many bytes of a stream unread."""
    return [
        ("grpc.http2.lookahead_bytes", count),
        # Otherwise gRPC makes room for more and more bytes that nobody reads.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


async def delete(server: LockServer, resource: str, *, nodes: Sequence[int]) -> None:
    """Have some nodes lose a hold; its mint may arrive after the answer to the Acquire."""
    for index in nodes:
        await until(partial(server.nodes[index].call, "DEL", f"redfence:lock:{resource}"))


async def close_on(server: LockServer, resource: str, *, nodes: Sequence[int]) -> None:
    """Have the ttl of a hold end on some nodes, so that only its lock delay is left."""
    for index in nodes:
        await until(partial(server.nodes[index].call, "PEXPIRE", f"redfence:lock:{resource}", DELAY_MS))


async def until_closed(server: LockServer, resource: str) -> None:
    """Return once a quorum of nodes says that a lock delay keeps the lock closed."""

    async def is_closed() -> bool:
        return (await server.look(resource)).current.closed

    await until(is_closed)


async def force(server: LockServer, lease: lock_pb2.Lease) -> None:
    request = lock_pb2.ForceReleaseRequest(resource=lease.resource, fencing_token=lease.fencing_token)
    await server.admin.ForceRelease(request)


@pytest.mark.slow
async def test_a_watch_at_one_server_tells_what_happens_at_another(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Each kind of event once, and never a lease id or a lock with another name."""
    nodes = await formed_nodes(3)
    here, there = await serve(nodes), await serve(nodes)
    before = (await there.acquire("orders/before", holder="early")).lease
    watcher = Watcher(here, "orders/")
    await watcher.until_pictures(1)
    assert watcher.events == [("HELD", "orders/before", before.fencing_token)]
    (held,) = watcher.messages[0].events
    assert held.lease.holder == "early"
    assert 0 < held.lease.remaining.ToMilliseconds() <= 10_000

    names = ("released", "expired", "forced", "lost", "replaced")
    leases = {
        name: (await there.acquire(f"orders/{name}", ttl_ms=1_000 if name == "expired" else 10_000)).lease
        for name in names
    }
    await there.acquire("other")
    tokens = {name: lease.fencing_token for name, lease in leases.items()}
    await watcher.until_told(*(("ACQUIRED", f"orders/{name}", tokens[name]) for name in names))
    successor = asyncio.create_task(there.acquire("orders/replaced", wait_ms=5_000))
    await there.until_waiting("orders/replaced")
    for name in ("released", "replaced"):
        await there.release(f"orders/{name}", leases[name].lease_id)
    await force(there, leases["forced"])
    await delete(there, "orders/lost", nodes=(0, 2))
    new = (await successor).lease
    ends = [
        *(
            (name.upper(), f"orders/{name}", tokens[name])
            for name in ("released", "expired", "forced", "lost")
        ),
        ("RELEASED", "orders/replaced", tokens["replaced"]),
    ]
    await watcher.until_told(*ends, ("ACQUIRED", "orders/replaced", new.fencing_token))
    watcher.close()

    told = watcher.events
    assert len(told) == len(set(told)) == 1 + len(names) + len(ends) + 1
    assert told.index(ends[-1]) < told.index(("ACQUIRED", "orders/replaced", new.fencing_token))
    secrets = [lease.lease_id.encode() for lease in (before, new, *leases.values())]
    assert not any(secret in each.SerializeToString() for each in watcher.messages for secret in secrets)
    assert all(each.HasField("taken_at") for each in watcher.messages)


async def test_a_lease_that_is_renewed_is_not_told_again(server: LockServer) -> None:
    lease = (await server.acquire(NAME, ttl_ms=1_000)).lease
    watcher = Watcher(server)
    stream = server.locks.KeepAlive()
    for picture in range(1, 5):
        await watcher.until_pictures(picture)
        await stream.write(lock_pb2.KeepAliveRequest(resource=NAME, lease_id=lease.lease_id))
        await stream.read()
    assert watcher.events == [("HELD", NAME, lease.fencing_token)]
    stream.cancel()
    watcher.close()


async def test_a_lease_with_a_lock_delay_expires_when_its_ttl_is_over(server: LockServer) -> None:
    """Its lock stays closed, and the watch tells nothing of that, nor of the opening."""
    watcher = Watcher(server)
    await watcher.until_pictures(1)
    granted = await server.acquire(NAME, ttl_ms=300, lock_delay_ms=DELAY_MS)
    token = granted.lease.fencing_token
    await watcher.until_told(("EXPIRED", NAME, token))
    assert (await server.look(NAME)).current.closed
    await server.release(NAME, granted.lease.lease_id)
    again = (await server.acquire(NAME, lock_delay_ms=DELAY_MS)).lease.fencing_token
    await watcher.until_told(("ACQUIRED", NAME, again))
    assert watcher.events == [("ACQUIRED", NAME, token), ("EXPIRED", NAME, token), ("ACQUIRED", NAME, again)]
    watcher.close()


async def test_a_forced_release_is_told_while_the_lock_delay_runs(server: LockServer) -> None:
    lease = (await server.acquire(NAME, lock_delay_ms=DELAY_MS)).lease
    watcher = Watcher(server)
    await watcher.until_pictures(1)
    await force(server, lease)
    await watcher.until_told(("FORCED", NAME, lease.fencing_token))
    assert (await server.look(NAME)).current.closed
    assert watcher.events == [
        ("HELD", NAME, lease.fencing_token),
        ("FORCED", NAME, lease.fencing_token),
    ]
    watcher.close()


async def test_an_event_has_the_time_of_the_lease_without_its_lock_delay(server: LockServer) -> None:
    lease = (await server.acquire(NAME, ttl_ms=10_000, lock_delay_ms=DELAY_MS)).lease
    watcher = Watcher(server)
    await watcher.until_pictures(1)
    await server.release(NAME, lease.lease_id)
    await watcher.until_told(("RELEASED", NAME, lease.fencing_token))
    watcher.close()
    held, released = (event.lease for message in watcher.messages for event in message.events)
    assert 0 < held.remaining.ToMilliseconds() <= 10_000
    assert not released.HasField("remaining")
    assert held.lock_delay.ToMilliseconds() == released.lock_delay.ToMilliseconds() == DELAY_MS


async def test_the_first_picture_shows_no_closed_lock(server: LockServer) -> None:
    await server.acquire("orders/closed", ttl_ms=100, lock_delay_ms=DELAY_MS)
    held = (await server.acquire("orders/held", lock_delay_ms=DELAY_MS)).lease
    await until_closed(server, "orders/closed")
    watcher = Watcher(server)
    await watcher.until_pictures(1)
    assert watcher.events == [("HELD", "orders/held", held.fencing_token)]
    watcher.close()


async def test_a_lease_whose_ttl_ended_has_expired_even_if_its_lock_is_open_again(
    server: LockServer,
) -> None:
    """Its holder opened the lock between two pictures; the lock delay was no time of the lease."""
    lease = (await server.acquire(NAME, ttl_ms=200, lock_delay_ms=DELAY_MS)).lease
    watcher = Watcher(server, interval_ms=500)
    await watcher.until_pictures(1)
    await until_closed(server, NAME)
    await server.release(NAME, lease.lease_id)
    await watcher.until_told(("EXPIRED", NAME, lease.fencing_token))
    watcher.close()


async def test_a_hold_that_is_closed_on_a_node_has_no_part_in_a_quorum(server: LockServer) -> None:
    lease = (await server.acquire(NAME, lock_delay_ms=DELAY_MS)).lease
    watcher = Watcher(server)
    await watcher.until_pictures(1)
    await close_on(server, NAME, nodes=(0,))
    await watcher.until_pictures(2)
    await delete(server, NAME, nodes=(1,))
    await watcher.until_told(("LOST", NAME, lease.fencing_token))
    assert len(watcher.events) == 2
    watcher.close()


async def test_a_lock_that_is_closed_early_was_not_released(server: LockServer) -> None:
    """The watch takes it for an expiry, even if no node remembers that an operator ended the lease."""
    lease = (await server.acquire(NAME, lock_delay_ms=DELAY_MS)).lease
    watcher = Watcher(server, interval_ms=500)
    await watcher.until_pictures(1)
    await close_on(server, NAME, nodes=(0, 1, 2))
    await watcher.until_told(("EXPIRED", NAME, lease.fencing_token))
    watcher.close()


@pytest.mark.slow
async def test_a_release_that_one_node_missed_is_no_loss(server: LockServer) -> None:
    """The node has the hold until the release reaches it; the picture after that decides."""
    lease = (await server.acquire(NAME)).lease
    watcher = Watcher(server, interval_ms=1_000)
    await watcher.until_pictures(1)
    counts = await call_counts(server.nodes, "evalsha")
    await delete(server, NAME, nodes=(0, 1))

    async def looked() -> bool:
        return await call_counts(server.nodes, "evalsha") != counts

    await until(looked)
    await delete(server, NAME, nodes=(2,))
    await watcher.until_told(("RELEASED", NAME, lease.fencing_token))
    assert len(watcher.messages) == 3
    watcher.close()


@pytest.mark.slow
async def test_a_watcher_that_does_not_read_costs_no_pictures_and_misses_no_lock(server: LockServer) -> None:
    """What it is told later adds up to the locks that are held then."""
    # Seven messages; a transport holds fewer for a peer that does not read.
    names = [f"{number:04}{'x' * 250}" for number in range(320)]
    granted = await asyncio.gather(*(server.acquire(name, holder="y" * 256, ttl_ms=60_000) for name in names))
    leases = [each.lease for each in granted]
    channel = grpc.aio.insecure_channel(server.target, options=reads_at_most(16))
    watcher = Watcher(LockServer(channel))
    # The first message comes when the first picture is complete.
    await watcher.until(lambda: watcher.messages, timeout_s=30)
    for lease in leases[:100]:
        await server.release(lease.resource, lease.lease_id)
    again = [(await server.acquire(name, ttl_ms=60_000)).lease for name in names[:50]]
    await server.until_carried_out()
    before = await call_counts(server.nodes, "evalsha")
    # A picture without locks looks at none. The watches of a server take turns.
    other = Watcher(server, "none/")
    await other.until_pictures(3)
    other.close()
    assert await call_counts(server.nodes, "evalsha") == before
    expected = {lease.resource: lease.fencing_token for lease in (*leases[100:], *again)}

    def known() -> dict[str, int]:
        held: dict[str, int] = {}
        for kind, resource, token in watcher.events:
            if kind in {"HELD", "ACQUIRED"}:
                held[resource] = token
            else:
                assert held.pop(resource) == token
        return held

    await watcher.until(lambda: known() == expected, timeout_s=20)
    watcher.close()
    await channel.close()


async def test_a_watcher_that_leaves_without_reading_is_no_defect_of_the_server(
    formed_nodes: FormedNodes, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """With grpcio, the write to it fails. The log shows no error, and the metrics no defect."""
    server = await serve(await formed_nodes(3), heartbeat_interval_ms=60_000, metrics_listen=f"{HOST}:0")
    await server.acquire("n" * 256, holder="h" * 256)
    before = await call_counts(server.nodes, "scan")

    async def asked() -> bool:
        after = await call_counts(server.nodes, "scan")
        return sum(new > old for new, old in zip(after, before, strict=True)) == 2

    async def ended() -> bool:
        return bool(value(await scrape(server.metrics_port), "redfence_streams_total"))

    with capture_logs() as logs:
        async with grpc.aio.insecure_channel(server.target, options=reads_at_most(16)) as channel:
            watcher = Watcher(LockServer(channel), interval_ms=60_000)
            await until(asked)
            # The picture is complete, and the server writes it.
            await until_idle(server.nodes)
            watcher.close()
        await until(ended)
    assert not logs
    samples = await scrape(server.metrics_port)
    assert value(samples, "redfence_streams_total", method="WatchLocks", outcome="cancelled") == 1
    # Not those of asyncio: grpcio has one poller, and may bring it events for the loop of an earlier test.
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in warnings if record.name.startswith("grpc")]


async def test_a_drain_ends_a_watch_and_refuses_new_ones(server: LockServer) -> None:
    watcher = Watcher(server, interval_ms=60_000)
    await watcher.until_pictures(1)
    await server.begin_drain()
    assert (await watcher.failure()).reason == lock_pb2.ERROR_REASON_DRAINING
    late = await Watcher(server).failure()
    assert (late.reason, late.is_retryable) == (lock_pb2.ERROR_REASON_DRAINING, True)


@pytest.mark.slow
async def test_a_watch_outlives_the_loss_of_the_quorum_and_says_that_it_sees_nothing(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    server = await serve(await formed_nodes(3), proxied=True)
    lease = (await server.acquire(NAME, ttl_ms=60_000)).lease
    watcher = Watcher(server)
    await watcher.until_pictures(1)
    for proxy in server.proxies[:2]:
        proxy.refuse()
    await watcher.until(lambda: watcher.messages[-1].HasField("error"))
    blind = watcher.messages[-1]
    assert blind.error.reason == lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE
    assert not blind.events
    assert not blind.HasField("taken_at")
    for proxy in server.proxies[:2]:
        await proxy.heal()
    await watcher.until(lambda: not watcher.messages[-1].HasField("error"), timeout_s=15)
    assert watcher.events == [("HELD", NAME, lease.fencing_token)]
    await server.release(NAME, lease.lease_id)
    await watcher.until_told(("RELEASED", NAME, lease.fencing_token))
    watcher.close()


@pytest.fixture
async def many(server: LockServer) -> AsyncIterator[list[Watcher]]:
    """As many watches as a server process takes from one peer."""
    watchers = [Watcher(server, interval_ms=60_000) for _ in range(lock_watch.WATCHES_MAX // 2)]
    for watcher in watchers:
        await watcher.until_pictures(1)
    yield watchers
    for watcher in watchers:
        watcher.close()


async def test_the_number_of_watches_is_bounded_and_sessions_show_them(
    server: LockServer, many: list[Watcher]
) -> None:
    sessions = (await server.admin.ListSessions(lock_pb2.ListSessionsRequest())).sessions
    assert [each.kind for each in sessions] == [lock_pb2.SESSION_KIND_WATCH] * len(many)
    refused = await Watcher(server).failure()
    assert (refused.code, refused.reason, refused.metadata) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        lock_pb2.ERROR_REASON_WATCH_LIMIT,
        {"limit": str(len(many)), "scope": "peer"},
    )
    many.pop().close()

    async def left() -> bool:
        request = lock_pb2.ListSessionsRequest()
        return len((await server.admin.ListSessions(request)).sessions) == len(many)

    await until(left)
    many.append(Watcher(server))
    await many[-1].until_pictures(1)


async def test_a_peer_with_its_part_of_the_watches_leaves_some_to_another(
    server: LockServer, many: list[Watcher]
) -> None:
    """The other peers get all places but one, which a new peer could not use without a free one."""
    request = framed(lock_pb2.WatchLocksRequest(interval=duration(60_000)).SerializeToString())
    port = int(server.target.rpartition(":")[2])
    assert len(many) == lock_watch.WATCHES_MAX // 2
    async with AsyncExitStack() as connections:

        async def watch(source: str) -> Answer:
            client = await connections.enter_async_context(RawClient(port, source=source))
            stream_id = client.begin("/redfence.v1.AdminService/WatchLocks")
            client.send(stream_id, request, end=True)
            answer = client.answers[stream_id]
            await client.until(lambda: bool(answer.body) or answer.closed)
            return answer

        first, *more = [await watch(f"127.0.0.{number}") for number in range(2, 10)]
        assert first.body
        *others, last = more
        assert all(each.body for each in others)
        assert last.status.startswith("8 15 watches are open at this server process")
    assert (await Watcher(server).failure()).metadata["scope"] == "peer"


async def test_a_prefix_with_too_many_locks_is_refused(
    server: LockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_watch, "LOCKS_MAX", 3)
    watcher = Watcher(server)
    for number in range(4):
        await watcher.until_pictures(1 + number)
        await server.acquire(f"jobs/{number}")
    failure = await watcher.failure()
    assert failure.metadata == {"limit": "3", "scope": "prefix"}
    assert len({resource for _, resource, _ in watcher.events}) <= 3


async def test_a_malformed_watch_is_refused_with_its_field(server: LockServer) -> None:
    for prefix, interval_ms, field in (("{", 100, "prefix"), ("", 99, "interval"), ("", 60_001, "interval")):
        failure = await Watcher(server, prefix, interval_ms=interval_ms).failure()
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.metadata["field"] == field
    raw: Any = server.channel.unary_stream("/redfence.v1.AdminService/WatchLocks")
    malformed = await failure_of(raw(b"\xff\xff").read())
    assert malformed.reason == lock_pb2.ERROR_REASON_MALFORMED_MESSAGE


def test_a_retry_with_another_token_is_told_again() -> None:
    """The lease has not ended; but its token is another one, which ForceRelease needs."""
    first, second = (lock_watch.Seen(Held("digest", token, "", 9), 0.0) for token in (4, 5))
    assert lock_watch.differences({"a": first}, {"a": second}, {}) == [
        lock_watch.LockEvent(lock_watch.LockChange.ACQUIRED, "a", second.lease)
    ]
