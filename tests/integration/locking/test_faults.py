"""Nodes die and networks break: what callers are told, and what is left on the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from harness.load.failures import Failure, failure_of
from harness.load.lock_load import LockLoad
from harness.load.session_caller import SessionCaller
from harness.load.waiters import TTL_MS, line_up
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    acquire_request,
    locks_left,
    memories,
    memory,
    new_lease_id,
    now_ms,
    until,
    until_no_locks,
)
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ACQUIRE_OUTCOME_HELD,
    ERROR_REASON_CANCELLED,
    ERROR_REASON_QUORUM_UNAVAILABLE,
    NODE_STATE_QUARANTINED,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
    RELEASE_OUTCOME_RELEASED,
    TOKEN_STATE_LIVE,
)
from redfence_server.clock import SystemClock
from redfence_server.membership.examination import examine
from redfence_server.redis_io.dial import NodeUrl, dial
from redfence_server.redis_io.scripts import Keyspace

NAME = "orders/42"
LOCK_KEY = b"redfence:lock:orders/42"
IDENTITY_KEY, HIGH_KEY = b"redfence:node", b"redfence:high"
# For tests that wait until it is over; longer than a machine stalls.
NODE_TIMEOUT_MS = 1_000
pytestmark = pytest.mark.slow


async def proxied(nodes: Sequence[RedisNode], serve: Serve, **settings: Any) -> LockServer:
    """Serve through proxies, with rare heartbeats: a lost reply answers the test's own command."""
    server = await serve(nodes, proxied=True, **{"heartbeat_interval_ms": 60_000, **settings})
    await all_ready(server)

    async def subscribed() -> bool:
        return all([await node.call("PUBSUB", "CHANNELS") for node in nodes])

    # A node votes before it has answered the subscription to notices.
    await until(subscribed)
    replies = [proxy.replies for proxy in server.proxies]
    await eventually(lambda: all(each.taken_bytes == each.passed_bytes for each in replies))
    return server


async def all_ready(server: LockServer) -> None:
    """Every node votes."""
    await server.until_states(*[NODE_STATE_READY] * len(server.nodes))


async def until_connected(server: LockServer) -> None:
    """The server is connected through every proxy, and every node votes."""
    await eventually(lambda: all(proxy.connection_count for proxy in server.proxies))
    await all_ready(server)


async def until_missing_one(server: LockServer) -> None:
    """The server has noticed that a node is gone."""

    async def noticed() -> bool:
        states = [node.state for node in (await server.status()).nodes]
        return states.count(NODE_STATE_UNREACHABLE) == 1

    await until(noticed)


async def until_holding(nodes: Sequence[RedisNode], count: int) -> None:
    """So many lock keys are on the nodes, all in all."""

    async def reached() -> bool:
        return len(await locks_left(nodes)) == count

    await until(reached)


async def until_answering(server: LockServer) -> None:
    """The server has noticed what broke, has mended it, and grants."""

    async def grants() -> bool:
        try:
            lease = (await server.acquire("probe", ttl_ms=1_000)).lease
        except grpc.aio.AioRpcError:
            return False
        await server.release("probe", lease.lease_id)
        return bool(lease.fencing_token)

    await until(grants)


# --- nodes that die -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 5])
async def test_a_minority_killed_under_load_costs_no_caller_more_than_a_retry(
    count: int, fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Sixteen callers of two servers go on; tokens stay unique and ordered."""
    nodes = await fresh_formed_nodes(count)
    servers = [await serve(nodes), await serve(nodes)]
    minority = nodes[: (count - 1) // 2]
    async with LockLoad(*servers) as load:
        await load.until_granted(150)
        for node in minority:
            node.kill()
        await load.until_granted(150)
        for node in minority:
            await node.start()
        for server in servers:
            await all_ready(server)
        await load.until_granted(150)
    load.history.check()
    await until_no_locks(nodes)


async def test_a_majority_killed_is_told_at_once_grants_nothing_and_is_back_after_the_restart(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Every call fails far sooner than a timeout; nodes that fsync every write keep their holds."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes, node_timeout_ms=20_000)
    await all_ready(server)
    held = (await server.acquire("held", ttl_ms=60_000)).lease
    before = [await memory(node) for node in nodes[:2]]
    for node in nodes[:2]:
        node.kill()
    sent_at_ms = now_ms()
    for number in range(50):
        for call in (
            server.acquire(f"orders/{number}", wait_ms=60_000),
            server.release("free", held.lease_id),
            server.look("held"),
            server.check("held", held.fencing_token),
        ):
            failure = await failure_of(call)
            assert failure.is_retryable
            assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
    # Two hundred calls, one after another, in less than one node timeout: none waited for it.
    assert now_ms() - sent_at_ms < 20_000
    await until_holding(nodes[2:], 1)
    for node in nodes[:2]:
        await node.start()
    await all_ready(server)
    for node, remembered in zip(nodes, before, strict=False):
        # The fence has changed these two.
        now = await memory(node)
        assert {**now, **{key: remembered[key] for key in (IDENTITY_KEY, HIGH_KEY)}} == remembered
    assert (await server.check("held", held.fencing_token)).state == TOKEN_STATE_LIVE
    assert await server.release("held", held.lease_id) == RELEASE_OUTCOME_RELEASED
    assert (await server.acquire("held")).lease.fencing_token > held.fencing_token


async def test_a_lease_outlives_the_restart_of_every_node_one_after_the_other(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """After each restart the lease is live and can be renewed, and another caller is refused."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes)
    lease = (await server.acquire(NAME, ttl_ms=60_000)).lease
    async with SessionCaller(server) as session:
        for node in nodes:
            await node.restart()
            await all_ready(server)
            assert (await server.check(NAME, lease.fencing_token)).state == TOKEN_STATE_LIVE
            assert (await session.renew(NAME, lease.lease_id)).renew.state == lock_pb2.LEASE_STATE_ACTIVE
            assert (await server.acquire(NAME)).outcome == ACQUIRE_OUTCOME_HELD
    assert await server.release(NAME, lease.lease_id) == RELEASE_OUTCOME_RELEASED
    assert (await server.acquire(NAME)).lease.fencing_token > lease.fencing_token


async def test_a_node_that_restarts_while_another_one_is_away_waits_for_it(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """One peer is too few for the fence: it may have missed the last grants."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes)
    await all_ready(server)
    lease = (await server.acquire(NAME, ttl_ms=60_000)).lease
    nodes[2].kill()
    await server.until_states(NODE_STATE_READY, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
    await nodes[0].restart()
    await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_UNREACHABLE)
    assert "other nodes that answer, and found" in (await server.status()).nodes[0].detail
    assert (await failure_of(server.acquire("other"))).reason == ERROR_REASON_QUORUM_UNAVAILABLE
    await nodes[2].start()
    await all_ready(server)
    assert (await server.check(NAME, lease.fencing_token)).state == TOKEN_STATE_LIVE


# --- networks that break --------------------------------------------------------------------------


async def test_a_node_that_swallows_everything_delays_no_call_beyond_the_others(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Five hundred acquires, one after another, while one of five nodes answers none of them."""
    server = await serve(await formed_nodes(5), proxied=True, node_timeout_ms=20_000)
    await all_ready(server)
    black_hole = server.proxies[4]
    black_hole.drop()
    replies = black_hole.replies
    # An answer to a heartbeat may be on its way.
    await eventually(lambda: replies.taken_bytes == replies.passed_bytes + replies.kept_bytes)
    answered_bytes = replies.passed_bytes
    began_at_ms = now_ms()
    tokens = []
    async with SessionCaller(server) as session:
        for _ in range(500):
            lease = (await session.acquire(NAME)).acquire.lease
            tokens.append(lease.fencing_token)
            assert (await session.release(NAME, lease.lease_id)).release.outcome == RELEASE_OUTCOME_RELEASED
    assert replies.passed_bytes == answered_bytes
    assert tokens == sorted(set(tokens))
    # In less than one node timeout: not a single call waited for it.
    assert now_ms() - began_at_ms < 20_000
    await black_hole.heal()
    await all_ready(server)


async def test_a_slow_minority_delays_nobody_and_a_slow_majority_delays_by_its_own_time(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """One late node of three is not waited for; two are, and the validity counts from the mint."""
    server = await proxied(await formed_nodes(3), serve)
    server.proxies[0].delay(replies_ms=200)
    sent_at_ms = now_ms()
    for _ in range(20):
        lease = (await server.acquire(NAME)).lease
        assert await server.release(NAME, lease.lease_id) == RELEASE_OUTCOME_RELEASED
    assert now_ms() - sent_at_ms < 20 * 200
    server.proxies[1].delay(replies_ms=200)
    sent_at_ms = now_ms()
    lease = (await server.acquire(NAME, ttl_ms=10_000)).lease
    took_ms = now_ms() - sent_at_ms
    assert took_ms >= 200
    # The ttl runs from the sending of the mint, so late replies shorten the validity.
    assert lease.validity.ToMilliseconds() <= 10_000 - 102 + took_ms - 200


async def test_a_release_does_not_overtake_a_slow_mint(formed_nodes: FormedNodes, serve: Serve) -> None:
    """On a node whose requests are late the release comes after the mint: no orphan is left."""
    nodes = await formed_nodes(3)
    server = await proxied(nodes, serve)
    server.proxies[2].hold(replies=False)
    lease = (await server.acquire(NAME, ttl_ms=60_000)).lease
    assert await server.release(NAME, lease.lease_id) == RELEASE_OUTCOME_RELEASED
    counter = b"redfence:counter:orders/42"
    assert counter not in await memory(nodes[2])
    await server.proxies[2].heal()

    async def minted() -> bool:
        return counter in await memory(nodes[2])

    await until(minted)
    await until_no_locks(nodes)


@pytest.mark.parametrize("count", [3, 5])
async def test_a_mint_whose_replies_are_lost_on_a_quorum_fails_and_is_undone_everywhere(
    count: int, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The caller is told UNAVAILABLE, no node keeps its key, and the next token is greater."""
    nodes = await formed_nodes(count)
    server = await proxied(nodes, serve)
    first = (await server.acquire(NAME)).lease
    await server.release(NAME, first.lease_id)
    await until_no_locks(nodes)
    for proxy in server.proxies[: count // 2 + 1]:
        proxy.lose_replies(1)
    failure = await failure_of(server.acquire(NAME, ttl_ms=60_000))
    assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
    assert failure.is_retryable
    await until_no_locks(nodes)
    await until_connected(server)
    second = (await server.acquire(NAME)).lease
    assert second.fencing_token > first.fencing_token + 1, "the lost attempt minted as well"


async def test_a_mint_whose_replies_time_out_on_a_quorum_fails_and_is_undone_everywhere(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The nodes are reached but never heard of: the undo takes the same way as the mint."""
    nodes = await formed_nodes(3)
    server = await proxied(nodes, serve, node_timeout_ms=NODE_TIMEOUT_MS)
    for proxy in server.proxies[:2]:
        proxy.drop(requests=False)
    failure = await failure_of(server.acquire(NAME, ttl_ms=60_000))
    assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
    assert failure.metadata["nodes"] == "0=timed_out,1=timed_out"
    await until_no_locks(nodes)
    for proxy in server.proxies[:2]:
        await proxy.heal()
    await until_answering(server)


async def test_a_mint_that_arrives_long_after_its_timeout_is_undone(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Requests that the network held back are applied when it heals, and their undo right after."""
    nodes = await formed_nodes(3)
    server = await proxied(nodes, serve, node_timeout_ms=NODE_TIMEOUT_MS)
    for proxy in server.proxies[:2]:
        proxy.hold(replies=False)
    failure = await failure_of(server.acquire(NAME, ttl_ms=60_000))
    assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
    for proxy in server.proxies[:2]:
        await proxy.heal()

    async def minted() -> bool:
        return all(b"redfence:counter:orders/42" in each for each in await memories(nodes))

    await until(minted)
    await until_no_locks(nodes)


@pytest.mark.parametrize("count", [3, 5])
async def test_a_reply_lost_on_a_minority_is_not_noticed_by_the_caller(
    count: int, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The grant stands on the others, and its release ends it on every node."""
    nodes = await formed_nodes(count)
    server = await proxied(nodes, serve)
    for proxy in server.proxies[: (count - 1) // 2]:
        proxy.lose_replies(1)
    lease = (await server.acquire(NAME, ttl_ms=60_000)).lease
    await until_holding(nodes, count)
    await until_connected(server)
    assert (await server.check(NAME, lease.fencing_token)).state == TOKEN_STATE_LIVE
    assert await server.release(NAME, lease.lease_id) == RELEASE_OUTCOME_RELEASED
    await until_no_locks(nodes)


async def test_a_node_that_missed_a_release_is_told_when_it_is_back(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Otherwise releases that nodes missed would block a free lock until its ttl ends."""
    nodes = await formed_nodes(3)
    server = await proxied(nodes, serve)
    lease = (await server.acquire(NAME, ttl_ms=60_000)).lease
    server.proxies[0].refuse()
    await server.until_states(NODE_STATE_UNREACHABLE, NODE_STATE_READY, NODE_STATE_READY)
    assert await server.release(NAME, lease.lease_id) == RELEASE_OUTCOME_RELEASED
    assert await locks_left(nodes) == [LOCK_KEY]
    await server.proxies[0].heal()
    await until_no_locks(nodes)
    following = (await server.acquire(NAME)).lease
    assert following.fencing_token > lease.fencing_token


async def test_connections_reset_under_load_cost_no_caller_more_than_a_retry(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Every connection is broken, one at a time and then all at once."""
    nodes = await formed_nodes(3)
    server = await proxied(nodes, serve)
    async with LockLoad(server) as load:
        await load.until_granted(100)
        for proxy in server.proxies:
            proxy.reset()
            await load.until_granted(20)
        for proxy in server.proxies:
            proxy.reset()
        await load.until_granted(100)
    load.history.check()
    await all_ready(server)
    await until_no_locks(nodes)


async def test_replies_in_slices_are_put_together(formed_nodes: FormedNodes, serve: Serve) -> None:
    """A network may cut bytes anywhere."""
    server = await proxied(await formed_nodes(3), serve)
    for proxy in server.proxies:
        proxy.slice(slice_bytes=3)
    async with LockLoad(server, callers=4) as load:
        await load.until_granted(30)
    assert not load.failures
    load.history.check()


async def test_an_undo_that_could_not_be_sent_is_delivered_over_the_next_connection(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Nodes that are away keep the failed attempt's keys; when they are back they lose them."""
    nodes = await formed_nodes(3)
    server = await proxied(nodes, serve)
    for proxy in server.proxies[:2]:
        proxy.hold(requests=False)
    acquiring = asyncio.create_task(failure_of(server.acquire(NAME, ttl_ms=60_000)))
    await until_holding(nodes, 3)
    for proxy in server.proxies[:2]:
        proxy.refuse()
    failure = await acquiring
    assert failure.metadata["nodes"] == "0=disconnected,1=disconnected"
    await until_holding([nodes[2]], 0)
    assert len(await locks_left(nodes)) == 2
    for proxy in server.proxies[:2]:
        await proxy.heal()
    await until_no_locks(nodes)


async def test_a_server_can_be_stopped_at_every_step_of_connecting(formed_nodes: FormedNodes) -> None:
    """A cancellation is never lost: at each step the connecting ends at once."""
    [node] = await formed_nodes(1)

    async def connect() -> None:
        dialled = await dial(NodeUrl(node.url), timeout_ms=5_000)
        try:
            await examine(dialled, Keyspace(), SystemClock())
        finally:
            await dialled.close()

    for step_count in range(1_000):
        connecting = asyncio.create_task(connect())
        for _ in range(step_count):
            await asyncio.sleep(0)
        if connecting.done():
            break
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled(), f"lost at step {step_count}"
    assert step_count > 10, "there was nothing to cancel"


# --- callers that give up while nodes are slow ----------------------------------------------------


@pytest.mark.parametrize("how", ["call cancelled", "deadline", "cancel command", "stream cancelled"])
async def test_an_acquire_given_up_while_its_mint_is_under_way_leaves_no_key(
    how: str, formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The nodes have minted and their replies are late; the caller holds nothing afterwards."""
    nodes = await formed_nodes(3)
    server = await serve(nodes, proxied=True, node_timeout_ms=10_000)
    await all_ready(server)
    for proxy in server.proxies:
        proxy.hold(requests=False)
    session = SessionCaller(server)
    if how == "call cancelled":
        call = server.locks.Acquire(acquire_request(NAME, ttl_ms=60_000))
        await until_holding(nodes, 3)
        call.cancel()
    elif how == "deadline":
        failure = await failure_of(server.acquire(NAME, ttl_ms=60_000, timeout_s=0.4))
        # By the server, or by the transport if the server stood still just before the deadline.
        assert failure.is_retryable or failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    else:
        acquiring = session.acquire(NAME, ttl_ms=60_000)
        await until_holding(nodes, 3)
        if how == "cancel command":
            assert (await session.cancel_command(1)).cancel.found is True
            assert Failure.of_message((await acquiring).error).reason == ERROR_REASON_CANCELLED
        else:
            await session.cancel()
    # The undo needs no reply to be sent: requests still pass.
    await until_no_locks(nodes)
    for proxy in server.proxies:
        await proxy.heal()
    await session.cancel()
    assert (await server.acquire(NAME)).outcome == ACQUIRE_OUTCOME_GRANTED


async def test_an_undo_of_a_failed_attempt_spares_the_retry_that_another_server_granted(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The first server's replies are lost; before its undo the retry is granted elsewhere."""
    nodes = await formed_nodes(3)
    cut_off, elsewhere = await proxied(nodes, serve, node_timeout_ms=10_000), await serve(nodes)
    lease_id = new_lease_id()
    for proxy in cut_off.proxies:
        proxy.hold(requests=False)
    call = cut_off.locks.Acquire(acquire_request(NAME, ttl_ms=60_000, lease_id=lease_id))
    await until_holding(nodes, 3)
    granted = (await elsewhere.acquire(NAME, ttl_ms=60_000, lease_id=lease_id)).lease
    carried = [proxy.requests.passed_bytes for proxy in cut_off.proxies]
    call.cancel()
    await eventually(
        lambda: all(
            proxy.requests.passed_bytes > before
            for proxy, before in zip(cut_off.proxies, carried, strict=True)
        )
    )
    assert (await elsewhere.check(NAME, granted.fencing_token)).state == TOKEN_STATE_LIVE
    assert len(await locks_left(nodes)) == 3
    async with SessionCaller(elsewhere) as session:
        renewed = (await session.renew(NAME, lease_id)).renew
        assert renewed.state == lock_pb2.LEASE_STATE_ACTIVE


# --- waiters, while nodes and networks fail -------------------------------------------------------


async def test_a_waiter_is_woken_by_a_release_elsewhere_after_every_connection_broke(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The nodes kept whom to tell, and each new connection listens again."""
    nodes = await formed_nodes(3)
    server, elsewhere = await proxied(nodes, serve), await serve(nodes)
    held = (await elsewhere.acquire(NAME, ttl_ms=TTL_MS)).lease
    [waiter] = await line_up(server, NAME, 1)
    for proxy in server.proxies:
        proxy.reset()
    await eventually(lambda: not any(proxy.connection_count for proxy in server.proxies))
    await until_connected(server)
    await elsewhere.release(NAME, held.lease_id)
    assert (await waiter.lease()).fencing_token == held.fencing_token + 1


async def test_a_waiter_is_still_woken_after_every_node_was_restarted_one_after_the_other(
    fresh_formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Each hold lists the servers to tell, and is as durable as the lock."""
    nodes = await fresh_formed_nodes(3)
    server, elsewhere = await serve(nodes), await serve(nodes)
    held = (await elsewhere.acquire(NAME, ttl_ms=TTL_MS)).lease
    [waiter] = await line_up(server, NAME, 1)
    for node in nodes:
        node.kill()
        for each in (server, elsewhere):
            await until_missing_one(each)
        await node.start()
        for each in (server, elsewhere):
            await all_ready(each)
    await elsewhere.release(NAME, held.lease_id)
    assert (await waiter.lease()).fencing_token > held.fencing_token


async def test_a_waiter_that_missed_the_release_has_the_lock_by_the_end_of_the_ttl(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The notices are lost for good; the server goes by the time of the hold."""
    nodes = await formed_nodes(3)
    server, elsewhere = await proxied(nodes, serve), await serve(nodes)
    held = (await elsewhere.acquire(NAME, ttl_ms=3_000)).lease
    granted_at_ms = now_ms()
    [waiter] = await line_up(server, NAME, 1)
    for proxy in server.proxies:
        proxy.refuse()
    await elsewhere.release(NAME, held.lease_id)
    for proxy in server.proxies:
        await proxy.heal()
    await until_connected(server)
    assert (await waiter.lease()).fencing_token == held.fencing_token + 1
    # Late by what a machine may stand still; nothing else would wake it before its wait is over.
    assert waiter.answered_at_ms <= granted_at_ms + 3_000 + 2_000


async def test_all_waiters_of_a_server_that_loses_its_quorum_are_told_at_once(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """All of them at once, with UNAVAILABLE, and not each after the one before."""
    server = await proxied(await formed_nodes(3), serve, node_timeout_ms=NODE_TIMEOUT_MS)
    await server.acquire(NAME, ttl_ms=3_000)
    async with SessionCaller(server) as session:
        # As commands of one message, or the hold might end before the last of them has come.
        waiters = await line_up(server, NAME, 20, session=session)
        for proxy in server.proxies[1:]:
            proxy.drop()
        failures = [await waiter.failure() for waiter in waiters]
    assert {failure.reason for failure in failures} == {ERROR_REASON_QUORUM_UNAVAILABLE}
    assert all(failure.is_retryable for failure in failures)
    answered = [waiter.answered_at_ms for waiter in waiters]
    # Twenty tries, one after another, would take a node timeout each.
    assert max(answered) - min(answered) < NODE_TIMEOUT_MS
