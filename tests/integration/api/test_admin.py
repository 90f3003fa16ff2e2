"""What operators see and end: AdminService over real nodes and real gRPC."""

from __future__ import annotations

import asyncio
from functools import partial

import grpc
import pytest
from structlog.testing import capture_logs

import redfence
from harness.load.failures import failure_of
from harness.processes.access_list import restricted
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    acquire_request,
    locks_left,
    until,
    until_no_locks,
)
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import (
    ACQUIRE_OUTCOME_GRANTED,
    FORCE_RELEASE_OUTCOME_NOT_HELD,
    FORCE_RELEASE_OUTCOME_OTHER_TOKEN,
    FORCE_RELEASE_OUTCOME_RELEASED,
    LEASE_STATE_LOST,
    LEASE_STATE_REASON_FORCED,
    LEASE_STATE_REASON_NOT_HELD,
    NODE_STATE_READY,
    NODE_STATE_UNREACHABLE,
)
from redfence_server.nodes import fault_log

NAME = "orders/42"


async def force(
    server: LockServer, token: int, *, resource: str = NAME, reason: str = ""
) -> lock_pb2.ForceReleaseResponse:
    """Call ForceRelease."""
    request = lock_pb2.ForceReleaseRequest(resource=resource, fencing_token=token, reason=reason)
    return await server.admin.ForceRelease(request)


async def listed(server: LockServer, prefix: str = "", *, size: int = 0) -> list[lock_pb2.ListedLock]:
    """Return all pages of ListLocks."""
    locks: list[lock_pb2.ListedLock] = []
    token = ""
    while True:
        request = lock_pb2.ListLocksRequest(prefix=prefix, page_size=size, page_token=token)
        page = await server.admin.ListLocks(request)
        locks += page.locks
        token = page.next_page_token
        if not token:
            return locks


async def renewed(server: LockServer, lease: lock_pb2.Lease) -> tuple[int, int]:
    """Renew a lease once over a new stream; return its state and the reason."""
    stream = server.locks.KeepAlive()
    await stream.write(lock_pb2.KeepAliveRequest(resource=lease.resource, lease_id=lease.lease_id))
    response = await stream.read()
    stream.cancel()
    assert isinstance(response, lock_pb2.KeepAliveResponse)
    return response.state, response.reason


async def test_a_forced_release_ends_the_lease_with_the_token_and_tells_its_holder(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """The waiter is granted at once, with a greater token. Any server says FORCED."""
    nodes = await formed_nodes(3)
    server = await serve(nodes)
    lease = (await server.acquire(NAME, ttl_ms=60_000, holder="stuck")).lease
    waiting = asyncio.create_task(server.acquire(NAME, ttl_ms=60_000, wait_ms=30_000))
    await server.until_waiting(NAME)
    ended = await force(server, lease.fencing_token, reason="its machine is gone")
    assert (ended.outcome, ended.HasField("current")) == (FORCE_RELEASE_OUTCOME_RELEASED, False)
    async with asyncio.timeout(5):
        following = await waiting
    assert following.outcome == ACQUIRE_OUTCOME_GRANTED
    assert following.lease.fencing_token > lease.fencing_token
    other = await serve(nodes)
    for each in (server, other):
        assert await renewed(each, lease) == (LEASE_STATE_LOST, LEASE_STATE_REASON_FORCED)
        assert (await renewed(each, following.lease))[0] != LEASE_STATE_LOST
    # The same call again finds the next lease, and leaves it alone.
    again = await force(other, lease.fencing_token)
    assert again.outcome == FORCE_RELEASE_OUTCOME_OTHER_TOKEN
    assert again.current.fencing_token == following.lease.fencing_token


async def test_a_forced_release_of_a_free_lock_or_another_token_changes_nothing(server: LockServer) -> None:
    assert (await force(server, 7)).outcome == FORCE_RELEASE_OUTCOME_NOT_HELD
    lease = (await server.acquire(NAME, holder="them")).lease
    for token in (lease.fencing_token - 1 or lease.fencing_token + 2, lease.fencing_token + 1, 2**53 - 1):
        other = await force(server, token)
        assert other.outcome == FORCE_RELEASE_OUTCOME_OTHER_TOKEN
        assert (other.current.holder, other.current.fencing_token) == ("them", lease.fencing_token)
    assert (await server.look(NAME)).current.fencing_token == lease.fencing_token
    await server.release(NAME, lease.lease_id)
    assert (await force(server, lease.fencing_token)).outcome == FORCE_RELEASE_OUTCOME_NOT_HELD
    assert await renewed(server, lease) == (LEASE_STATE_LOST, LEASE_STATE_REASON_NOT_HELD)


@pytest.mark.slow
async def test_a_node_that_missed_a_forced_release_hears_of_it_when_it_is_back(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """A quorum decides, without the node; it is no longer than one ttl behind anyway."""
    server = await serve(await formed_nodes(3), proxied=True)
    lease = (await server.acquire(NAME, ttl_ms=60_000)).lease
    server.proxies[0].refuse()
    await server.until_states(NODE_STATE_UNREACHABLE, NODE_STATE_READY, NODE_STATE_READY)
    assert (await force(server, lease.fencing_token)).outcome == FORCE_RELEASE_OUTCOME_RELEASED
    assert await locks_left(server.nodes[:1])
    await server.proxies[0].heal()
    await until_no_locks(server.nodes, timeout_s=15)


async def test_a_forced_release_with_a_malformed_field_names_it(server: LockServer) -> None:
    for request, field in (
        (lock_pb2.ForceReleaseRequest(fencing_token=1), "resource"),
        (lock_pb2.ForceReleaseRequest(resource=NAME), "fencing_token"),
        (lock_pb2.ForceReleaseRequest(resource=NAME, fencing_token=1, reason="a\nb"), "reason"),
        (lock_pb2.ForceReleaseRequest(resource=NAME, fencing_token=1, reason="x" * 257), "reason"),
    ):
        failure = await failure_of(server.admin.ForceRelease(request))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.metadata == {"field": field}


async def test_the_client_of_a_forced_lease_says_that_an_operator_ended_it(server: LockServer) -> None:
    async with redfence.AsyncClient(server.target) as client:
        lease = await client.acquire(NAME, ttl=3)
        assert (await force(server, lease.token)).outcome == FORCE_RELEASE_OUTCOME_RELEASED
        async with asyncio.timeout(5):
            await lease.lost.wait()
        with pytest.raises(redfence.LeaseLostError, match="an operator ended it") as lost:
            lease.raise_if_lost()
        assert lost.value.reason is redfence.LossReason.FORCED


async def test_a_list_has_every_held_lock_once_with_its_holder_and_token(server: LockServer) -> None:
    names = [f"jobs/{number}" for number in range(300)]
    granted = await asyncio.gather(*(server.acquire(name, holder=f"of {name}") for name in names))
    await server.acquire("other")
    for size in (0, 7):
        found = await listed(server, "jobs/", size=size)
        assert sorted(lock.resource for lock in found) == sorted(names)
    tokens = {response.lease.resource: response.lease.fencing_token for response in granted}
    for lock in found:
        assert (lock.current.holder, lock.current.fencing_token) == (
            f"of {lock.resource}",
            tokens[lock.resource],
        )
        assert 0 < lock.current.remaining.ToMilliseconds() <= 10_000
    secrets = {response.lease.lease_id.encode() for response in granted}
    assert not any(secret in lock.SerializeToString() for lock in found for secret in secrets)
    assert len(await listed(server)) == 301
    assert await listed(server, "nothing") == []


async def test_a_prefix_is_text_and_no_pattern(server: LockServer) -> None:
    for name in ("a*b", "axb", "a[x]b", "a?b", "a\\b", "*"):
        await server.acquire(name)
    for prefix, names in (
        ("a*", ["a*b"]),
        ("a[x]", ["a[x]b"]),
        ("a?", ["a?b"]),
        ("a\\", ["a\\b"]),
        ("*", ["*"]),
        ("[a]", []),
    ):
        assert [lock.resource for lock in await listed(server, prefix)] == names


async def test_a_lock_that_one_node_lacks_is_listed_and_one_of_a_minority_is_not(server: LockServer) -> None:
    """Whichever node is read first."""
    for number, node in enumerate(server.nodes):
        await server.acquire(f"lacks {number}")
        await _forget(node, f"lacks {number}")
        await server.acquire(f"only {number}")
        for other in server.nodes:
            if other is not node:
                await _forget(other, f"only {number}")
    found = sorted(lock.resource for lock in await listed(server))
    assert found == ["lacks 0", "lacks 1", "lacks 2"]


async def _forget(node: RedisNode, resource: str) -> None:
    """Delete a hold; its mint may arrive after the answer to the Acquire."""
    await until(partial(node.call, "DEL", f"redfence:lock:{resource}"))


async def test_a_list_goes_on_without_a_minority_and_fails_without_a_quorum(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    server = await serve(await formed_nodes(3), proxied=True)
    for number in range(60):
        await server.acquire(str(number))
    first = await server.admin.ListLocks(lock_pb2.ListLocksRequest(page_size=10))
    server.proxies[0].refuse()
    await server.until_states(NODE_STATE_UNREACHABLE, NODE_STATE_READY, NODE_STATE_READY)
    names = {lock.resource for lock in first.locks}
    token = first.next_page_token
    while token:
        page = await server.admin.ListLocks(lock_pb2.ListLocksRequest(page_size=10, page_token=token))
        names |= {lock.resource for lock in page.locks}
        token = page.next_page_token
    assert names == set(map(str, range(60)))
    server.proxies[1].refuse()
    await server.until_states(NODE_STATE_UNREACHABLE, NODE_STATE_UNREACHABLE, NODE_STATE_READY)
    failure = await failure_of(server.admin.ListLocks(lock_pb2.ListLocksRequest()))
    assert failure.reason == lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE


async def test_a_malformed_page_is_refused_with_its_field(server: LockServer) -> None:
    for request, field in (
        (lock_pb2.ListLocksRequest(prefix="{"), "prefix"),
        (lock_pb2.ListLocksRequest(page_size=51), "page_size"),
        *(
            (lock_pb2.ListLocksRequest(page_token=text), "page_token")
            for text in ("x", "é", "AAAA", "LDYsLDA=")
        ),
    ):
        failure = await failure_of(server.admin.ListLocks(request))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.metadata == {"field": field}


async def test_a_list_needs_the_right_to_scan_and_nothing_else_does(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    nodes = await formed_nodes(3)
    async with restricted(nodes) as urls:
        server = await serve(urls)
        await server.acquire(NAME)
        assert [lock.resource for lock in await listed(server)] == [NAME]
    async with restricted(nodes, without=["+scan"]) as urls:
        server = await serve(urls)
        failure = await failure_of(server.admin.ListLocks(lock_pb2.ListLocksRequest()))
        assert failure.metadata == {"nodes": "0=refused,1=refused"}
        token = (await server.look(NAME)).current.fencing_token
        assert (await force(server, token)).outcome == FORCE_RELEASE_OUTCOME_RELEASED


async def test_refused_scans_are_logged_once_for_each_fault_of_a_node(
    formed_nodes: FormedNodes, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch lists again and again, so each poll would write a line for each node."""
    monkeypatch.setattr(fault_log, "_QUIET_MS", 0)
    nodes = await formed_nodes(1)
    async with restricted(nodes, without=["+scan"]) as urls:
        server = await serve(urls)
        with capture_logs() as logs:
            for _ in range(20):
                await failure_of(server.admin.ListLocks(lock_pb2.ListLocksRequest()))
            await nodes[0].call("ACL", "SETUSER", "redfence", "+scan")
            for _ in range(20):
                await listed(server)
    told = [(entry["event"], entry["failures"]) for entry in logs if entry["event"].startswith("node_scan")]
    assert told == [("node_scan_refused", 1), ("node_scan_recovered", 20)]


async def test_open_streams_are_listed_with_their_peers_and_waiters(server: LockServer) -> None:
    async def pages(size: int) -> list[lock_pb2.OpenSession]:
        found: list[lock_pb2.OpenSession] = []
        token = ""
        while True:
            request = lock_pb2.ListSessionsRequest(page_size=size, page_token=token)
            page = await server.admin.ListSessions(request)
            assert len(page.sessions) <= size
            found += page.sessions
            token = page.next_page_token
            if not token:
                return found

    await server.acquire(NAME)
    session, keep_alive, idle = server.locks.Session(), server.locks.KeepAlive(), server.locks.Session()
    command = lock_pb2.SessionCommand(id=1, acquire=acquire_request(NAME, wait_ms=60_000))
    await session.write(lock_pb2.SessionRequest(commands=[command]))
    await server.until_waiting(NAME)
    for stream in (keep_alive, idle):
        await stream.initial_metadata()
    for size in (1, 2, 50):
        found = await pages(size)
        assert [each.number for each in found] == sorted(each.number for each in found)
        assert sorted((each.kind, each.unanswered, each.waiting) for each in found) == [
            (lock_pb2.SESSION_KIND_SESSION, 0, 0),
            (lock_pb2.SESSION_KIND_SESSION, 1, 1),
            (lock_pb2.SESSION_KIND_KEEP_ALIVE, 0, 0),
        ]
        assert all("127.0.0.1" in each.peer for each in found)
    for stream in (session, keep_alive, idle):
        stream.cancel()

    async def none_open() -> bool:
        return not await pages(50)

    await until(none_open)
    failure = await failure_of(server.admin.ListSessions(lock_pb2.ListSessionsRequest(page_token="x")))
    assert failure.metadata == {"field": "page_token"}
