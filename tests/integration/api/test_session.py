"""Session over real nodes and real gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from harness.load.failures import Failure
from harness.load.session_caller import SessionCaller, StreamEndedError
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    acquire_request,
    locks_left,
    new_lease_id,
    now_ms,
    until,
    until_no_locks,
)
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ACQUIRE_OUTCOME_HELD,
    ACQUIRE_OUTCOME_WAIT_TIMEOUT,
    ERROR_REASON_CANCELLED,
    LEASE_STATE_ACTIVE,
    LEASE_STATE_LOST,
    RELEASE_OUTCOME_NOT_HELD,
    RELEASE_OUTCOME_RELEASED,
)

NAME = "orders/42"
TTL_MS = 10_000


async def test_every_command_does_what_the_unary_call_of_its_name_does(
    server: LockServer, session: SessionCaller
) -> None:
    sent_at_ms = now_ms()
    granted = (await session.acquire(NAME, ttl_ms=TTL_MS, holder="billing-7")).acquire
    took_ms = now_ms() - sent_at_ms
    assert granted.outcome == ACQUIRE_OUTCOME_GRANTED
    lease = granted.lease
    assert TTL_MS - 102 <= lease.validity.ToMilliseconds() <= TTL_MS - 102 + took_ms
    held = (await session.acquire(NAME)).acquire
    assert (held.outcome, held.current.holder) == (ACQUIRE_OUTCOME_HELD, "billing-7")
    timed_out = (await session.acquire(NAME, wait_ms=50)).acquire
    assert timed_out.outcome == ACQUIRE_OUTCOME_WAIT_TIMEOUT
    renewed = (await session.renew(NAME, lease.lease_id)).renew
    assert (renewed.state, renewed.fencing_token) == (LEASE_STATE_ACTIVE, lease.fencing_token)
    assert (await session.release(NAME, new_lease_id())).release.outcome == RELEASE_OUTCOME_NOT_HELD
    assert (await session.release(NAME, lease.lease_id)).release.outcome == RELEASE_OUTCOME_RELEASED
    assert (await session.release(NAME, lease.lease_id)).release.outcome == RELEASE_OUTCOME_NOT_HELD
    assert (await session.renew(NAME, lease.lease_id)).renew.state == LEASE_STATE_LOST
    assert session.answered == list(range(1, session.last_id + 1))
    await until_no_locks(server.nodes)


async def test_an_empty_message_is_ignored_and_an_answered_id_may_be_used_again(server: LockServer) -> None:
    call = server.locks.Session()
    for number in range(5):
        await call.write(lock_pb2.SessionRequest())
        command = lock_pb2.SessionCommand(id=7, acquire=acquire_request(f"{NAME}/{number}"))
        await call.write(lock_pb2.SessionRequest(commands=[command]))
        response = await call.read()
        assert isinstance(response, lock_pb2.SessionResponse)
        assert [(result.id, result.acquire.outcome) for result in response.results] == [
            (7, ACQUIRE_OUTCOME_GRANTED)
        ]
    call.cancel()


async def test_a_cancel_of_anything_but_an_unanswered_acquire_finds_nothing(
    server: LockServer, session: SessionCaller
) -> None:
    """Here 0 and 999 are unknown, 1 is an answered acquire, and 3 is the cancel itself."""
    lease = (await session.acquire(NAME)).acquire.lease
    for command_id in (0, 1, 3, 999):
        assert (await session.cancel_command(command_id)).cancel.found is False
    assert (await server.check(NAME, lease.fencing_token)).state == lock_pb2.TOKEN_STATE_LIVE


async def test_an_acquire_cancelled_in_the_same_message_is_answered_once_and_leaves_no_key(
    server: LockServer, session: SessionCaller
) -> None:
    """Either the outcome or the cancel comes first. The answer matches what the nodes hold."""
    for _ in range(30):
        acquiring = session.acquire(NAME)
        cancelled = session.cancel_command(session.last_id)
        answer = await acquiring
        await cancelled
        if answer.WhichOneof("result") == "acquire":
            assert await server.release(NAME, answer.acquire.lease.lease_id) == RELEASE_OUTCOME_RELEASED
        else:
            assert Failure.of_message(answer.error).reason == ERROR_REASON_CANCELLED
        await until_no_locks(server.nodes)


async def test_an_acquire_whose_cancel_comes_first_in_the_same_message_is_answered(
    server: LockServer, session: SessionCaller
) -> None:
    """The acquire has not begun by then. The stream ends when everything is answered."""
    for _ in range(3):
        cancelled = session.cancel_command(session.last_id + 2)
        acquiring = session.acquire(NAME, wait_ms=30_000)
        assert (await cancelled).cancel.found is True
        assert (await acquiring).error.reason == ERROR_REASON_CANCELLED
    last = session.acquire(NAME)
    session.half_close()
    granted = (await last).acquire
    assert granted.outcome == ACQUIRE_OUTCOME_GRANTED
    assert await session.ended() is None
    assert await server.release(NAME, granted.lease.lease_id) == RELEASE_OUTCOME_RELEASED


async def test_a_half_closed_session_answers_everything_outstanding_and_ends_with_ok(
    server: LockServer, session: SessionCaller
) -> None:
    lease = (await server.acquire(NAME)).lease
    waiting = session.acquire(NAME, wait_ms=30_000)
    others = [session.acquire(f"others/{number}") for number in range(20)]
    session.half_close()
    await asyncio.gather(*others)
    await server.until_waiting(NAME)
    await server.release(NAME, lease.lease_id)
    granted = (await waiting).acquire
    assert granted.outcome == ACQUIRE_OUTCOME_GRANTED
    assert await session.ended() is None
    assert await server.release(NAME, granted.lease.lease_id) == RELEASE_OUTCOME_RELEASED


async def test_a_stream_that_never_pauses_is_told_of_the_drain_and_ended(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """Two hundred renewals under way at any time do not delay the end for the whole grace."""
    server = await serve(await formed_nodes(3))
    async with SessionCaller(server) as session:
        lease = (await session.acquire(NAME, ttl_ms=60_000)).acquire.lease
        renewals = 0

        async def renew_for_ever() -> None:
            nonlocal renewals
            while True:
                assert (await session.renew(NAME, lease.lease_id)).renew.state == LEASE_STATE_ACTIVE
                renewals += 1

        busy = [asyncio.create_task(renew_for_ever()) for _ in range(200)]
        await eventually(lambda: renewals > 1_000)
        drained = server.drain(grace_ms=60_000)
        failure = await session.ended()
        # gRPC's own client fails with INTERNAL if it was writing at that moment, and may lose the notice.
        assert session.draining is not None or (failure and failure.code() is grpc.StatusCode.INTERNAL)
        await asyncio.wait_for(drained, timeout=5)
        ends = await asyncio.gather(*busy, return_exceptions=True)
        assert {type(each) for each in ends} == {StreamEndedError}


async def test_a_drain_answers_the_commands_that_are_under_way(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The server grants an acquire whose mint is under way, then gives notice and ends the stream with OK."""
    # No heartbeat may pass between the server and the nodes.
    server = await serve(
        await formed_nodes(3), proxied=True, node_timeout_ms=5_000, heartbeat_interval_ms=60_000
    )
    await server.until_states(*[lock_pb2.NODE_STATE_READY] * 3)
    for proxy in server.proxies:
        proxy.hold(requests=False)
    async with SessionCaller(server) as session:
        acquiring = session.acquire(NAME)

        await eventually(lambda: all(proxy.replies.kept_bytes for proxy in server.proxies))
        drained = server.drain(grace_ms=5_000)

        async def refuses_new_calls() -> bool:
            try:
                await server.status()
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAVAILABLE
            return False

        await until(refuses_new_calls)
        assert not acquiring.done()
        for proxy in server.proxies:
            await proxy.heal()
        assert (await acquiring).acquire.outcome == ACQUIRE_OUTCOME_GRANTED
        assert await session.ended() is None
        assert session.draining is not None
        assert session.draining.grace.ToMilliseconds() == 10_000  # the default
        await asyncio.wait_for(drained, timeout=5)


@pytest.mark.slow
async def test_grants_that_a_peer_was_never_told_of_are_undone_with_its_stream(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A peer that does not read leaves at most the locks whose grants fitted on the wire."""
    count, name = 2_000, "n" * 240
    nodes = await formed_nodes(3)
    server = await serve(nodes)
    # The smallest window that gRPC grants a stream, and no probing for more.
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with grpc.aio.insecure_channel(server.target, options=small_window) as channel:
        session = lock_pb2_grpc.LockServiceStub(channel).Session()
        for start in range(0, count, 50):
            commands = [
                lock_pb2.SessionCommand(
                    id=1 + number, acquire=acquire_request(f"{name}{number}", ttl_ms=60_000)
                )
                for number in range(start, start + 50)
            ]
            await session.write(lock_pb2.SessionRequest(commands=commands))

        async def all_locked() -> bool:
            return len(await locks_left(nodes[:1])) == count

        async def only_what_was_told() -> bool:
            return len(await locks_left(nodes[:1])) < count / 2

        await until(all_locked, timeout_s=20)
        session.cancel()
        await until(only_what_was_told)
