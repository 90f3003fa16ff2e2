"""The lock services that the client suite runs on, both clients behind one face, and the nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import redfence
from harness.doubles.grpc_fake import serving
from harness.load.threaded import Threaded
from harness.processes.commands import CommandProcesses
from harness.processes.fixture_types import FlushedNodes
from harness.processes.redis_nodes import ENGINES, RedisNode, engine_binary
from redfence.testing import FakeLockServer


@dataclass(frozen=True)
class Service:
    make_client: Callable[[], redfence.Client]
    make_async_client: Callable[[], redfence.AsyncClient]


def _at(address: str) -> Service:
    return Service(lambda: redfence.Client(address), lambda: redfence.AsyncClient(address))


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `redfence dev`: a real server on real nodes, one for all tests of a module."""
    commands = CommandProcesses(tmp_path_factory.mktemp("redfence-dev"))
    try:
        _, ready = asyncio.run(commands.start_dev())
        yield ready[1]
    finally:
        commands.close()


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


@pytest.fixture(params=["asyncio", "threads"])
async def make_client(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[Callable[[], Any]]:
    """Makes clients of each colour in turn, on each service in turn; they are closed with the test."""
    made: list[Any] = []

    def make() -> Any:
        waking = request.param == "asyncio"
        made.append(service.make_async_client() if waking else Threaded(service.make_client()))
        return made[-1]

    yield make
    for client in made:
        await client.close()


@pytest.fixture
def client(make_client: Callable[[], Any]) -> Any:
    return make_client()


@pytest.fixture(params=("fake", *ENGINES))
async def contract_node(request: pytest.FixtureRequest, flushed_nodes: FlushedNodes) -> RedisNode | None:
    """An empty node of each engine; and None, which stands for the fake node."""
    if request.param == "fake":
        return None
    binary = engine_binary(request.param)
    if binary is None:
        assert os.environ.get("REDFENCE_REQUIRE_REDIS") != "1", f"no {request.param} on this machine"
        pytest.skip(f"no {request.param} on this machine")
    (node,) = await flushed_nodes(1, binary=binary)
    return node
