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
        process = commands.start_redfence(
            "storage", "--db", str(tmp_path / "storage.db"), "--listen", "127.0.0.1:0"
        )
        ready = await process.wait_for_line(r"ready on (\S+)")
        return process, ready[1]

    return start


async def test_a_put_and_its_token_are_there_after_kill_9_right_behind_the_acknowledgement(
    serve: Serve,
) -> None:
    """The value is read back, and the highest token still shuts the earlier holder out."""
    process, target = await serve()
    async with AsyncStorageClient(target) as storage:
        await storage.put("orders/42", key="k", value=b"v", token=7)
        process.kill()
    _, target = await serve()
    async with AsyncStorageClient(target) as storage:
        assert await storage.get("orders/42", key="k") == GetResult(b"v", 7, 7)
        with pytest.raises(StaleTokenError):
            await storage.put("orders/42", key="k", value=b"late", token=6)


async def test_a_fenced_read_and_a_fence_outlive_kill_9_like_a_write(serve: Serve) -> None:
    """A raise without data is as durable as one with."""
    process, target = await serve()
    async with AsyncStorageClient(target) as storage:
        await storage.put("read", key="k", value=b"v", token=1)
        await storage.get("read", key="k", token=2)
        await storage.fence("fenced", token=2)
        process.kill()
    _, target = await serve()
    async with AsyncStorageClient(target) as storage:
        for name in ("read", "fenced"):
            with pytest.raises(StaleTokenError):
                await storage.put(name, key="k", value=b"late", token=1)


async def test_every_acknowledged_write_of_many_in_flight_is_there_after_kill_9(serve: Serve) -> None:
    """Killed under load, twice in a row on one file: no acknowledged write and no token is missing."""
    acknowledged: dict[tuple[str, str], int] = {}
    token_from = 1
    for _ in range(2):
        process, target = await serve()
        async with AsyncStorageClient(target) as storage:
            callers = [
                asyncio.create_task(
                    write_until_it_fails(
                        storage,
                        f"r{number % 4}",
                        caller=number,
                        first_token=token_from,
                        acknowledged=acknowledged,
                    )
                )
                for number in range(CALLERS)
            ]
            enough = len(acknowledged) + ACKNOWLEDGED_MIN
            await eventually(lambda: len(acknowledged) >= enough, timeout_s=30, interval_s=0.001)  # noqa: B023
            process.kill()
            await asyncio.gather(*callers)
        token_from = max(acknowledged.values()) + CALLERS

    _, target = await serve()
    async with AsyncStorageClient(target) as storage:
        for name in {name for name, _ in acknowledged}:
            highest = max(token for (owner, _), token in acknowledged.items() if owner == name)
            assert (await storage.list_keys(name)).highest_token >= highest
        for (name, key), token in acknowledged.items():
            stored = await storage.get(name, key=key)
            assert (stored.value, stored.written_token) == (b"%d" % token, token)


async def write_until_it_fails(
    storage: AsyncStorageClient,
    name: str,
    *,
    caller: int,
    first_token: int,
    acknowledged: dict[tuple[str, str], int],
) -> None:
    """Write one new key after another with growing tokens, as four resources' holders in a hurry would."""
    token = first_token
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
    """SIGTERM ends it with status 0, and the file alone holds the data."""
    process, target = await serve()
    async with AsyncStorageClient(target) as storage:
        await storage.put("orders/42", key="k", value=b"v", token=7)
    assert await process.stop() == 0
    assert files_in(tmp_path) == ["storage.db"]
    _, target = await serve()
    async with AsyncStorageClient(target) as storage:
        assert await storage.get("orders/42", key="k") == GetResult(b"v", 7, 7)


def files_in(folder: Path) -> list[str]:
    """Return the names of the files, not of the folders."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_file())
