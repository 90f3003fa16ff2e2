"""The command `redfence storage` as an operator meets it."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from harness.processes.commands import CommandProcesses
from harness.processes.ports import free_port
from redfence_storage.client import AsyncStorageClient

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_says_once_where_it_serves_and_ends_with_0_at_a_signal(
    commands: CommandProcesses, tmp_path: Path, number: signal.Signals
) -> None:
    """One line on standard output, true from the moment it is read; health says SERVING; the signal ends it in good order."""
    db = tmp_path / "storage.db"
    process = commands.start_redfence("storage", "--db", str(db), "--listen", "127.0.0.1:0")
    ready = await process.wait_for_line(r"^redfence storage ready on (127\.0\.0\.1:\d+) \(db (.+)\)$")
    assert ready[2] == str(db)
    async with AsyncStorageClient(ready[1]) as storage, grpc.aio.insecure_channel(ready[1]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "redfence.storage.v1.StorageService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await storage.fence("orders/42", token=1)
    assert await process.stop(number=number) == 0
    assert process.stdout.count("\n") == 1


async def test_a_signal_right_behind_the_ready_line_is_an_orderly_end_too(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """Whoever reads the line may stop the storage at once."""
    process = commands.start_redfence(
        "storage", "--db", str(tmp_path / "storage.db"), "--listen", "127.0.0.1:0"
    )
    await process.wait_for_line("ready")
    assert await process.stop() == 0


async def test_options_come_from_the_environment_and_the_command_line_beats_it(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """A container needs no arguments."""
    port = free_port()
    environment = {
        "REDFENCE_STORAGE_DB": str(tmp_path / "environment.db"),
        "REDFENCE_STORAGE_LISTEN": f"127.0.0.1:{port}",
    }
    process = commands.start_redfence("storage", environment=environment)
    await process.wait_for_line(rf"ready on 127\.0\.0\.1:{port} \(db .*environment\.db\)")
    other = commands.start_redfence(
        "storage", "--db", str(tmp_path / "option.db"), "--listen", "127.0.0.1:0", environment=environment
    )
    await other.wait_for_line(r"option\.db")


async def test_a_file_that_another_storage_serves_is_refused_in_one_line(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """The second process ends with status 2 and says why; the first goes on."""
    options = ("--db", str(tmp_path / "storage.db"), "--listen", "127.0.0.1:0")
    first = commands.start_redfence("storage", *options)
    ready = await first.wait_for_line(r"ready on (\S+)")
    second = commands.start_redfence("storage", *options)
    assert await second.wait() == 2
    assert (
        second.stderr == f"redfence storage: cannot use {tmp_path}/storage.db: another process has it open; "
        "stop that process or use another path\n"
    )
    async with AsyncStorageClient(ready[1]) as storage:
        await storage.fence("orders/42", token=1)


async def test_a_port_in_use_is_refused_by_name(commands: CommandProcesses, tmp_path: Path) -> None:
    """Two storages never share a port."""
    first = commands.start_redfence("storage", "--db", str(tmp_path / "1.db"), "--listen", "127.0.0.1:0")
    listen = (await first.wait_for_line(r"ready on (\S+)"))[1]
    second = commands.start_redfence("storage", "--db", str(tmp_path / "2.db"), "--listen", listen)
    assert await second.wait() == 2
    assert f"redfence storage: cannot listen on {listen}" in second.stderr
    assert second.stdout == ""


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "no database file given; set --db PATH or REDFENCE_STORAGE_DB"),
        (("--db", "missing/storage.db"), "cannot use missing/storage.db: unable to open database file"),
        (("--db", "storage.db", "--listen", "7410"), "'7410' is not HOST:PORT"),
    ],
)
async def test_options_that_cannot_be_served_end_it_with_2_and_one_line(
    commands: CommandProcesses, options: tuple[str, ...], problem: str
) -> None:
    """An operator reads what to do, not a traceback."""
    process = commands.start_redfence("storage", *options)
    assert await process.wait() == 2
    assert process.stderr.startswith(f"redfence storage: {problem}")
    assert process.stderr.count("\n") == 1
