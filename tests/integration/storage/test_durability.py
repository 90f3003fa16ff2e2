"""What the storage acknowledged outlives kill -9 of its real process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from harness.processes.commands import CommandProcess, CommandProcesses
from harness.time.eventually import eventually
from redfence import RedfenceError, StaleTokenError
from redfence_storage.client import AsyncStorageClient
from redfence_storage.client_messages import GetResult

pytestmark = pytest.mark.slow

CALLERS = 32
# Enough for dozens of batches.
ACKNOWLEDGED_MIN = 500

Serve = Callable[[], Awaitable[tuple[CommandProcess, str]]]


@pytest.fixture
def serve(commands: CommandProcesses, tmp_path: Path) -> Serve:
    """Starts the storage, every time on the same file; returns it and its address."""

    async def start() -> tuple[CommandProcess, str]:
        file = ("--db", str(tmp_path / "storage.db"))
        process = commands.start_redfence("storage", *file, "--listen", "127.0.0.1:0")
        return process, (await process.wait_for_line(r"ready on (\S+)"))[1]

    return start


async def test_every_acknowledged_write_of_many_in_flight_is_there_after_kill_9(serve: Serve) -> None:
    """The storage is killed under load, twice in a row on one file."""
    acknowledged: dict[tuple[str, str], int] = {}
    for _ in range(2):
        process, target = await serve()
        async with AsyncStorageClient(target) as storage:
            token = max(acknowledged.values(), default=1) + CALLERS
            callers = [
                asyncio.create_task(write_until_it_fails(storage, number, token, acknowledged))
                for number in range(CALLERS)
            ]
            enough = len(acknowledged) + ACKNOWLEDGED_MIN
            await eventually(lambda: len(acknowledged) >= enough, timeout_s=30, interval_s=0.001)  # noqa: B023
            process.kill()
            await asyncio.gather(*callers)

    _, target = await serve()
    async with AsyncStorageClient(target) as storage:
        for (name, key), token in acknowledged.items():
            stored = await storage.get(name, key=key, unfenced=True)
            assert (stored.value, stored.written_token) == (b"%d" % token, token)
            assert stored.highest_token >= token


async def write_until_it_fails(
    storage: AsyncStorageClient, caller: int, token: int, acknowledged: dict[tuple[str, str], int]
) -> None:
    """Write one new key after another with growing tokens, as the holders of four resources would."""
    name = f"r{caller % 4}"
    while True:
        key = f"{caller}/{token}"
        try:
            await storage.put(name, key=key, value=b"%d" % token, token=token)
        except StaleTokenError as refusal:
            token = refusal.highest_token
        except RedfenceError:
            return
        else:
            acknowledged[name, key] = token
            token += 1


async def test_an_orderly_restart_keeps_everything_and_leaves_no_log_behind(
    serve: Serve, tmp_path: Path
) -> None:
    process, target = await serve()
    async with AsyncStorageClient(target) as storage:
        await storage.put("orders/42", key="k", value=b"v", token=7)
    assert await process.stop() == 0
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["storage.db"]
    _, target = await serve()
    async with AsyncStorageClient(target) as storage:
        assert await storage.get("orders/42", key="k", unfenced=True) == GetResult(b"v", 7, 7)
