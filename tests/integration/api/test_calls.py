"""The lock server over real nodes and real gRPC: what the unary calls promise when nothing breaks."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from harness.history.token_history import TokenHistory
from harness.load.failures import Failure
from harness.load.session_caller import SessionCaller
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    acquire_request,
    locks_left,
    memories,
    new_lease_id,
    now_ms,
    until,
    until_no_locks,
)
from harness.time.eventually import eventually
from harness.time.loop_lag import LateLoop
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
    TOKEN_STATE_NOT_LIVE,
)

NAME = "orders/42"
TTL_MS = 10_000
# 1 % of the ttl + 2 ms.
DRIFT_MS = 102


# --- acquire and release ----------------------------------------------------------------------------------------------


async def test_a_free_resource_is_granted_with_a_token_a_secret_and_a_validity_that_counts_from_the_send(
    server: LockServer,
) -> None:
    """The lease is as long as asked for, less drift, plus no more than the time the call itself took."""
    sent_at_ms = now_ms()
    response = await server.acquire(NAME, ttl_ms=TTL_MS, holder="billing-7")
    took_ms = now_ms() - sent_at_ms
    assert response.outcome == ACQUIRE_OUTCOME_GRANTED
    assert not response.HasField("current")
    lease = response.lease
    assert lease.resource == NAME
    assert lease.fencing_token == 1
    assert len(lease.lease_id) == 32
    assert lease.ttl.ToMilliseconds() == TTL_MS
    assert TTL_MS - DRIFT_MS <= lease.validity.ToMilliseconds() <= TTL_MS - DRIFT_MS + took_ms


async def test_nodes_keep_only_a_digest_of_the_lease_id(server: LockServer) -> None:
    """Whoever can read a node can still not release or renew what others hold."""
    secret = new_lease_id()
    await server.acquire(NAME, lease_id=secret, holder="billing-7")
    for node in server.nodes:
        fields = await node.call("HGETALL", f"redfence:lock:{NAME}")
        assert isinstance(fields, list)
        assert b"billing-7" in fields
        assert not any(secret.encode() in field for field in fields)


async def test_a_released_resource_is_free_at_once_and_its_next_token_is_greater(server: LockServer) -> None:
    """Release ends the lease on every node, and tokens go on."""
    tokens = []
    for _ in range(5):
        lease = (await server.acquire(NAME)).lease
        tokens.append(lease.fencing_token)
        assert await server.release(NAME, lease.lease_id) == RELEASE_OUTCOME_RELEASED
    assert tokens == sorted(set(tokens))
    await until_no_locks(server.nodes)


async def test_releasing_again_or_with_another_lease_id_tells_not_held_and_ends_nothing(
    server: LockServer,
) -> None:
    """A stranger's or a late release cannot touch a lease."""
    lease = (await server.acquire(NAME)).lease
    before = await memories(server.nodes)
    assert await server.release(NAME, new_lease_id()) == RELEASE_OUTCOME_NOT_HELD
    assert await memories(server.nodes) == before
    assert (await server.check(NAME, lease.fencing_token)).state == TOKEN_STATE_LIVE
    assert await server.release(NAME, lease.lease_id) == RELEASE_OUTCOME_RELEASED
    assert await server.release(NAME, lease.lease_id) == RELEASE_OUTCOME_NOT_HELD
    assert await server.release("never/granted", lease.lease_id) == RELEASE_OUTCOME_NOT_HELD


async def test_resources_do_not_disturb_each_other(server: LockServer) -> None:
    """A hundred names are held at once, each by its own lease."""
    names = [f"orders/{number}" for number in range(100)]
    responses = await asyncio.gather(*(server.acquire(name) for name in names))
    assert {response.outcome for response in responses} == {ACQUIRE_OUTCOME_GRANTED}
    assert len({response.lease.lease_id for response in responses}) == 100
    for name, response in zip(names[:50], responses, strict=False):
        assert await server.release(name, response.lease.lease_id) == RELEASE_OUTCOME_RELEASED
    kept = {f"redfence:lock:{name}".encode() for name in names[50:]}

    async def gone() -> bool:
        # A node that is late carries a release out after the answer.
        return set(await locks_left(server.nodes)) == kept

    await until(gone)


@pytest.mark.parametrize("name", ["ä" * 128, "a", " ", "a/b:c*?[]\\", "🔒"], ids=repr)
async def test_any_name_within_the_bounds_is_a_resource_of_its_own(
    name: str, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """256 bytes of many-byte characters are as good as one letter, and no character is special."""
    server = await serve(await formed_nodes(3))
    lease = (await server.acquire(name)).lease
    assert lease.resource == name
    assert (await server.acquire(name)).outcome == ACQUIRE_OUTCOME_HELD
    assert await server.release(name, lease.lease_id) == RELEASE_OUTCOME_RELEASED


# --- contention is data ---------------------------------------------------------------------------------------------


async def test_a_held_resource_is_told_with_its_holder_token_and_remaining_time_and_never_its_secret(
    server: LockServer,
) -> None:
    """Losing a try-once is an outcome; the answer says who holds it and for how long, but not how to end it."""
    held = (await server.acquire(NAME, ttl_ms=TTL_MS, holder="billing-7")).lease
    response = await server.acquire(NAME, holder="billing-8")
    assert response.outcome == ACQUIRE_OUTCOME_HELD
    assert not response.HasField("lease")
    assert response.current.holder == "billing-7"
    assert response.current.fencing_token == held.fencing_token
    assert 0 < response.current.remaining.ToMilliseconds() <= TTL_MS
    assert held.lease_id.encode() not in response.SerializeToString()


async def test_a_lost_try_leaves_nothing_on_the_nodes(server: LockServer) -> None:
    """Neither a number nor a key is spent on a try-once that finds the resource held."""
    await server.acquire(NAME)
    before = await memories(server.nodes)
    for _ in range(10):
        assert (await server.acquire(NAME)).outcome == ACQUIRE_OUTCOME_HELD
    assert await memories(server.nodes) == before


async def test_a_waiter_that_is_never_served_is_told_so_after_its_timeout_and_not_before(
    server: LockServer,
) -> None:
    """WAIT_TIMEOUT comes once wait_timeout is over, with the present holder."""
    await server.acquire(NAME, holder="billing-7")
    sent_at_ms = now_ms()
    response = await server.acquire(NAME, wait_ms=150)
    assert now_ms() - sent_at_ms >= 150
    assert response.outcome == ACQUIRE_OUTCOME_WAIT_TIMEOUT
    assert response.current.holder == "billing-7"
    await until_no_more_waiters(server)


async def test_a_waiter_is_granted_after_the_release_with_a_validity_that_includes_the_wait(
    server: LockServer,
) -> None:
    """The ttl starts at the grant; counted from the send, validity is the wait and what is left of the ttl, and no more."""
    first = (await server.acquire(NAME)).lease
    sent_at_ms = now_ms()
    waiting = asyncio.create_task(server.acquire(NAME, ttl_ms=TTL_MS, wait_ms=5_000))
    await server.until_waiting(NAME)
    released_at_ms = now_ms()
    await server.release(NAME, first.lease_id)
    lease = (await waiting).lease
    answered_at_ms = now_ms()
    assert lease.fencing_token > first.fencing_token
    validity_ms = lease.validity.ToMilliseconds()
    # It cannot have been minted before the release was sent, nor after the answer was read.
    arrived_at_most_ms = released_at_ms - sent_at_ms
    assert validity_ms <= TTL_MS - DRIFT_MS + (answered_at_ms - sent_at_ms)
    assert validity_ms >= TTL_MS - DRIFT_MS
    assert sent_at_ms + validity_ms > released_at_ms - arrived_at_most_ms
    await until_no_more_waiters(server)


async def test_a_waiter_is_granted_after_the_lease_before_it_expired_and_never_within_its_validity(
    server: LockServer,
) -> None:
    """A crashed holder's lock comes free by itself, and not before the holder had to stop counting on it."""
    sent_at_ms = now_ms()
    first = (await server.acquire(NAME, ttl_ms=700)).lease
    second = await server.acquire(NAME, wait_ms=5_000)
    answered_at_ms = now_ms()
    assert second.outcome == ACQUIRE_OUTCOME_GRANTED
    assert second.lease.fencing_token > first.fencing_token
    assert answered_at_ms >= sent_at_ms + first.validity.ToMilliseconds()


async def test_a_call_with_a_deadline_shorter_than_its_wait_is_answered_before_the_deadline(
    server: LockServer,
) -> None:
    """The caller learns WAIT_TIMEOUT from the server and not DEADLINE_EXCEEDED from its own library."""
    await server.acquire(NAME, holder="billing-7")
    async with LateLoop() as loop:
        for is_last in (False, False, False, True):
            sent_at_ms = now_ms()
            try:
                response = await server.acquire(NAME, wait_ms=60_000, timeout_s=0.6)
                break
            except grpc.aio.AioRpcError:
                # The server leaves a tenth of a second for the answer; where it stands still for longer, there is none in time.
                if is_last or not loop.late_ms(since_ms=sent_at_ms):
                    raise
    assert response.outcome == ACQUIRE_OUTCOME_WAIT_TIMEOUT
    assert response.current.holder == "billing-7"


async def test_every_one_of_many_waiters_is_served_in_the_end_and_their_holds_never_overlap(
    server: LockServer,
) -> None:
    """Twenty callers want one resource: each gets it, one at a time, with rising tokens."""
    history = TokenHistory()
    inside = 0

    async def take_turns() -> None:
        nonlocal inside
        began_at_ms = now_ms()
        response = await server.acquire(NAME, wait_ms=20_000)
        assert response.outcome == ACQUIRE_OUTCOME_GRANTED
        history.note(response.lease, began_at_ms=began_at_ms)
        inside += 1
        assert inside == 1
        await asyncio.sleep(0)
        inside -= 1
        assert await server.release(NAME, response.lease.lease_id) == RELEASE_OUTCOME_RELEASED

    await asyncio.gather(*(take_turns() for _ in range(20)))
    assert len(history.grants) == 20
    history.check()
    await until_no_locks(server.nodes)


async def until_no_more_waiters(server: LockServer) -> None:
    """The count of waiters goes back to zero."""
    await server.until_waiting(NAME, count=0)


# --- retries, and more than one server ------------------------------------------------------------------------------


async def test_a_retried_acquire_is_answered_the_same_grant_by_any_server_and_its_ttl_starts_anew(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A lost answer costs nothing: the same lease id gets the same token, here or elsewhere."""
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


async def test_a_lease_of_one_server_is_renewed_and_released_by_another(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A server keeps nothing of a lease, so losing one loses no lease."""
    nodes = await formed_nodes(3)
    here, elsewhere = await serve(nodes), await serve(nodes)
    lease = (await here.acquire(NAME)).lease
    async with SessionCaller(elsewhere) as session:
        renewed = await session.renew(NAME, lease.lease_id)
        assert renewed.renew.state == lock_pb2.LEASE_STATE_ACTIVE
        assert renewed.renew.fencing_token == lease.fencing_token
    assert await elsewhere.release(NAME, lease.lease_id) == RELEASE_OUTCOME_RELEASED
    assert (await here.acquire(NAME)).outcome == ACQUIRE_OUTCOME_GRANTED


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 5])
async def test_two_servers_on_the_same_nodes_exclude_each_others_callers_and_order_their_tokens(
    count: int, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Under a load that mixes both servers, calls and sessions, holds never overlap and tokens are unique and ordered."""
    nodes = await formed_nodes(count)
    servers = [await serve(nodes), await serve(nodes)]
    names = ["a", "b", "c"]
    history, holder_of = TokenHistory(), dict.fromkeys(names, 0)

    async def work(caller: int, server: LockServer, session: SessionCaller | None) -> None:
        for turn in range(12):
            name = names[(caller + turn) % len(names)]
            began_at_ms = now_ms()
            if session:
                response = (await session.acquire(name, wait_ms=30_000)).acquire
            else:
                response = await server.acquire(name, wait_ms=30_000)
            assert response.outcome == ACQUIRE_OUTCOME_GRANTED
            history.note(response.lease, began_at_ms=began_at_ms)
            assert holder_of[name] == 0, "two holders at once"
            holder_of[name] = caller + 1
            await asyncio.sleep(0)
            holder_of[name] = 0
            if session:
                released = (await session.release(name, response.lease.lease_id)).release.outcome
            else:
                released = await server.release(name, response.lease.lease_id)
            assert released == RELEASE_OUTCOME_RELEASED

    async with SessionCaller(servers[0]) as left, SessionCaller(servers[1]) as right:
        sessions = (left, right)
        await asyncio.gather(
            *(
                work(caller, servers[caller % 2], sessions[caller % 2] if caller % 4 < 2 else None)
                for caller in range(8)
            )
        )
    assert len(history.grants) == 8 * 12
    history.check()
    await until_no_locks(nodes)


# --- looking ----------------------------------------------------------------------------------------------------------


async def test_a_token_is_live_while_its_lease_holds_and_not_live_afterwards_or_for_any_other(
    server: LockServer,
) -> None:
    """CheckToken tells the present lease's token from older ones, greater ones, and those of free resources."""
    assert (await server.check(NAME, 1)).state == TOKEN_STATE_NOT_LIVE
    first = (await server.acquire(NAME)).lease
    assert (await server.check(NAME, first.fencing_token)).state == TOKEN_STATE_LIVE
    assert (await server.check(NAME, first.fencing_token + 1)).state == TOKEN_STATE_NOT_LIVE
    await server.release(NAME, first.lease_id)
    released = await server.check(NAME, first.fencing_token)
    assert released.state == TOKEN_STATE_NOT_LIVE
    assert not released.HasField("current")
    second = (await server.acquire(NAME, holder="billing-8")).lease
    older = await server.check(NAME, first.fencing_token)
    assert older.state == TOKEN_STATE_NOT_LIVE
    assert older.current.fencing_token == second.fencing_token
    assert older.current.holder == "billing-8"
    assert (await server.check(NAME, second.fencing_token)).state == TOKEN_STATE_LIVE


async def test_a_look_at_a_free_and_at_a_held_resource_tells_what_each_node_says(server: LockServer) -> None:
    """GetLock names the holder as a quorum sees it, and every node's own answer by index."""
    free = await server.look(NAME)
    assert free.resource == NAME
    assert not free.HasField("current")
    assert [(node.node_index, node.answer) for node in free.nodes] == [
        (index, NODE_ANSWER_ANSWERED) for index in range(len(server.nodes))
    ]
    assert not any(node.HasField("hold") for node in free.nodes)
    lease = (await server.acquire(NAME, holder="billing-7")).lease
    held = await server.look(NAME)
    assert held.current.fencing_token == lease.fencing_token
    assert held.current.holder == "billing-7"
    assert {node.hold.fencing_token for node in held.nodes} == {lease.fencing_token}
    assert held.waiters == 0
    assert lease.lease_id.encode() not in held.SerializeToString()


async def test_a_look_tells_which_node_is_down_and_a_hold_that_no_quorum_has(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """With a node away the others still answer; a hold left on one node alone is that node's word, not the cluster's."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes)
    lease = (await server.acquire(NAME)).lease
    await server.until_states(*[NODE_STATE_READY] * 3)
    nodes[1].kill()
    await server.until_states(NODE_STATE_READY, NODE_STATE_UNREACHABLE, NODE_STATE_READY)
    held = await server.look(NAME)
    assert held.current.fencing_token == lease.fencing_token
    assert [node.answer for node in held.nodes] == [
        NODE_ANSWER_ANSWERED,
        NODE_ANSWER_UNREACHABLE,
        NODE_ANSWER_ANSWERED,
    ]
    assert [node.HasField("hold") for node in held.nodes] == [True, False, True]
    await nodes[0].call("DEL", f"redfence:lock:{NAME}")
    left_over = await server.look(NAME)
    assert not left_over.HasField("current")
    assert [node.HasField("hold") for node in left_over.nodes] == [False, False, True]


async def test_the_status_of_a_cluster_tells_its_nodes_their_states_and_its_bounds_and_no_password(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """ClusterStatus shows a ready node's run and latency, and why another one does not vote."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes)
    await server.until_states(*[NODE_STATE_READY] * 3)
    await server.acquire(NAME)
    status = await server.status()
    assert len(status.cluster_id) == 32
    assert status.quorum == 2
    assert status.max_ttl.ToMilliseconds() == 300_000
    assert status.server_version
    assert [node.index for node in status.nodes] == [0, 1, 2]
    assert [node.address for node in status.nodes] == [f"127.0.0.1:{node.port}" for node in nodes]
    assert {node.state for node in status.nodes} == {NODE_STATE_READY}
    assert {node.detail for node in status.nodes} == {""}
    assert len({node.run_id for node in status.nodes}) == 3
    assert status.nodes[0].HasField("latency")
    nodes[2].kill()
    await server.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
    status = await server.status()
    assert status.nodes[2].detail
    password = nodes[0].url.partition(":")[2].partition("@")[0].lstrip("/:")
    assert len(password) == 32
    assert password.encode() not in status.SerializeToString()


# --- health and reflection --------------------------------------------------------------------------------------------


async def test_health_is_serving_while_it_serves_and_not_serving_from_the_start_of_the_drain(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A balancer that watches is told to send no more before calls under way have ended, and does not hold up the end."""
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


async def test_reflection_lists_every_service(server: LockServer) -> None:
    """Tools can find out what the server speaks."""
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    asking = stub.ServerReflectionInfo()
    await asking.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await asking.done_writing()
    listed = (await asking.read()).list_services_response.service
    assert {service.name for service in listed} == {
        "redfence.v1.LockService",
        "redfence.v1.AdminService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert await asking.code() is grpc.StatusCode.OK


# --- giving up --------------------------------------------------------------------------------------------------------


async def test_a_waiting_call_that_its_caller_cancels_leaves_no_key_and_no_waiter(server: LockServer) -> None:
    """Whoever hangs up does not hold the resource later."""
    held = (await server.acquire(NAME)).lease
    call = server.locks.Acquire(acquire_request(NAME, wait_ms=30_000))
    await server.until_waiting(NAME)
    call.cancel()
    await until_no_more_waiters(server)
    assert len(await locks_left(server.nodes)) == len(server.nodes)
    await server.release(NAME, held.lease_id)
    await until_no_locks(server.nodes)


async def test_callers_under_load_are_told_of_a_drain_with_a_reason_before_the_door_is_closed(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A call that arrives at a closed door is cancelled by gRPC without a word; a caller that stops when told never sees that."""
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
