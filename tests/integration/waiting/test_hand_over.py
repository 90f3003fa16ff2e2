"""The handover over real nodes: a release that mints for the next waiter in the same step."""

from __future__ import annotations

import asyncio

from harness.load.waiters import TTL_MS, line_up
from harness.processes.servers import (
    FormedNodes,
    Serve,
    until_all_ready,
    until_idle,
)
from harness.time.eventually import eventually
from redfence_proto.v1.lock_pb2 import (
    RELEASE_OUTCOME_NOT_HELD,
    RELEASE_OUTCOME_RELEASED,
    TOKEN_STATE_LIVE,
)

NAME = "orders/42"


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
