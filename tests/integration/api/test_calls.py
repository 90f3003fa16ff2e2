"""The lock server over real nodes and real gRPC: what the unary calls promise when nothing breaks."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from harness.load.failures import Failure
from harness.load.session_caller import SessionCaller
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    acquire_request,
    memories,
    new_lease_id,
    now_ms,
)
from harness.time.eventually import eventually
from harness.time.loop_lag import LoopLag
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ACQUIRE_OUTCOME_HELD,
    ACQUIRE_OUTCOME_WAIT_TIMEOUT,
    NODE_ANSWER_ANSWERED,
    NODE_ANSWER_UNREACHABLE,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
    RELEASE_OUTCOME_NOT_HELD,
    RELEASE_OUTCOME_RELEASED,
    TOKEN_STATE_LIVE,
)

NAME = "orders/42"
TTL_MS = 10_000
# 1 % of the ttl + 2 ms.
DRIFT_MS = 102


async def test_a_free_resource_is_granted_with_a_validity_that_counts_from_the_send(
    server: LockServer,
) -> None:
    """It is the ttl less drift, plus at most the time of the call. Nodes keep only a digest of the id."""
    longest_label = "h" * 256
    sent_at_ms = now_ms()
    response = await server.acquire(NAME, ttl_ms=TTL_MS, holder=longest_label)
    took_ms = now_ms() - sent_at_ms
    assert response.outcome == ACQUIRE_OUTCOME_GRANTED
    assert not response.HasField("current")
    lease = response.lease
    assert (lease.resource, lease.fencing_token, lease.ttl.ToMilliseconds()) == (NAME, 1, TTL_MS)
    assert len(lease.lease_id) == 32
    assert TTL_MS - DRIFT_MS <= lease.validity.ToMilliseconds() <= TTL_MS - DRIFT_MS + took_ms
    for node in server.nodes:
        hold = await node.call("GET", f"redfence:lock:{NAME}")
        assert isinstance(hold, bytes)
        assert hold.endswith(b"\n" + longest_label.encode())
        assert lease.lease_id.encode() not in hold


async def test_releasing_again_or_with_another_lease_id_tells_not_held_and_ends_nothing(
    server: LockServer,
) -> None:
    """The server takes any name within the bounds; names of many-byte characters and patterns included."""
    for name in (NAME, "ä" * 128, " ", "a/b:c*?[]\\", "🔒"):
        lease = (await server.acquire(name)).lease
        await server.until_carried_out()
        before = await memories(server.nodes)
        assert await server.release(name, new_lease_id()) == RELEASE_OUTCOME_NOT_HELD
        assert (await server.acquire(name)).outcome == ACQUIRE_OUTCOME_HELD
        await server.until_carried_out()
        assert await memories(server.nodes) == before
        assert (await server.check(name, lease.fencing_token)).state == TOKEN_STATE_LIVE
        assert await server.release(name, lease.lease_id) == RELEASE_OUTCOME_RELEASED
        assert await server.release(name, lease.lease_id) == RELEASE_OUTCOME_NOT_HELD
        assert (await server.acquire(name)).lease.fencing_token > lease.fencing_token
    assert await server.release("never/granted", lease.lease_id) == RELEASE_OUTCOME_NOT_HELD


async def test_a_wait_that_is_longer_than_the_deadline_is_answered_before_the_deadline(
    server: LockServer,
) -> None:
    """The server reports WAIT_TIMEOUT before the caller's own library reports DEADLINE_EXCEEDED."""
    await server.acquire(NAME, holder="billing-7")
    async with LoopLag() as loop:
        for is_last in (False, False, False, True):
            sent_at_ms = now_ms()
            try:
                response = await server.acquire(NAME, wait_ms=60_000, timeout_s=0.6)
                break
            except grpc.aio.AioRpcError:
                # The server leaves 100 ms for the answer. A machine that stalls for longer is too late.
                if is_last or not loop.late_ms(since_ms=sent_at_ms):
                    raise
    assert response.outcome == ACQUIRE_OUTCOME_WAIT_TIMEOUT
    assert response.current.holder == "billing-7"


async def test_any_server_answers_a_retried_acquire_with_the_same_grant_and_a_new_ttl(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A server keeps nothing of a lease: another server also renews and releases it."""
    nodes = await formed_nodes(5)
    here, elsewhere = await serve(nodes), await serve(nodes)
    lease_id = new_lease_id()
    first = (await here.acquire(NAME, ttl_ms=5_000, lease_id=lease_id)).lease
    for server in (here, elsewhere):
        again = await server.acquire(NAME, ttl_ms=20_000, lease_id=lease_id)
        assert again.outcome == ACQUIRE_OUTCOME_GRANTED
        assert again.lease.fencing_token == first.fencing_token
        assert again.lease.lease_id == lease_id
        assert again.lease.validity.ToMilliseconds() > 19_000
        assert (await server.look(NAME)).current.remaining.ToMilliseconds() > 15_000
    async with SessionCaller(elsewhere) as session:
        renewed = (await session.renew(NAME, lease_id)).renew
        assert renewed.state == lock_pb2.LEASE_STATE_ACTIVE
        assert renewed.fencing_token == first.fencing_token
    assert await elsewhere.release(NAME, lease_id) == RELEASE_OUTCOME_RELEASED
    assert (await here.acquire(NAME)).outcome == ACQUIRE_OUTCOME_GRANTED


async def test_get_lock_reports_the_holder_that_a_quorum_shows_and_each_nodes_answer(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A hold on one node alone shows in the answer of that node, and nowhere else."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes)
    await server.until_states(*[NODE_STATE_READY] * 3)
    free = await server.look(NAME)
    assert free.resource == NAME
    assert not free.HasField("current")
    assert [(node.node_index, node.answer) for node in free.nodes] == [
        (index, NODE_ANSWER_ANSWERED) for index in range(3)
    ]
    assert not any(node.HasField("hold") for node in free.nodes)
    lease = (await server.acquire(NAME, holder="billing-7")).lease
    nodes[1].kill()
    await server.until_states(NODE_STATE_READY, NODE_STATE_UNREACHABLE, NODE_STATE_READY)
    held = await server.look(NAME)
    assert (held.current.fencing_token, held.current.holder) == (lease.fencing_token, "billing-7")
    assert held.waiters == 0
    assert lease.lease_id.encode() not in held.SerializeToString()
    assert [node.answer for node in held.nodes] == [
        NODE_ANSWER_ANSWERED,
        NODE_ANSWER_UNREACHABLE,
        NODE_ANSWER_ANSWERED,
    ]
    assert [node.HasField("hold") for node in held.nodes] == [True, False, True]
    status = await server.status()
    assert (len(status.cluster_id), status.quorum, bool(status.server_version)) == (32, 2, True)
    password = urlsplit(nodes[0].url).password
    assert password
    assert password.encode() not in status.SerializeToString()
    await nodes[0].call("DEL", f"redfence:lock:{NAME}")
    left_over = await server.look(NAME)
    assert not left_over.HasField("current")
    assert [node.HasField("hold") for node in left_over.nodes] == [False, False, True]


async def test_health_is_not_serving_from_the_start_of_the_drain(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """An open watch hears of the drain at once, and does not delay its end."""
    server = await serve(await formed_nodes(3))
    health = health_pb2_grpc.HealthStub(server.channel)
    for name in ("", "redfence.v1.LockService", "redfence.v1.AdminService"):
        checked = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
    watching = health.Watch(health_pb2.HealthCheckRequest(service="redfence.v1.LockService"))
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
    async with SessionCaller(server) as session:
        assert (await session.acquire(NAME)).HasField("acquire")
        sent_at_ms = now_ms()
        drained = server.drain(grace_ms=60_000)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await drained
        assert now_ms() - sent_at_ms < 30_000


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_every_service_and_finds_every_symbol(
    server: LockServer, version: str
) -> None:
    """Tools such as grpcurl ask for v1 first, and describe services, methods, messages and enum values."""
    both = {f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha")}
    services = {"redfence.v1.LockService", "redfence.v1.AdminService", "grpc.health.v1.Health", *both}
    ask = reflection_pb2.ServerReflectionRequest
    asking = server.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=ask.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()

    async def answer(request: reflection_pb2.ServerReflectionRequest) -> Any:
        await asking.write(request)
        return await asking.read()

    listed = (await answer(ask(list_services=""))).list_services_response.service
    assert {service.name for service in listed} == services
    members = ("LockService.Acquire", "CommandError", "Lease.fencing_token", "ACQUIRE_OUTCOME_HELD")
    for symbol in (*services, *(f"redfence.v1.{member}" for member in members)):
        found = (await answer(ask(file_containing_symbol=symbol))).file_descriptor_response
        files = [FileDescriptorProto.FromString(file) for file in found.file_descriptor_proto]
        assert symbol.startswith(f"{files[0].package}.")
        assert (await answer(ask(file_by_filename=files[0].name))).file_descriptor_response == found
    unknown = await answer(ask(file_containing_symbol="redfence.v1.LockService.Steal"))
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    await asking.done_writing()
    assert await asking.code() is grpc.StatusCode.OK


async def test_callers_under_load_are_told_of_a_drain_before_the_port_closes(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """After the port has closed, gRPC cancels a call without a reason."""
    server = await serve(await formed_nodes(3))
    grants = 0

    async def call_until_told(number: int) -> grpc.aio.AioRpcError:
        nonlocal grants
        async with grpc.aio.insecure_channel(server.target) as channel:
            locks = lock_pb2_grpc.LockServiceStub(channel)
            while True:
                try:
                    await locks.Acquire(acquire_request(f"{NAME}/{number}/{grants}"), timeout=5)
                except grpc.aio.AioRpcError as error:
                    return error
                grants += 1

    callers = [asyncio.create_task(call_until_told(number)) for number in range(30)]
    await eventually(lambda: grants > 300)
    drained = server.drain(grace_ms=10_000)
    told = [Failure.of_call(error) for error in await asyncio.gather(*callers)]
    await asyncio.wait_for(drained, timeout=5)
    assert {failure.reason for failure in told} == {lock_pb2.ERROR_REASON_DRAINING}
