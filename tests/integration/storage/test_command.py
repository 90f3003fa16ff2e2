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
    """The line is true from the moment it is read, and health says SERVING. Flags beat the environment."""
    db = tmp_path / "storage.db"
    environment = {"REDFENCE_STORAGE_DB": "/nowhere/storage.db", "REDFENCE_STORAGE_LISTEN": "nowhere"}
    flags = ("--db", str(db), "--listen", "127.0.0.1:0")
    process = commands.start_redfence("storage", *flags, environment=environment)
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
    """Here the options come from the environment."""
    address, db = f"127.0.0.1:{free_port()}", tmp_path / "storage.db"
    environment = {"REDFENCE_STORAGE_DB": str(db), "REDFENCE_STORAGE_LISTEN": address}
    process = commands.start_redfence("storage", environment=environment)
    await process.wait_for_line(rf"ready on {address} \(db {db}\)")
    assert await process.stop() == 0


async def test_what_another_storage_uses_is_refused_in_one_line(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """Neither a file nor a port is shared; the second process ends with status 2, and the first goes on."""
    options = ("--db", str(tmp_path / "storage.db"), "--listen", "127.0.0.1:0")
    first = commands.start_redfence("storage", *options)
    listen = (await first.wait_for_line(r"ready on (\S+)"))[1]
    same_file = commands.start_redfence("storage", *options)
    same_port = commands.start_redfence("storage", "--db", str(tmp_path / "2.db"), "--listen", listen)
    told = await same_file.ended(status=2)
    reason = "another process has it open; stop that process or use another path"
    assert told == f"redfence storage: cannot use {tmp_path}/storage.db: {reason}\n"
    assert (await same_port.ended(status=2)).startswith(
        f"redfence storage: listen: cannot listen on {listen}"
    )
    async with AsyncStorageClient(listen) as storage:
        await storage.fence("orders/42", token=1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "no database file given; set --db PATH or REDFENCE_STORAGE_DB"),
        (("--db", "missing/storage.db"), "cannot use missing/storage.db: unable to open database file"),
        (("--db", "storage.db", "--listen", "7410"), "listen: '7410' is not HOST:PORT"),
    ],
)
async def test_options_that_cannot_be_served_end_it_with_2_and_one_line(
    commands: CommandProcesses, options: tuple[str, ...], problem: str
) -> None:
    process = commands.start_redfence("storage", *options)
    assert (await process.ended(status=2)).startswith(f"redfence storage: {problem}")
    assert process.stderr.count("\n") == 1


async def test_a_misspelt_variable_ends_it_with_2_instead_of_serving_without_protection(
    commands: CommandProcesses,
) -> None:
    process = commands.start_redfence(
        *("storage", "--db", "storage.db", "--listen", "127.0.0.1:0"),
        environment={"REDFENCE_POLICY_FIL": "/x"},
    )
    assert await process.ended(status=2) == (
        "redfence storage: environment: REDFENCE_POLICY_FIL is no setting; "
        "did you mean REDFENCE_POLICY_FILE?\n"
    )


async def test_a_variable_may_be_in_small_letters_as_for_the_server(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """One that was ignored here would leave the storage open, and the server protected."""
    process = commands.start_redfence(
        *("storage", "--db", "storage.db", "--listen", "127.0.0.1:0"),
        environment={"redfence_policy_file": str(tmp_path / "missing.toml")},
    )
    assert "policy_file: cannot read" in await process.ended(status=2)
