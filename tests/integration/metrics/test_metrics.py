"""What a server tells Prometheus and probes, over real nodes, real gRPC and real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import pytest

from harness.load.failures import failure_of
from harness.load.session_caller import SessionCaller
from harness.processes.commands import CommandProcesses, node_flags
from harness.processes.metrics import get, scrape, value
from harness.processes.ports import HOST
from harness.processes.servers import FormedNodes, LockServer, Serve, until
from redfence_proto.v1 import lock_pb2
from redfence_server.api.serving import ListenError
from redfence_server.http2.settings import Transport

NAME = "orders/42"
ANY_PORT = f"{HOST}:0"


@pytest.fixture
async def server(formed_nodes: FormedNodes, serve: Serve) -> LockServer:
    return await serve(await formed_nodes(3), metrics_listen=ANY_PORT)


async def outcomes(server: LockServer) -> Counter[tuple[str, str]]:
    """Return how many requests of LockService ended, by method and outcome."""
    samples = await scrape(server.metrics_port)
    found: Counter[tuple[str, str]] = Counter()
    for (name, labels), count in samples.items():
        facts = dict(labels)
        if name == "redfence_requests_total" and facts["service"] == "LockService":
            found[facts["method"], facts["outcome"]] += int(count)
    return found


async def test_every_answer_is_counted_once_by_method_and_outcome(server: LockServer) -> None:
    """The counts are what the callers were told; no series has the name of a resource."""
    told: Counter[tuple[str, str]] = Counter()
    for _ in range(3):
        lease = (await server.acquire(NAME)).lease
        assert (await server.acquire(NAME)).outcome == lock_pb2.ACQUIRE_OUTCOME_HELD
        await server.release(NAME, lease.lease_id)
        await server.release(NAME, lease.lease_id)
        told.update([("Acquire", "granted"), ("Acquire", "held")])
        told.update([("Release", "released"), ("Release", "not_held")])
    assert (await failure_of(server.acquire(""))).reason == lock_pb2.ERROR_REASON_INVALID_RESOURCE
    told["Acquire", "invalid_resource"] += 1
    async with SessionCaller(server) as session:
        lease = (await session.acquire(NAME)).acquire.lease
        waiting = session.acquire(NAME, wait_ms=60_000)
        await server.until_waiting(NAME)
        assert (await session.cancel_command(session.last_id)).cancel.found
        assert (await waiting).error.reason == lock_pb2.ERROR_REASON_CANCELLED
        await session.renew(NAME, lease.lease_id)
        await session.release(NAME, lease.lease_id)
        await session.renew(NAME, lease.lease_id)
        assert (await session.acquire("")).error.reason == lock_pb2.ERROR_REASON_INVALID_RESOURCE
    told.update(
        (f"Session.{command}", outcome)
        for command, outcome in (
            ("acquire", "granted"),
            ("acquire", "cancelled"),
            ("acquire", "invalid_resource"),
            ("cancel", "found"),
            ("renew", "active"),
            ("renew", "lost"),
            ("release", "released"),
        )
    )
    keep_alive = server.locks.KeepAlive()
    await keep_alive.write(lock_pb2.KeepAliveRequest(resource=NAME, lease_id=lease.lease_id))
    await keep_alive.read()
    told["KeepAlive.renew", "lost"] += 1
    samples = await scrape(server.metrics_port)
    assert value(samples, "redfence_streams_open", method="KeepAlive") == 1
    keep_alive.cancel()

    async def all_ended() -> bool:
        samples = await scrape(server.metrics_port)
        return not value(samples, "redfence_streams_open") and not value(samples, "redfence_peers")

    await until(all_ended)
    found = await outcomes(server)
    del found["GetLock", "ok"]
    assert found == told
    samples = await scrape(server.metrics_port)
    assert value(samples, "redfence_request_duration_seconds_count", method="Acquire") == 7
    waited = value(samples, "redfence_request_duration_seconds_count", method="Session.acquire", waits="yes")
    assert waited == 1
    assert value(samples, "redfence_requests_open") == 0
    assert not [labels for _, labels in samples if NAME in dict(labels).values()]


async def test_a_stream_that_breaks_leaves_no_open_request(server: LockServer) -> None:
    """Its unanswered commands are counted as such."""
    await server.acquire(NAME)
    async with SessionCaller(server) as session:
        waiting = session.acquire(NAME, wait_ms=60_000)
        await server.until_waiting(NAME)
        samples = await scrape(server.metrics_port)
        assert value(samples, "redfence_requests_open", method="Session.acquire") == 1
        assert value(samples, "redfence_waiters") == 1
    waiting.cancel()
    found: Counter[tuple[str, str]] = Counter()

    async def counted() -> bool:
        nonlocal found
        found = await outcomes(server)
        return found["Session.acquire", "unanswered"] == 1

    await until(counted)
    samples = await scrape(server.metrics_port)
    assert value(samples, "redfence_requests_open") == value(samples, "redfence_waiters") == 0


async def test_connections_without_a_call_are_counted_where_the_transport_shows_them(
    formed_nodes: FormedNodes, serve: Serve, transport: Transport
) -> None:
    """No value is better than a 0 beside open connections."""
    limits: dict[str, Any] = {"connections_max": 100, "buffered_bytes_max": 5_000_000}
    server = await serve(await formed_nodes(3), **limits, metrics_listen=ANY_PORT)
    async with asyncio.TaskGroup() as group:
        opening = [group.create_task(asyncio.open_connection(HOST, server.port)) for _ in range(3)]
    writers = [task.result()[1] for task in opening]

    async def counted(count: int) -> bool:
        return value(await scrape(server.metrics_port), "redfence_connections") == count

    shown = {name for name, _ in await scrape(server.metrics_port)}
    if transport is Transport.FAST:
        await until(partial(counted, 3))
        samples = await scrape(server.metrics_port)
        assert {name: value(samples, f"redfence_{name}") for name in limits} == limits
        assert value(samples, "redfence_buffered_bytes") == 0
        assert value(await scrape(server.metrics_port), "redfence_peers") == 0
    else:
        assert not [name for name in shown if name.startswith(("redfence_connections", "redfence_buffered"))]
    for writer in writers:
        writer.close()
    await until(partial(counted, 0))


async def test_a_handover_is_counted(server: LockServer) -> None:
    async with SessionCaller(server) as session:
        lease = (await session.acquire(NAME)).acquire.lease
        waiting = session.acquire(NAME, wait_ms=60_000)
        await server.until_waiting(NAME)
        await session.release(NAME, lease.lease_id)
        assert (await waiting).acquire.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
        assert value(await scrape(server.metrics_port), "redfence_handovers_total") == 1


@pytest.mark.slow
async def test_readiness_and_the_metrics_follow_the_quorum(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Liveness does not: a restart of the server would not bring a node back."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes, metrics_listen=ANY_PORT)
    port = server.metrics_port
    assert await get(port, "/readyz") == (200, "ready\n")
    nodes[0].kill()
    await server.until_states(lock_pb2.NODE_STATE_UNREACHABLE, *[lock_pb2.NODE_STATE_READY] * 2)
    samples = await scrape(port)
    assert value(samples, "redfence_nodes_voting") == value(samples, "redfence_quorum_size") == 2
    assert value(samples, "redfence_node_state", node="0", state="unreachable") == 1
    assert value(samples, "redfence_node_state", node="0", state="ready") == 0
    assert await get(port, "/readyz") == (200, "ready\n")
    nodes[1].kill()

    async def not_ready() -> bool:
        return (await get(port, "/readyz"))[0] == 503

    await until(not_ready)
    await failure_of(server.acquire(NAME))

    async def failures_counted() -> bool:
        samples = await scrape(port)
        return (
            value(samples, "redfence_ready") == 0
            and value(samples, "redfence_node_commands_failed_total", node="1") > 0
            and value(samples, "redfence_requests_total", outcome="quorum_unavailable") == 1
        )

    await until(failures_counted)
    assert (await get(port, "/livez"))[0] == 200


async def send(port: int, data: bytes) -> bytes:
    """Return all that the server answers to these bytes."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics?a=b HTTP/1.1\r\nHost: a\r\n\r\n", b"200"),
        (b"HEAD /livez HTTP/1.0\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n", b"405"),
        (b"\x00\xff\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"431"),
    ],
    ids=["query", "head", "unknown page", "post", "no HTTP", "too long"],
)
async def test_every_request_gets_one_answer(server: LockServer, request_bytes: bytes, status: bytes) -> None:
    answer = await send(server.metrics_port, request_bytes)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.slow
async def test_silent_scrapers_lock_nobody_out(server: LockServer) -> None:
    """Two hundred connections that say nothing get 5 s each; locks are granted meanwhile."""
    silent = [await asyncio.open_connection(HOST, server.metrics_port) for _ in range(200)]
    for number in range(20):
        lease = (await server.acquire(f"{NAME}/{number}")).lease
        assert lease.fencing_token

    async def served() -> bool:
        try:
            return (await get(server.metrics_port, "/livez"))[0] == 200
        except OSError:
            return False

    await until(served, timeout_s=20)
    for reader, writer in silent:
        await until(_at_end(reader), timeout_s=20)
        writer.close()


def _at_end(reader: asyncio.StreamReader) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        try:
            return await reader.read() == b""
        except ConnectionResetError:
            return True

    return look


@pytest.mark.slow
async def test_level_debug_logs_each_request_without_a_secret(
    commands: CommandProcesses, formed_nodes: FormedNodes
) -> None:
    """One event names the method, the resource, the outcome, the token, the duration and the peer."""
    flags = ("--listen", f"{HOST}:0", "--log-level", "debug", "--log-format", "json")
    process = commands.start_redfence("serve", *node_flags(await formed_nodes(3)), *flags)
    port = (await process.wait_for_line(r"^redfence serving on \S+:(\d+)", timeout_s=20))[1]
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        server = LockServer(channel)
        lease = (await server.acquire(NAME)).lease
        async with SessionCaller(server) as session:
            await session.release(NAME, lease.lease_id)
    assert await process.stop() == 0
    events = [json.loads(line) for line in process.stderr.splitlines()]
    acquired, released = (each for each in events if each["event"] == "request")
    assert acquired["method"] == "Acquire"
    assert acquired["outcome"] == "granted"
    assert acquired["resource"] == released["resource"] == NAME
    assert acquired["token"] == lease.fencing_token
    assert acquired["duration_ms"] > 0
    assert acquired["peer"].startswith("ipv4:127.0.0.1:")
    assert (released["method"], released["outcome"]) == ("Session.release", "released")
    assert [each["method"] for each in events if each["event"] == "stream_ended"] == ["Session"]
    assert lease.lease_id not in process.stderr


async def test_a_wrong_metrics_address_names_the_setting(
    server: LockServer, formed_nodes: FormedNodes, serve: Serve
) -> None:
    nodes, taken = await formed_nodes(1), f"{HOST}:{server.metrics_port}"
    with pytest.raises(ListenError, match=f"metrics_listen: cannot listen on {taken}: "):
        await serve(nodes, metrics_listen=taken)
    with pytest.raises(ListenError, match="metrics_listen: '9' is not HOST:PORT"):
        await serve(nodes, metrics_listen="9")
