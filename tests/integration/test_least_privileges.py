"""The access list in docs/operations.md is enough."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from harness.load.waiters import TTL_MS, line_up
from harness.processes.commands import CommandProcesses
from harness.processes.fixture_types import FlushedNodes, FreshNodes
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import LockServer, acquire_request, form, until, until_all_ready
from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_server import composition, config
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations import forming
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.scripts import Keyspace

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def documented_rules() -> list[str]:
    """The rules as an operator would copy them."""
    found = re.search(r"^ACL SETUSER redfence on >PASSWORD (.*)$", OPERATIONS.read_text(), re.MULTILINE)
    assert found
    return found[1].split()


NOTICES = {"&redfence:notice:*", "+subscribe", "+publish", "+hello"}


@asynccontextmanager
async def restricted(
    nodes: Sequence[RedisNode], rules: Sequence[str], *, ttl_ms_max: int = bounds.TTL_MS_MAX_DEFAULT
) -> AsyncIterator[tuple[str, ...]]:
    """Give each node a user with these rights, form a cluster as that user, and yield the URLs."""
    for node in nodes:
        assert await node.call("ACL", "SETUSER", "redfence", "reset", "on", ">secret", *rules) == b"OK"
    urls = tuple(f"redis://redfence:secret@127.0.0.1:{node.port}" for node in nodes)
    try:
        await forming.form(
            check_urls(urls),
            keys=Keyspace(),
            ttl_ms_max=ttl_ms_max,
            randomness=SystemRandomness(),
        )
        yield urls
    finally:
        for node in nodes:
            await node.call("ACL", "DELUSER", "redfence")


@asynccontextmanager
async def server_over(urls: Sequence[str], **settings: Any) -> AsyncIterator[LockServer]:
    """Serve over these nodes."""
    async with (
        composition.lock_server(config.load({"nodes": urls, "listen": "127.0.0.1:0", **settings})) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        yield LockServer(channel, running=running)


@asynccontextmanager
async def two_servers(urls: Sequence[str]) -> AsyncIterator[tuple[LockServer, LockServer]]:
    """Serve twice over the same nodes, all of them ready."""
    async with AsyncExitStack() as stack:
        servers = []
        for _ in range(2):
            servers.append(await stack.enter_async_context(server_over(urls)))
            await servers[-1].until_states(*[lock_pb2.NODE_STATE_READY] * len(urls))
        yield servers[0], servers[1]


@pytest.mark.slow
async def test_the_documented_access_list_is_enough_for_forming_serving_and_every_call(
    flushed_nodes: FlushedNodes,
) -> None:
    """A user with exactly those rights can do all that servers do."""
    nodes = await flushed_nodes(3)
    async with restricted(nodes, documented_rules()) as urls:
        settings = config.load({"nodes": urls, "listen": "127.0.0.1:0"})
        async with (
            composition.lock_server(settings) as running,
            grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
        ):
            locks = lock_pb2_grpc.LockServiceStub(channel)
            lease = (await locks.Acquire(acquire_request("orders/42"))).lease
            assert lease.fencing_token == 1
            # No two nodes agree, so whichever answers first, the grant needs a commit.
            await nodes[0].call("SET", "redfence:counter:orders/43", 7)
            await nodes[1].call("SET", "redfence:counter:orders/43", 8)
            assert (await locks.Acquire(acquire_request("orders/43"))).lease.fencing_token in {8, 9}
            held = await locks.Acquire(acquire_request("orders/42"))
            assert held.outcome == lock_pb2.ACQUIRE_OUTCOME_HELD
            renewals = locks.KeepAlive()
            await renewals.write(lock_pb2.KeepAliveRequest(resource="orders/42", lease_id=lease.lease_id))
            renewed = await renewals.read()
            assert isinstance(renewed, lock_pb2.KeepAliveResponse)
            assert renewed.state == lock_pb2.LEASE_STATE_ACTIVE
            await renewals.done_writing()
            token = lock_pb2.CheckTokenRequest(resource="orders/42", fencing_token=1)
            assert (await locks.CheckToken(token)).state == lock_pb2.TOKEN_STATE_LIVE
            release = lock_pb2.ReleaseRequest(resource="orders/42", lease_id=lease.lease_id)
            assert (await locks.Release(release)).outcome == lock_pb2.RELEASE_OUTCOME_RELEASED
            status = await lock_pb2_grpc.AdminServiceStub(channel).ClusterStatus(
                lock_pb2.ClusterStatusRequest()
            )
            assert [node.state for node in status.nodes] == [lock_pb2.NODE_STATE_READY] * 3


async def test_the_documented_access_list_lets_notices_through(flushed_nodes: FlushedNodes) -> None:
    """A release through another server wakes a waiter a minute before the lock would expire."""
    async with (
        restricted(await flushed_nodes(3), documented_rules()) as urls,
        two_servers(urls) as (here, elsewhere),
    ):
        held = (await here.acquire("orders/42", ttl_ms=TTL_MS)).lease
        [waiter] = await line_up(elsewhere, "orders/42", 1)
        await here.release("orders/42", held.lease_id)
        assert (await waiter.lease()).fencing_token == held.fencing_token + 1


@pytest.mark.slow
async def test_without_the_rights_to_notices_only_the_wake_up_by_another_server_fails(
    flushed_nodes: FlushedNodes,
) -> None:
    """A server hands locks over among its callers; a waiter elsewhere is served at the expiry."""
    rules = documented_rules()
    assert set(rules) > NOTICES
    fewer = [rule for rule in rules if rule not in NOTICES]
    with capture_logs() as logs:
        async with (
            restricted(await flushed_nodes(3), fewer) as urls,
            two_servers(urls) as (here, elsewhere),
        ):
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
    rules = documented_rules()
    assert await new.call("ACL", "SETUSER", "redfence", "reset", "on", ">secret", *rules) == b"OK"
    try:
        async with restricted(nodes, rules, ttl_ms_max=200) as urls:
            named = [flag for url in urls for flag in ("--node", url)]
            for node in nodes[1:]:
                await node.call("FLUSHALL")
            recover = commands.start_redfence("cluster", "recover", *named, "--floor", "auto", "--yes")
            assert await recover.wait(timeout_s=20) == 0, recover.stderr
            url = f"redis://redfence:secret@127.0.0.1:{new.port}"
            replace = commands.start_redfence("cluster", "replace", "1", url, *named, "--yes")
            assert await replace.wait(timeout_s=20) == 0, replace.stderr
            states = [await node.call("HGET", "redfence:node", "state") for node in (nodes[0], nodes[2], new)]
            assert states == [b"ready", b"ready", b"quarantined"]
    finally:
        await new.call("ACL", "DELUSER", "redfence")


@pytest.mark.slow
@pytest.mark.parametrize("mends", ["the right", "the word"])
async def test_a_server_that_may_not_read_settings_keeps_a_node_out_for_itself_alone(
    mends: str, fresh_nodes: FreshNodes
) -> None:
    """Another server can see the proof, so the node is not quarantined."""
    nodes = await fresh_nodes(3)
    await form(nodes)
    await nodes[0].restart()
    fewer = [rule for rule in documented_rules() if rule != "+config|get"]
    assert await nodes[0].call("ACL", "SETUSER", "redfence", "reset", "on", ">secret", *fewer) == b"OK"
    urls = [f"redis://redfence:secret@127.0.0.1:{nodes[0].port}", *(node.url for node in nodes[1:])]
    before = await nodes[0].call("HGETALL", "redfence:node")
    async with server_over(urls) as server:

        async def told() -> bool:
            return "+config|get" in (await server.status()).nodes[0].detail

        await until(told)
        report = (await server.status()).nodes
        assert "assume_durable" in report[0].detail
        assert [node.state for node in report[1:]] == [lock_pb2.NODE_STATE_READY] * 2
        lease = (await server.acquire("orders/42")).lease
        await server.release("orders/42", lease.lease_id)
        assert await nodes[0].call("HGETALL", "redfence:node") == before
        async with server_over([node.url for node in nodes]) as other:
            await until_all_ready(other)
        # As before, in the run that the other one has noted.
        assert "+config|get" in (await server.status()).nodes[0].detail
        if mends == "the right":
            await nodes[0].call("ACL", "SETUSER", "redfence", "+config|get")
            await until_all_ready(server)
    if mends == "the word":
        async with server_over(urls, assume_durable=True) as server:
            await until_all_ready(server)
            assert (await server.acquire("orders/42")).lease.fencing_token > lease.fencing_token
