"""The lock services that the client suite runs on, and both clients behind one face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import redfence
from harness.doubles.grpc_fake import serving
from harness.processes.commands import CommandProcess, CommandProcesses
from redfence.testing import FakeLockServer


@dataclass(frozen=True)
class Service:
    """Something that both clients can talk to.

    Attributes:
        make_client: makes a client for threads.
        make_async_client: makes a client for asyncio.
    """

    make_client: Callable[[], redfence.Client]
    make_async_client: Callable[[], redfence.AsyncClient]


def _at(address: str) -> Service:
    return Service(lambda: redfence.Client(address), lambda: redfence.AsyncClient(address))


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `redfence dev`: a real server on real nodes, one for all tests of a module."""
    commands = CommandProcesses(tmp_path_factory.mktemp("redfence-dev"))
    dev = commands.start_redfence("dev", "--listen", "127.0.0.1:0", "--storage-listen", "127.0.0.1:0")
    try:
        yield asyncio.run(_address_of(dev))
    finally:
        commands.close()


async def _address_of(dev: CommandProcess) -> str:
    return (await dev.wait_for_line(r"lock server on ([\d.:]+)", timeout_s=20))[1]


@pytest.fixture(params=["memory", "grpc", "server"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    if request.param == "memory":
        with FakeLockServer() as fake:
            yield Service(fake.client, fake.async_client)
    elif request.param == "grpc":
        with serving() as grpc_fake:
            yield _at(grpc_fake.address)
    else:
        yield _at(request.getfixturevalue("real_server"))


class Threaded:
    """The client for threads, or a part of it, with awaitable methods: each runs in a thread of its own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name in {"acquire", "release", "get_lock", "check_token", "cluster_status", "close"}:
            return lambda *args, **more: self._in_thread(value, *args, **more)
        return Threaded(value) if name == "lost" else value

    async def _in_thread(self, method: Callable[..., Any], *args: Any, **more: Any) -> Any:
        result = await asyncio.to_thread(method, *args, **more)
        return Threaded(result) if isinstance(result, redfence.Lease) else result

    async def wait(self) -> bool:
        return bool(await asyncio.to_thread(self.inner.wait))

    @asynccontextmanager
    async def lock(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
        lock = self.inner.lock(*args, **more)
        lease = await asyncio.to_thread(lock.__enter__)
        try:
            yield Threaded(lease)
        except BaseException as error:
            await asyncio.to_thread(lock.__exit__, type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(lock.__exit__, None, None, None)


@pytest.fixture(params=["asyncio", "threads"])
async def make_client(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[Callable[[], Any]]:
    """Makes clients of each colour in turn, on each service in turn; they are closed with the test."""
    made: list[Any] = []

    def make() -> Any:
        client = (
            service.make_async_client() if request.param == "asyncio" else Threaded(service.make_client())
        )
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


@pytest.fixture
def client(make_client: Callable[[], Any]) -> Any:
    return make_client()
