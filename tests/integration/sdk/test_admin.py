"""What operators do through the SDK: the admin clients of asyncio and of threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

import pytest

import redfence
from harness.processes.servers import FormedNodes, LockServer, Serve
from redfence.testing import FakeLockServer
from redfence_server import lock_watch

NAME = "orders/42"
Kind = redfence.LockEventKind


class OfThreads:
    """The admin client of threads behind the face of the one of asyncio."""

    def __init__(self, *addresses: str) -> None:
        self._client = redfence.AdminClient(*addresses)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def list_locks(self, prefix: str = "") -> AsyncIterator[redfence.ListedLock]:
        for lock in await asyncio.to_thread(lambda: list(self._client.list_locks(prefix))):
            yield lock

    async def list_sessions(self) -> AsyncIterator[redfence.OpenSession]:
        for session in await asyncio.to_thread(lambda: list(self._client.list_sessions())):
            yield session

    async def watch_locks(self, *arguments: Any, **more: Any) -> AsyncIterator[redfence.LockChanges]:
        watch = self._client.watch_locks(*arguments, **more)
        try:
            while (changes := await asyncio.to_thread(next, watch, None)) is not None:
                yield changes
        finally:
            watch.close()

    async def force_release(self, *arguments: Any, **more: Any) -> redfence.ForceReport:
        return await asyncio.to_thread(self._client.force_release, *arguments, **more)


@pytest.fixture(params=[redfence.AsyncAdminClient, OfThreads])
async def admin(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Any]]:
    """Makes admin clients of each colour; they are closed with the test."""
    made: list[Any] = []

    def make(*addresses: str) -> Any:
        made.append(request.param(*addresses))
        return made[-1]

    yield make
    for client in made:
        await client.close()


def told(changes: Iterable[redfence.LockChanges]) -> list[tuple[Kind, str, int]]:
    return [(event.kind, event.resource, event.token) for each in changes for event in each.events]


async def test_an_operator_lists_and_watches_locks_and_ends_a_lease(
    server: LockServer, admin: Callable[..., Any]
) -> None:
    client = admin(server.target)
    token = (await server.acquire(NAME, holder="stuck")).lease.fencing_token
    await server.acquire("other")
    listed = [each async for each in client.list_locks("orders/")]
    assert [(each.resource, each.current.token, each.current.holder) for each in listed] == [
        (NAME, token, "stuck")
    ]
    seen: list[redfence.LockChanges] = []
    async with asyncio.timeout(5), aclosing(client.watch_locks("orders/", interval=0.1)) as watch:
        async for changes in watch:
            seen.append(changes)
            if len(seen) == 1:
                sessions = [each async for each in client.list_sessions()]
                report = await client.force_release(NAME, token, reason="gone")
            if Kind.FORCED in {kind for kind, _, _ in told(seen)}:
                break
    assert {each.kind for each in sessions} == {redfence.SessionKind.SESSION, redfence.SessionKind.WATCH}
    assert report == redfence.ForceReport(redfence.ForceOutcome.RELEASED, None)
    assert told(seen) == [(Kind.HELD, NAME, token), (Kind.FORCED, NAME, token)]
    first, last = seen[0].events[0], seen[-1].events[0]
    assert (first.holder, last.holder, last.remaining) == ("stuck", "stuck", None)
    assert first.remaining is not None
    assert 0 < first.remaining <= 10
    assert [each.is_first for each in seen] == [True] + [False] * (len(seen) - 1)
    times = [each.taken_at.timestamp() for each in seen if each.taken_at is not None]
    assert (len(times), times) == (len(seen), sorted(times))


async def test_a_watch_goes_on_at_another_server_with_the_locks_that_are_held(
    formed_nodes: FormedNodes, serve: Serve, admin: Callable[..., Any]
) -> None:
    nodes = await formed_nodes(3)
    servers = [await serve(nodes), await serve(nodes)]
    lease = (await servers[0].acquire(NAME, ttl_ms=60_000)).lease
    firsts = []
    client = admin(*(each.target for each in servers))
    async with asyncio.timeout(10), aclosing(client.watch_locks(interval=0.1)) as watch:
        async for changes in watch:
            if changes.is_first:
                firsts.append(told([changes]))
                if len(firsts) == 2:
                    break
                await servers[0].begin_drain()
    assert firsts == [[(Kind.HELD, NAME, lease.fencing_token)]] * 2


async def test_a_watch_fails_when_no_server_is_left_and_when_it_is_refused(
    server: LockServer, admin: Callable[..., Any]
) -> None:
    client = admin(server.target)
    with pytest.raises(redfence.InvalidArgumentError, match=r"at least 0\.1 s"):
        await anext(aiter(client.watch_locks(interval=0.01)))
    with pytest.raises(redfence.InvalidArgumentError, match="prefix"):
        await anext(aiter(client.watch_locks("{")))
    watches = [aiter(client.watch_locks(interval=60)) for _ in range(lock_watch.WATCHES_MAX // 2)]
    for watch in watches:
        await anext(watch)
    with pytest.raises(redfence.OverloadedError, match="8 open watches") as refused:
        await anext(aiter(client.watch_locks()))
    assert refused.value.scope == "peer"
    await server.begin_drain()
    with pytest.raises(redfence.UnavailableError):
        await anext(aiter(client.watch_locks()))


async def test_a_closed_client_ends_its_watch(server: LockServer, admin: Callable[..., Any]) -> None:
    client = admin(server.target)
    watch = client.watch_locks(interval=60)
    await anext(watch)
    following = asyncio.create_task(anext(watch))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(redfence.ClosedError):
        await following


async def test_the_server_in_memory_says_that_it_has_no_admin_service() -> None:
    with FakeLockServer() as fake:
        connector = fake.client()._session._driver._connector
        with (
            redfence.AdminClient("fake", connector=connector) as client,
            pytest.raises(redfence.WrongServiceError, match="no admin service"),
        ):
            next(client.list_locks())
        with (
            redfence.AdminClient("fake", connector=connector) as client,
            pytest.raises(redfence.WrongServiceError, match="no admin service"),
        ):
            next(client.watch_locks())
