"""Health: readiness means that a quorum would grant now, liveness that the process answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from harness.load.failures import failure_of
from harness.processes.access_list import restricted
from harness.processes.fixture_types import FlushedNodes, FreshNodes
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import FormedNodes, LockServer, Serve, form, new_lease_id, serving, until
from redfence_proto.v1 import lock_pb2
from redfence_server import composition

NAME = "orders/42"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READINESS = ("", "redfence.v1.LockService", "redfence.v1.AdminService")
HEARTBEAT_MS = 100


async def healths(server: LockServer) -> list[int]:
    """Return the health of each name: the readiness, three times, and the liveness."""
    stub = health_pb2_grpc.HealthStub(server.channel)
    names = (*READINESS, "redfence.liveness")
    answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
    return [answer.status for answer in answers]


async def set_all(nodes: Sequence[RedisNode], name: str, value: str) -> None:
    for node in nodes:
        await node.call("CONFIG", "SET", name, value)


async def log_sizes(nodes: Sequence[RedisNode]) -> list[str]:
    """Return the sizes of the append-only files."""
    infos = [str(await node.call("INFO", "persistence")) for node in nodes]
    return [info.partition("aof_current_size:")[2].partition("\\r")[0] for info in infos]


@pytest.mark.parametrize(("setting", "told"), [("maxmemory", "OOM"), ("min-replicas-to-write", "NOREPLICAS")])
async def test_a_quorum_that_refuses_to_grant_is_not_ready_until_it_would_grant_again(
    setting: str, told: str, fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The server notices both without any call, an open watch goes on, and the nodes write nothing."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes, heartbeat_interval_ms=HEARTBEAT_MS)
    watching = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
    living = health_pb2_grpc.HealthStub(server.channel).Watch(
        health_pb2.HealthCheckRequest(service="redfence.liveness")
    )
    assert (await living.read()).status == SERVING
    assert (await watching.read()).status == SERVING
    assert await healths(server) == [SERVING] * 4
    lease = (await server.acquire(NAME)).lease
    await server.until_carried_out()
    written = await log_sizes(nodes)
    assert all(int(size) for size in written)
    await set_all(nodes[:2], setting, "1")
    assert (await watching.read()).status == NOT_SERVING
    assert await healths(server) == [NOT_SERVING] * 3 + [SERVING]
    status = (await server.status()).nodes
    assert [node.grant_refusal.partition(" ")[0] for node in status] == [told, told, ""]
    assert [node.state for node in status] == [lock_pb2.NODE_STATE_READY] * 3
    assert all(node.grant_refusal in node.detail for node in status)
    assert await log_sizes(nodes) == written
    assert (await failure_of(server.acquire("orders/43"))).reason == lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE
    await set_all(nodes[:2], setting, "0")
    assert (await watching.read()).status == SERVING
    assert await healths(server) == [SERVING] * 4
    assert (await server.release(NAME, lease.lease_id)) == lock_pb2.RELEASE_OUTCOME_RELEASED
    watching.cancel()
    living.cancel()


async def test_a_server_is_not_ready_once_its_user_may_no_longer_write(fresh_nodes: FreshNodes) -> None:
    nodes = await fresh_nodes(1)
    async with restricted(nodes) as urls:
        await form(urls)
        async with serving(urls, heartbeat_interval_ms=HEARTBEAT_MS) as server:
            for right in ("set", "mget", "hmget"):
                await nodes[0].call("ACL", "SETUSER", "redfence", f"-{right}")
                await until(lambda: _is(server, NOT_SERVING))
                (node,) = (await server.status()).nodes
                assert node.detail.startswith("it would not grant now: ")
                assert node.detail.endswith(f"({right.upper()})")
                await nodes[0].call("ACL", "SETUSER", "redfence", f"+{right}")
                await until(lambda: _is(server, SERVING))


async def _is(server: LockServer, status: int) -> bool:
    return (await healths(server))[0] == status


async def test_failed_calls_are_logged_once_for_each_fault_of_a_node(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Without any limit, each failed acquire would write a line for each node."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes, heartbeat_interval_ms=HEARTBEAT_MS)
    with capture_logs() as logs:
        await set_all(nodes, "maxmemory", "1")
        await until(lambda: _is(server, NOT_SERVING))
        for number in range(100):
            assert (await failure_of(server.acquire(f"{NAME}/{number}"))).is_retryable
        await set_all(nodes, "maxmemory", "0")
        await until(lambda: _is(server, SERVING))
    counts = Counter(entry["event"] for entry in logs)
    assert counts.pop("counter_life_changed") <= 2, "once when memory is short, once when it is not"
    assert counts == {"node_command_failed": 3, "quorum_lost": 1, "quorum_recovered": 1}


@pytest.mark.slow
async def test_the_port_answers_before_the_cluster_is_formed_and_serves_once_it_is(
    flushed_nodes: FlushedNodes,
) -> None:
    nodes = await flushed_nodes(3)
    async with serving(nodes, until_quorum=False, start_timeout_ms=0) as server:
        starting = asyncio.create_task(server.until_quorum())
        watching = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == NOT_SERVING
        assert await healths(server) == [NOT_SERVING] * 3 + [SERVING]
        for calling in (server.acquire(NAME), server.release(NAME, "a" * 32), server.look(NAME)):
            failure = await failure_of(calling)
            assert (failure.code, failure.reason) == (
                grpc.StatusCode.UNAVAILABLE,
                lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE,
            )
        await server.until_detail(0, "never formed")
        assert not starting.done()
        await form(nodes)
        await starting
        assert (await watching.read()).status == SERVING
        assert (await server.acquire(NAME)).outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
        watching.cancel()


async def test_a_server_over_nodes_with_full_memory_starts_and_is_not_ready(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Renewals and releases work, so it serves; only the readiness says that it grants nothing."""
    nodes = await fresh_formed_nodes(1)
    holding = await serve(nodes)
    lease = (await holding.acquire(NAME)).lease
    await set_all(nodes, "maxmemory", "1")
    server = await serve(nodes, heartbeat_interval_ms=HEARTBEAT_MS)
    assert await healths(server) == [NOT_SERVING] * 3 + [SERVING]
    assert await server.release(NAME, lease.lease_id) == lock_pb2.RELEASE_OUTCOME_RELEASED
    await set_all(nodes, "maxmemory", "0")
    await until(lambda: _is(server, SERVING))


async def test_a_lost_quorum_is_not_ready_until_it_is_back(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes, proxied=True, heartbeat_interval_ms=HEARTBEAT_MS)
    for proxy in server.proxies[1:]:
        proxy.refuse()
    await until(lambda: _is(server, NOT_SERVING))
    for proxy in server.proxies[1:]:
        await proxy.heal()
    await until(lambda: _is(server, SERVING))


@pytest.mark.slow
async def test_nodes_that_answer_too_late_are_never_ready_until_they_are_in_time(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """An admission may take longer than a command, so the server admits and drops such nodes in turn."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(
        nodes, proxied=True, heartbeat_interval_ms=HEARTBEAT_MS, node_timeout_ms=300, dial_timeout_ms=2_000
    )
    watching = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watching.read()).status == SERVING
    for proxy in server.proxies:
        proxy.delay(replies_ms=400)
    assert (await watching.read()).status == NOT_SERVING
    changed = asyncio.create_task(watching.read())
    changes_before = [node.state_changes for node in (await server.status()).nodes]

    async def each_was_admitted_twice() -> bool:
        status = (await server.status()).nodes
        assert not (await _grants(server)), "no acquire is granted"
        return all(
            node.state_changes >= before + 4 for node, before in zip(status, changes_before, strict=True)
        )

    await until(each_was_admitted_twice, timeout_s=60)
    assert not changed.done(), "a quorum that grants nothing was SERVING"
    for proxy in server.proxies:
        proxy.delay()
    assert (await changed).status == SERVING
    assert await _grants(server)
    watching.cancel()


async def _grants(server: LockServer) -> bool:
    """Return whether an acquire of a new resource is granted."""
    try:
        answer = await server.acquire(f"late/{new_lease_id()}")
    except grpc.aio.AioRpcError:
        return False
    return answer.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED


async def test_the_list_of_health_has_every_name(fresh_nodes: FreshNodes) -> None:
    async with serving(await fresh_nodes(1), until_quorum=False) as server:
        answer = await health_pb2_grpc.HealthStub(server.channel).List(health_pb2.HealthListRequest())
    told = {name: status.status for name, status in answer.statuses.items()}
    down = dict.fromkeys(("", *composition.SERVICE_NAMES), NOT_SERVING)
    assert told == down | {composition.LIVENESS_NAME: SERVING}
