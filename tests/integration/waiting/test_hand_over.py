"""The handover over real nodes: a release that mints for the next waiter in the same step."""

from __future__ import annotations

import asyncio

import pytest

from harness.load.waiters import TTL_MS, line_up
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    call_counts,
    until,
    until_all_ready,
    until_idle,
    until_no_locks,
)
from harness.time.eventually import eventually
from redfence_proto.v1.lock_pb2 import (
    RELEASE_OUTCOME_NOT_HELD,
    RELEASE_OUTCOME_RELEASED,
    TOKEN_STATE_LIVE,
    TOKEN_STATE_NOT_LIVE,
)

NAME = "orders/42"
LOCK_KEY = b"redfence:lock:orders/42"


@pytest.mark.slow
async def test_a_handover_takes_one_script_on_each_node_and_one_token(server: LockServer) -> None:
    await until_all_ready(server)
    holder = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    waiters = await line_up(server, NAME, 8)
    await until_idle(server.nodes)
    for waiter in waiters:
        before = await call_counts(server.nodes, "evalsha")
        assert await server.release(NAME, holder.lease_id) == RELEASE_OUTCOME_RELEASED
        lease = await waiter.lease()
        assert lease.fencing_token == holder.fencing_token + 1

        async def one_each(before: list[int] = before) -> bool:
            # A slow node runs its script after the grant.
            return await call_counts(server.nodes, "evalsha") == [count + 1 for count in before]

        await until(one_each)
        holder = lease
    assert (await server.check(NAME, holder.fencing_token)).state == TOKEN_STATE_LIVE
    assert (await server.check(NAME, holder.fencing_token - 1)).state == TOKEN_STATE_NOT_LIVE
    await server.release(NAME, holder.lease_id)
    await until_no_locks(server.nodes)


async def test_a_release_repeated_while_it_hands_over_is_told_not_held_and_ends_nothing(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The repetition comes through the same server and through another one."""
    nodes = await formed_nodes(3)
    # Only calls of the test may pass between the server and the nodes.
    server = await serve(nodes, proxied=True, node_timeout_ms=10_000, heartbeat_interval_ms=60_000)
    elsewhere = await serve(nodes, heartbeat_interval_ms=60_000)
    await until_all_ready(server)
    held = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
    first, second = await line_up(server, NAME, 2)
    # The server asks the nodes once after an arrival. The test must not count that.
    await until_idle(nodes)
    for proxy in server.proxies:
        proxy.hold(requests=False)
    releasing = [asyncio.create_task(server.release(NAME, held.lease_id))]
    await eventually(lambda: all(proxy.replies.kept_bytes for proxy in server.proxies))
    sent = [proxy.requests.taken_bytes for proxy in server.proxies]
    releasing.append(asyncio.create_task(server.release(NAME, held.lease_id)))
    await eventually(
        lambda: all(
            proxy.requests.taken_bytes > before for proxy, before in zip(server.proxies, sent, strict=True)
        )
    )
    assert await elsewhere.release(NAME, held.lease_id) == RELEASE_OUTCOME_NOT_HELD
    for proxy in server.proxies:
        await proxy.heal()
    assert await asyncio.gather(*releasing) == [RELEASE_OUTCOME_RELEASED, RELEASE_OUTCOME_NOT_HELD]
    lease = await first.lease()
    assert lease.fencing_token == held.fencing_token + 1
    assert await server.release(NAME, held.lease_id) == RELEASE_OUTCOME_NOT_HELD
    assert (await server.check(NAME, lease.fencing_token)).state == TOKEN_STATE_LIVE
    assert not second.done
    await first.release()
    assert (await second.lease()).fencing_token == lease.fencing_token + 1
