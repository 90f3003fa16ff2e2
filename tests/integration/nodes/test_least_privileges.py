"""The access list in docs/operations.md is enough."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from harness.load.waiters import TTL_MS, line_up
from harness.processes.access_list import restricted
from harness.processes.commands import CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes, FreshNodes
from harness.processes.servers import form, identity_field, serving, until_all_ready
from redfence_proto.v1 import lock_pb2

NOTICES = ["&redfence:notice:*", "+subscribe", "+publish", "+hello"]


@pytest.mark.slow
async def test_the_documented_access_list_is_enough_for_forming_serving_and_every_call(
    flushed_nodes: FlushedNodes,
) -> None:
    """A release through one server wakes a waiter at the other, a minute before the lock would expire."""
    nodes = await flushed_nodes(3)
    async with restricted(nodes) as urls:
        await form(urls)
        async with serving(urls) as server, serving(urls) as elsewhere:
            await until_all_ready(server, elsewhere)
            lease = (await server.acquire("orders/42", ttl_ms=TTL_MS)).lease
            assert lease.fencing_token == 1
            # No two nodes agree, so whichever answers first, the grant needs a commit.
            await nodes[0].call("SET", "redfence:counter:orders/43", 7)
            await nodes[1].call("SET", "redfence:counter:orders/43", 8)
            assert (await server.acquire("orders/43")).lease.fencing_token in {8, 9}
            assert (await server.acquire("orders/42")).outcome == lock_pb2.ACQUIRE_OUTCOME_HELD
            renewals = server.locks.KeepAlive()
            await renewals.write(lock_pb2.KeepAliveRequest(resource="orders/42", lease_id=lease.lease_id))
            renewed = await renewals.read()
            assert isinstance(renewed, lock_pb2.KeepAliveResponse)
            assert renewed.state == lock_pb2.LEASE_STATE_ACTIVE
            await renewals.done_writing()
            assert (await server.check("orders/42", 1)).state == lock_pb2.TOKEN_STATE_LIVE
            [waiter] = await line_up(elsewhere, "orders/42", 1)
            released = await server.release("orders/42", lease.lease_id)
            assert released == lock_pb2.RELEASE_OUTCOME_RELEASED
            assert (await waiter.lease()).fencing_token == 2


@pytest.mark.slow
async def test_without_the_rights_to_notices_only_the_wake_up_by_another_server_fails(
    flushed_nodes: FlushedNodes,
) -> None:
    """A server hands locks over among its callers; a waiter elsewhere is served at the expiry."""
    with capture_logs() as logs:
        async with restricted(await flushed_nodes(3), without=NOTICES) as urls:
            await form(urls)
            async with serving(urls) as here, serving(urls) as elsewhere:
                await until_all_ready(here, elsewhere)
                # The waiter elsewhere must not see its end before the others have had their turns.
                ttl_ms = 3_000
                held = (await here.acquire("orders/42", ttl_ms=ttl_ms)).lease
                first, second = await line_up(here, "orders/42", 2, ttl_ms=ttl_ms)
                [last] = await line_up(elsewhere, "orders/42", 1)
                tokens = [held.fencing_token]
                assert await here.release("orders/42", held.lease_id) == lock_pb2.RELEASE_OUTCOME_RELEASED
                for waiter in (first, second):
                    tokens.append((await waiter.lease()).fencing_token)
                    await waiter.release()
                assert not last.done
                tokens.append((await last.lease()).fencing_token)
    assert tokens == sorted(set(tokens))
    refused = [entry for entry in logs if entry["event"] == "node_notices_refused"]
    assert sorted(entry["node_index"] for entry in refused) == [0, 0, 1, 1, 2, 2]


@pytest.mark.slow
async def test_the_documented_access_list_is_enough_for_what_operators_do(
    flushed_nodes: FlushedNodes, commands: CommandProcesses
) -> None:
    """That user recovers a majority that has forgotten, and replaces a node."""
    *nodes, new = await flushed_nodes(4)
    async with restricted([*nodes, new]) as (*urls, new_url):
        await form(urls, ttl_ms_max=200)
        for node in nodes[1:]:
            await node.call("FLUSHALL")
        flags = [*node_flags(urls), "--yes"]
        await commands.start_redfence("cluster", "recover", "--floor", "auto", *flags).ended()
        await commands.start_redfence("cluster", "replace", "1", new_url, *flags).ended()
        states = [await identity_field(node, "state") for node in (nodes[0], nodes[2], new)]
        assert states == [b"ready", b"ready", b"quarantined"]


@pytest.mark.slow
@pytest.mark.parametrize("mends", ["the right", "the word"])
async def test_a_server_that_may_not_read_settings_keeps_a_node_out_for_itself_alone(
    mends: str, fresh_nodes: FreshNodes
) -> None:
    """Another server can see the proof, so the node is not quarantined."""
    nodes = await fresh_nodes(3)
    await form(nodes)
    await nodes[0].restart()
    async with restricted(nodes[:1], without=["+config|get"]) as own:
        urls = [*own, *(node.url for node in nodes[1:])]
        before = await nodes[0].call("HGETALL", "redfence:node")
        async with serving(urls) as server:
            await server.until_detail(0, "+config|get")
            report = (await server.status()).nodes
            assert "assume_durable" in report[0].detail
            assert [node.state for node in report[1:]] == [lock_pb2.NODE_STATE_READY] * 2
            lease = (await server.acquire("orders/42")).lease
            await server.release("orders/42", lease.lease_id)
            assert await nodes[0].call("HGETALL", "redfence:node") == before
            async with serving(nodes) as other:
                await until_all_ready(other)
            # As before, in the run that the other one has noted.
            assert "+config|get" in (await server.status()).nodes[0].detail
            if mends == "the right":
                await nodes[0].call("ACL", "SETUSER", "redfence", "+config|get")
                await until_all_ready(server)
        if mends == "the word":
            async with serving(urls, assume_durable=True) as server:
                await until_all_ready(server)
                assert (await server.acquire("orders/42")).lease.fencing_token > lease.fencing_token
