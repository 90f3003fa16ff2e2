"""The examples that users copy do what they say, on servers of this test."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sqlite3
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

import redfence
import redfence.testing
import redfence_storage.client
from harness.doubles.grpc_fake import GrpcFake
from harness.processes.commands import CommandProcesses
from harness.processes.servers import LockServer
from harness.processes.storage_server import serving
from redfence import fence, propagation
from redfence_storage.client import AsyncStorageClient, StorageClient
from redfence_storage.client_messages import GetResult
from redfence_storage.group_commit import GroupCommit
from redfence_storage.sqlite_store import SqliteStore

# As the examples name them.
_LOCKS, _STORAGE = "127.0.0.1:50051", "127.0.0.1:50052"


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[str]:
    """The address of a storage."""
    async with serving(GroupCommit(SqliteStore.open(tmp_path / "storage.db"), queue_max=4)) as target:
        yield target


def _example(docstring: str | None) -> str:
    """Return the indented lines of a docstring's first example."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("    "))
    last = next((n for n, line in enumerate(lines[first:], first) if line and not line.startswith(" ")), None)
    return textwrap.dedent("\n".join(lines[first:last]))


async def _run(example: str, names: dict[str, Any]) -> None:
    """Run the lines as they stand; `await` is allowed."""
    code = compile(example, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if running := eval(code, names):
        await running


async def test_the_packages_own_example_writes_under_the_lock(fake: GrpcFake, storage: str) -> None:
    """What `help(redfence)` shows works with the product's own storage."""
    async with AsyncStorageClient(storage) as client:
        example = _example(redfence.__doc__).replace(_LOCKS, fake.address)
        await _run(example, {"redfence": redfence, "storage": client})
        assert await client.get("orders/42", key="total", unfenced=True) == GetResult(b"17", 1, 1)
    assert fake.server.hold_of("orders/42") is None


async def test_the_storage_clients_example_fences_and_writes(storage: str) -> None:
    """What `help(redfence_storage.client)` shows works with any lease."""
    example = _example(redfence_storage.client.__doc__).replace(_STORAGE, storage)
    with redfence.testing.FakeLockServer() as fake:
        names = {"StorageClient": StorageClient, "lease": fake.client().acquire("orders/42", ttl=10)}
        await asyncio.to_thread(asyncio.run, _run(example, names))
    async with AsyncStorageClient(storage) as client:
        assert await client.get("orders/42", key="state", unfenced=True) == GetResult(b"paid", 1, 1)


async def test_the_fakes_example_passes_as_the_test_that_it_is() -> None:
    """What `help(redfence.testing)` shows is a test, and green."""
    names = {"FakeLockServer": redfence.testing.FakeLockServer, "redfence": redfence, "pytest": pytest}
    await _run(_example(redfence.testing.__doc__), names)
    await asyncio.to_thread(cast(Callable[[], None], names["test_billing"]))


def _blocks(page: str, language: str) -> list[str]:
    """Return the blocks of one language of a page of docs/."""
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
async def test_each_example_of_the_sdks_page_is_a_program_that_runs(
    fake: GrpcFake, server: LockServer, commands: CommandProcesses
) -> None:
    of_admin = "ForceOutcome.NOT_HELD"
    printed = ["I hold orders/42", "highest_token <= ", "page 2", "", "token ", "report"]
    printed += [of_admin, "LeaseState.LOST"]
    for example, words in zip(_blocks("sdk.md", "python"), printed, strict=True):
        address = server.target if words == of_admin else fake.address
        environment = {"REDFENCE_SERVER": address}
        run = commands.start(sys.executable, "-W", "error", "-c", example, environment=environment)
        assert words in await run.ended()


def test_the_page_on_fences_shows_what_works() -> None:
    """Its blocks run in order, word for word; a holder that was paused is refused by the first of them."""
    blocks = _blocks("fence.md", "python")
    (recipe,) = _blocks("fence.md", "sql")
    with redfence.testing.FakeLockServer() as fake, closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(fence.create_table_sql())
        connection.execute("CREATE TABLE orders AS SELECT 42 AS id, 'new' AS state")
        connection.execute("CREATE TABLE fences AS SELECT 'orders/42' AS resource, 2 AS highest_token")
        names: dict[str, Any] = {"connection": connection, "redfence": redfence}
        names |= {"fence": fence, "propagation": propagation}
        with fake.client().lock("orders/42", ttl=60):
            states = []
            for block in blocks:
                exec(block, names)
                states += connection.execute("SELECT state FROM orders").fetchone()
            assert states == ["paid", "paid", "shipped"]
            fence.check(connection, 2, resource="orders/42")
            with pytest.raises(redfence.StaleTokenError):
                exec(blocks[0], names)
        for token, changed in ((1, 0), (2, 1), (3, 1)):
            given = {"resource": "orders/42", "token": token}
            assert connection.execute(recipe, given).rowcount == changed
