"""Nodes that come back with what they knew earlier: an old copy of their disk, another machine's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from structlog.testing import capture_logs

from harness.failures import failure_of
from harness.fixture_types import FreshNodes, StartProxy
from harness.loaded_cluster import TTL_MS, loaded_cluster
from harness.node_data import copy_data, put_back
from harness.ports import HOST
from harness.redis_nodes import RedisNode
from harness.servers import LockServer, Serve, form, now_ms, serving, until, until_all_ready
from harness.tcp_proxy import TcpProxy
from harness.token_history import TokenHistory
from harness.vote_watch import VoteWatch
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    ERROR_REASON_QUORUM_UNAVAILABLE,
    NODE_STATE_QUARANTINED,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
)
from redfence_server import composition, config
from redfence_server.errors import NodeRejectedError

NAME = "orders/42"

pytestmark = pytest.mark.slow


@pytest.fixture
async def nodes(fresh_nodes: FreshNodes) -> list[RedisNode]:
    """Three nodes that fsync every write, formed with short quarantines."""
    nodes = await fresh_nodes(3)
    await form(nodes, ttl_ms_max=TTL_MS)
    return nodes


async def hold_once(server: LockServer, *, times: int = 1) -> int:
    """Acquire and release, and return the last token."""
    for _ in range(times):
        lease = (await server.acquire(NAME, ttl_ms=TTL_MS)).lease
        await server.release(NAME, lease.lease_id)
    return lease.fencing_token


async def until_granted(server: LockServer, history: TokenHistory) -> None:
    """Try, and not wait, until the lock is granted; write the grant down."""

    async def granted() -> bool:
        began_at_ms = now_ms()
        try:
            answer = await server.acquire(NAME, ttl_ms=TTL_MS)
        except grpc.aio.AioRpcError:
            return False  # no quorum yet
        if answer.outcome == ACQUIRE_OUTCOME_GRANTED:
            history.note(answer.lease, began_at_ms=began_at_ms)
        return answer.outcome == ACQUIRE_OUTCOME_GRANTED

    await until(granted)


async def until_admitted(node: RedisNode) -> None:
    """A server has admitted the node in its present run."""

    async def noted() -> bool:
        info = await node.call("INFO", "server")
        run_id = await node.call("HGET", "redfence:node", "run_id")
        assert isinstance(info, bytes)
        assert isinstance(run_id, bytes)
        return b"run_id:%b\r\n" % run_id in info

    await until(noted, timeout_s=10)


@asynccontextmanager
async def healed_after(task: asyncio.Task[None], proxy: TcpProxy) -> AsyncIterator[None]:
    """Heal the network once the task is done, while what is within goes on."""

    async def heal() -> None:
        await task
        await proxy.heal()

    healing = asyncio.create_task(heal())
    yield
    await healing


async def until_noted(nodes: Sequence[RedisNode], place: int, *, on: int) -> None:
    """One node knows how many changes another one has made."""

    async def noted() -> bool:
        made = await nodes[place].call("HGET", "redfence:node", "changes")
        told = await nodes[on].call("HGET", "redfence:node", f"changes:{place}")
        assert isinstance(made, bytes)
        return isinstance(told, bytes) and int(told) >= int(made)

    await until(noted)


async def test_a_node_that_went_back_while_no_server_ran_gives_no_vote_once_another_has_told_of_it(
    nodes: list[RedisNode], start_proxy: StartProxy, tmp_path: Path
) -> None:
    """It was admitted before anybody who knows could be asked, and shows too few changes with its first vote.

    The other one lacks the same numbers, so that vote would repeat them.
    """
    async with serving(nodes) as server:
        await until_all_ready(server)
        await hold_once(server)
        old = copy_data(nodes[0], tmp_path / "old")
        nodes[2].kill()
        last = await hold_once(server, times=3)
        await nodes[2].start()
        await until_all_ready(server)
        await until_noted(nodes, 0, on=2)
    nodes[0].kill()
    nodes[1].kill()
    put_back(nodes[0], old)
    await nodes[0].start()
    proxies = [await start_proxy(node) for node in nodes]
    proxies[2].refuse()
    admitted = asyncio.create_task(until_admitted(nodes[0]))
    # Its pulses, which would find out as well, come too late.
    async with (
        healed_after(admitted, proxies[2]),
        serving(nodes, proxies=proxies, pulse_interval_ms=60_000) as server,
    ):
        failure = await failure_of(server.acquire(NAME, ttl_ms=TTL_MS))
        assert failure.reason == ERROR_REASON_QUORUM_UNAVAILABLE
        await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_UNREACHABLE, NODE_STATE_READY)
        await nodes[1].start()
        await until_all_ready(server)
        assert await hold_once(server) > last


async def test_a_node_that_is_put_back_into_an_earlier_quarantine_sits_it_out_anew(
    nodes: list[RedisNode], serve: Serve, tmp_path: Path
) -> None:
    """What it has promised since is forgotten as well, so the lease that it stood for keeps the lock to its end."""
    server = await serve(nodes)
    await until_all_ready(server)
    await nodes[0].call("FLUSHALL")
    await hold_once(server)
    await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
    old = copy_data(nodes[0], tmp_path / "old")
    await until_all_ready(server)
    history = TokenHistory()
    await until_granted(server, history)
    # As if the mint had never reached it: for as long as it lasts, the lease stands on the first two nodes alone.
    await nodes[2].call("DEL", f"redfence:lock:{NAME}")
    nodes[0].kill()
    put_back(nodes[0], old)
    await nodes[0].start()
    await until_granted(server, history)
    history.check()
    history.check_exclusion()
    await until_all_ready(server)


async def test_a_server_that_saw_a_quarantine_which_another_one_has_ended_makes_the_node_sit_it_out_anew(
    nodes: list[RedisNode], serve: Serve, tmp_path: Path
) -> None:
    """It has waited long enough for the one before; this one comes out of an older copy of the data, and began when the node did."""
    driver, other = await serve(nodes), await serve(nodes, proxied=True)
    await until_all_ready(driver, other)
    await nodes[0].call("FLUSHALL")
    await hold_once(driver)
    for server in (driver, other):
        await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
    old = copy_data(nodes[0], tmp_path / "old")
    other.proxies[0].refuse()
    await until_all_ready(driver)
    history = TokenHistory()
    await until_granted(driver, history)
    # As if the mint had never reached it: for as long as it lasts, the lease stands on the first two nodes alone.
    await nodes[2].call("DEL", f"redfence:lock:{NAME}")
    nodes[0].kill()
    put_back(nodes[0], old)
    await nodes[0].start()
    await other.proxies[0].heal()
    await until_granted(other, history)
    history.check()
    history.check_exclusion()
    await until_all_ready(driver, other)


async def test_an_old_snapshot_is_noticed_by_what_servers_remember_and_by_the_floor_of_the_last_return(
    fresh_nodes: FreshNodes, serve: Serve, tmp_path: Path
) -> None:
    """Under load, and put back twice: the second time it is older than the node's last return, too."""
    async with loaded_cluster(await fresh_nodes(3), serve) as cluster:
        node = cluster.nodes[0]
        old = copy_data(node, tmp_path / "old")
        for times in (1, 2):
            # More than can be under way when it is killed, which nobody was told of.
            await cluster.load.until_granted(50)
            node.kill()
            put_back(node, old)
            await node.start()
            await cluster.until_quarantined(0, times=times)
            await until_all_ready(*cluster.servers)


async def test_an_old_snapshot_put_back_while_no_server_ran_is_noticed_by_what_the_other_nodes_have_noted(
    nodes: list[RedisNode], start_proxy: StartProxy, tmp_path: Path
) -> None:
    """Servers that know nothing themselves ask around before they let a node vote that was restarted."""
    async with serving(nodes) as server:
        await until_all_ready(server)
        await hold_once(server)
        old = copy_data(nodes[1], tmp_path / "old")
        last = await hold_once(server, times=3)
        await until_noted(nodes, 1, on=0)
        await until_noted(nodes, 1, on=2)
    nodes[1].kill()
    put_back(nodes[1], old)
    await nodes[1].start()
    # It is the first that is looked at.
    proxies = [await start_proxy(node) for node in nodes]
    for place in (0, 2):
        proxies[place].delay(requests_ms=20)
    with capture_logs() as logs:
        async with VoteWatch(nodes) as watch, serving(nodes, proxies=proxies) as server:
            await until_all_ready(server)
            assert await hold_once(server) > last
    # It was never taken for one that had only been restarted.
    assert "node_quarantined" in {entry["event"] for entry in logs}
    assert "node_run_noted" not in {entry["event"] for entry in logs}
    assert [len(quarantines) for quarantines in watch.quarantines] == [0, 1, 0]


# --- other machines under a node's address ----------------------------------------------------------------------------


async def test_a_failover_to_a_replica_and_back_is_noticed(fresh_nodes: FreshNodes, serve: Serve) -> None:
    """What the primary answered last may never have reached the replica; and what the replica did since, the primary does not know."""
    *nodes, replica = await fresh_nodes(4)
    async with loaded_cluster(nodes, serve, proxied=True) as cluster:
        await follow(replica, nodes[0])
        await cluster.until_served()
        await replica.call("REPLICAOF", "NO", "ONE")
        # It lags by what comes from now on.
        await cluster.load.until_granted(50)
        async with VoteWatch([replica]) as watch:
            await lead_to(replica, cluster.proxies(0), instead_of=nodes[0])

            async def quarantined() -> bool:
                return bool(watch.quarantines[0])

            await until(quarantined)
            await until_all_ready(*cluster.servers)
            await cluster.until_served()
        for proxy in cluster.proxies(0):
            proxy.forward_to(nodes[0].port)
        await cluster.until_quarantined(0)


async def test_a_node_of_another_place_under_a_nodes_address_gets_no_second_vote(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The address of one of three nodes leads to another of them; once it is right again the node votes at once."""
    async with loaded_cluster(await fresh_nodes(3), serve, proxied=True) as cluster:
        await lead_to(cluster.nodes[1], cluster.proxies(0), instead_of=cluster.nodes[0])
        for server in cluster.servers:
            await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
            assert "same process as node 1" in (await server.status()).nodes[0].detail
        await cluster.until_served()
        for proxy in cluster.proxies(0):
            proxy.forward_to(cluster.nodes[0].port)
    assert cluster.watch.quarantines == [set(), set(), set()]


async def lead_to(node: RedisNode, proxies: Sequence[TcpProxy], *, instead_of: RedisNode) -> None:
    """Let the address of one node be another's, which takes the same password."""
    await node.call("ACL", "SETUSER", "default", f">{urlsplit(instead_of.url).password}")
    for proxy in proxies:
        proxy.forward_to(node.port)


async def follow(replica: RedisNode, primary: RedisNode) -> None:
    """Make one node a replica of another, and wait until it has all that the other has."""
    password = urlsplit(primary.url).password
    assert password is not None
    await replica.call("CONFIG", "SET", "masterauth", password)
    # It would wait for further replicas.
    await primary.call("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    await replica.call("REPLICAOF", HOST, primary.port)

    async def in_step() -> bool:
        info = await replica.call("INFO", "replication")
        return isinstance(info, bytes) and b"master_link_status:up" in info

    await until(in_step, timeout_s=15)


async def test_that_nodes_have_become_replicas_is_seen_while_nobody_asks_for_anything(
    nodes: list[RedisNode], serve: Serve
) -> None:
    """A replica answers whatever changes nothing; the status tells before the next acquire finds out."""
    server = await serve(nodes)
    await until_all_ready(server)
    # Of nobody, so it keeps what it has.
    await nodes[0].call("REPLICAOF", HOST, 1)
    await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
    assert "it is a replica" in (await server.status()).nodes[0].detail
    await nodes[0].call("REPLICAOF", "NO", "ONE")
    await until_all_ready(server)


@pytest.mark.parametrize("what", ["swapped", "named twice", "another database of one server", "evicts"])
async def test_a_server_does_not_start_with_a_node_that_is_not_what_it_is_taken_for(
    what: str, nodes: list[RedisNode], start_proxy: StartProxy
) -> None:
    """The message names the node and tells what it is."""
    proxies = [await start_proxy(node) for node in nodes]
    match what:
        case "swapped":
            await lead_to(nodes[1], proxies[2:], instead_of=nodes[2])
            await lead_to(nodes[2], proxies[1:2], instead_of=nodes[1])
            told = "was formed as node 2, but is configured as node 1"
        case "named twice":
            await lead_to(nodes[0], proxies[1:2], instead_of=nodes[1])
            # Whichever is found out first.
            told = "(was formed as node 0, .* is named twice|the same process as node 0)"
        case "another database of one server":
            await move_to_database(nodes[1], nodes[0], 1)
            await lead_to(nodes[0], proxies[1:2], instead_of=nodes[1])
            told = "the same process as node 0"
        case _:
            await nodes[1].call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru", "maxmemory", "100mb")
            told = "would drop keys when its memory is full .* set maxmemory-policy noeviction"
    urls = [proxy.url(node.url) for proxy, node in zip(proxies, nodes, strict=True)]
    if what == "another database of one server":
        urls[1] += "/1"
    settings = config.load({"nodes": urls, "listen": f"{HOST}:0"})
    with pytest.raises(NodeRejectedError, match=rf"^node 1 \({HOST}:{proxies[1].port}\): .*{told}"):
        async with composition.lock_server(settings):
            pytest.fail("it serves")


async def move_to_database(node: RedisNode, other: RedisNode, database: int) -> None:
    """Put what one node remembers into another database of another one."""
    for key in (b"redfence:node", b"redfence:high"):
        script = "redis.call('SELECT', ARGV[1]); return redis.call('RESTORE', KEYS[1], 0, ARGV[2])"
        dump = await node.call("DUMP", key)
        assert isinstance(dump, bytes)
        await other.call("EVAL", script, 1, key, database, dump)


async def test_a_node_that_has_dropped_keys_is_quarantined_and_one_that_may_drop_some_is_refused(
    fresh_nodes: FreshNodes, serve: Serve
) -> None:
    """The first server that looks at it takes its vote away from the other one as well, whose connection goes on."""

    async def set_memory(policy: str, limit: str) -> None:
        await cluster.nodes[0].call("CONFIG", "SET", "maxmemory-policy", policy, "maxmemory", limit)

    async def dropped() -> bool:
        info = await cluster.nodes[0].call("INFO", "stats")
        return isinstance(info, bytes) and b"evicted_keys:0\r" not in info

    async with loaded_cluster(await fresh_nodes(3), serve, proxied=True) as cluster:
        # Only what expires is dropped: holds and counters.
        await set_memory("volatile-lru", "1")
        await until(dropped)
        await set_memory("noeviction", "0")
        await cluster.until_served()
        cluster.servers[0].proxies[0].reset()
        await cluster.until_quarantined(0)
        await cluster.until_served()
        await until_all_ready(*cluster.servers)
        await set_memory("allkeys-lru", "100mb")
        for server in cluster.servers:
            server.proxies[0].reset()
            await server.until_states(NODE_STATE_QUARANTINED, NODE_STATE_READY, NODE_STATE_READY)
            assert "would drop keys" in (await server.status()).nodes[0].detail
        await cluster.until_served()
        await set_memory("noeviction", "0")
    assert [len(quarantines) for quarantines in cluster.watch.quarantines] == [1, 0, 0]
