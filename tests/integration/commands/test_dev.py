"""`redfence dev` as a real process: one command, one line, and nothing left behind."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
from pathlib import Path

import pytest

import redfence
from harness.processes.commands import DEV, CommandProcesses
from harness.time.eventually import eventually
from redfence_storage.client import AsyncStorageClient

pytestmark = pytest.mark.slow


def descendants(pid: int) -> set[int]:
    """Return every process that descends from this one, by the kernel's own account."""
    found: set[int] = set()
    fresh = {pid}
    while fresh:
        children = set()
        for each in fresh:
            for path in Path(f"/proc/{each}/task").glob("*/children"):
                # A thread, or a process that was only asked for its version, may have ended just now.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    children |= set(map(int, path.read_text().split()))
        fresh = children - found
        found |= children
    return found


def running(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_dev_serves_on_a_real_quorum_and_a_signal_leaves_no_process_and_no_file(
    commands: CommandProcesses, number: signal.Signals
) -> None:
    """Ctrl-C and SIGTERM end the locks, the storage and the nodes with status 0."""
    dev, ready = await commands.start_dev()
    server, storage_address, count, folder = ready.groups()
    assert count == "3"
    async with redfence.AsyncClient(server) as locks, AsyncStorageClient(storage_address) as storage:
        async with locks.lock("orders/42", ttl=5, wait=0) as lease:
            written = await storage.put("orders/42", key="k", value=b"v", token=lease)
            assert written.highest_token == lease.token
        assert [node.state.name for node in (await locks.cluster_status()).nodes] == ["READY"] * 3
    family = descendants(dev.pid)
    assert len(family) >= 4, "three nodes and the storage"
    dev.send_signal(number)
    await dev.ended()
    assert dev.stdout.count("\n") == 1, "one line, and no more"
    assert not running(family)
    assert not Path(folder).exists()


async def test_kill_9_of_dev_leaves_no_process(commands: CommandProcesses) -> None:
    dev, _ = await commands.start_dev()
    family = descendants(dev.pid)
    dev.kill()
    await eventually(lambda: not running(family), timeout_s=10)


async def test_a_signal_during_the_start_ends_dev_in_order(commands: CommandProcesses) -> None:
    dev = commands.start_redfence(*DEV)
    await eventually(lambda: bool(descendants(dev.pid)), timeout_s=10)
    family = descendants(dev.pid)
    dev.send_signal(signal.SIGTERM)
    await dev.ended()
    assert not running(family)


async def test_a_data_directory_keeps_tokens_and_values_and_serves_one_dev_at_a_time(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """After a restart on the same directory tokens go on rising, and the storage still refuses old ones.

    A second server on the directory ends with one line, and does not touch the first.
    """
    directory = ("--data-dir", str(tmp_path / "data"))
    tokens = []
    for _ in range(2):
        dev, ready = await commands.start_dev(*directory, "--nodes", "5")
        assert ready[3] == "5"
        second = commands.start_redfence(*DEV, *directory)
        assert "is in use by another server" in await second.ended(status=2)
        assert second.stderr.count("\n") == 1
        async with (
            redfence.AsyncClient(ready[1]) as locks,
            AsyncStorageClient(ready[2]) as storage,
            locks.lock("orders/42", ttl=5, wait=0) as lease,
        ):
            tokens.append(lease.token)
            assert (await storage.fence("orders/42", token=lease)).highest_token == lease.token
        assert await dev.stop(timeout_s=20) == 0
    assert tokens[1] > tokens[0]


@pytest.mark.parametrize(("option", "named"), [("--listen", "listen"), ("--storage-listen", "storage")])
async def test_a_port_in_use_is_named_with_its_setting(
    commands: CommandProcesses, option: str, named: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        told = await commands.start_redfence(*DEV, option, f"127.0.0.1:{port}").ended(status=2)
    assert named in told
    assert str(port) in told


async def test_data_without_one_node_of_three_serves_and_the_node_is_named(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """The other two let each other in; the empty one is quarantined and comes back by itself."""
    folder = tmp_path / "data"
    for is_second in (False, True):
        if is_second:
            shutil.rmtree(folder / "node-1")
        dev, _ = await commands.start_dev("--data-dir", str(folder))
        assert await dev.stop(timeout_s=20) == 0
    assert "never formed, or wiped" in dev.stderr
