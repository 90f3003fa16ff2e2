"""`redfence dev` as a real process: one command, one line, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
from pathlib import Path

import pytest

import redfence
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.time.eventually import eventually
from redfence_storage.client import AsyncStorageClient

READY = r"^redfence ready: lock server on (\S+), storage on (\S+), (\d) nodes in (\S+); Ctrl-C stops all$"


async def start_dev(commands: CommandProcesses, *options: str) -> tuple[CommandProcess, re.Match[str]]:
    dev = commands.start_redfence(
        *("dev", "--listen", "127.0.0.1:0", "--storage-listen", "127.0.0.1:0", *options)
    )
    return dev, await dev.wait_for_line(READY, timeout_s=30)


def descendants(pid: int) -> set[int]:
    """Every process that descends from this one, by the kernel's own account."""
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_dev_serves_on_a_real_quorum_and_a_signal_leaves_no_process_and_no_file(
    commands: CommandProcesses, number: signal.Signals
) -> None:
    """One command gives a lock and a storage; Ctrl-C and SIGTERM end all of it with status 0."""
    dev, ready = await start_dev(commands)
    server, storage_address, count, folder = ready.groups()
    assert count == "3"
    async with redfence.AsyncClient(server) as locks, AsyncStorageClient(storage_address) as storage:
        async with locks.lock("orders/42", ttl=5, wait=0) as lease:
            assert (
                await storage.put("orders/42", key="k", value=b"v", token=lease)
            ).highest_token == lease.token
        assert [node.state.name for node in (await locks.cluster_status()).nodes] == ["READY"] * 3
    family = descendants(dev.pid)
    assert len(family) >= 4, "three nodes and the storage"

    assert await dev.stop(number=number, timeout_s=20) == 0

    assert dev.stdout.count("\n") == 1, "one line, and no more"
    assert "Traceback" not in dev.stderr
    assert not running(family)
    assert not Path(folder).exists()


@pytest.mark.slow
async def test_kill_9_of_dev_leaves_no_process(commands: CommandProcesses) -> None:
    """Nodes and storage die with their parent, however it dies."""
    dev, _ = await start_dev(commands)
    family = descendants(dev.pid)
    dev.kill()
    await eventually(lambda: not running(family), timeout_s=10)


@pytest.mark.slow
async def test_a_signal_during_the_start_ends_dev_in_order(commands: CommandProcesses) -> None:
    """Whoever presses Ctrl-C before the ready line gets an orderly end as well."""
    dev = commands.start_redfence("dev", "--listen", "127.0.0.1:0", "--storage-listen", "127.0.0.1:0")
    await eventually(lambda: bool(descendants(dev.pid)), timeout_s=10)
    family = descendants(dev.pid)
    assert await dev.stop(timeout_s=20) == 0
    assert "Traceback" not in dev.stderr
    assert not running(family)


@pytest.mark.slow
async def test_a_data_directory_keeps_tokens_and_values_for_the_next_start(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """After a restart on the same directory tokens go on rising and the storage still refuses the old ones."""
    folder = tmp_path / "data"
    tokens = []
    for _ in range(2):
        dev, ready = await start_dev(commands, "--data-dir", str(folder), "--nodes", "5")
        assert ready.group(3) == "5"
        async with (
            redfence.AsyncClient(ready.group(1)) as locks,
            AsyncStorageClient(ready.group(2)) as storage,
            locks.lock("orders/42", ttl=5, wait=0) as lease,
        ):
            tokens.append(lease.token)
            assert (await storage.fence("orders/42", token=lease)).highest_token == lease.token
        assert await dev.stop(timeout_s=20) == 0
    assert tokens[1] > tokens[0]


@pytest.mark.slow
async def test_two_dev_servers_on_one_data_directory_are_refused(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """The second says which directory and which process, and does not touch the first."""
    folder = tmp_path / "data"
    first, ready = await start_dev(commands, "--data-dir", str(folder))
    second = commands.start_redfence(
        *("dev", "--listen", "127.0.0.1:0", "--storage-listen", "127.0.0.1:0", "--data-dir", str(folder))
    )
    assert await second.wait(timeout_s=30) == 2
    assert "is in use by another server" in second.stderr
    assert second.stderr.count("\n") == 1
    async with redfence.AsyncClient(ready.group(1)) as locks:
        await (await locks.acquire("orders/42", ttl=5, wait=0)).release()
    assert await first.stop(timeout_s=20) == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", ["2", "4", "0", "9"])
async def test_a_number_of_nodes_that_makes_no_quorum_is_refused(
    commands: CommandProcesses, count: str
) -> None:
    """An even number, none, or too many: one line that says what can be."""
    dev = commands.start_redfence("dev", "--nodes", count, "--listen", "127.0.0.1:0")
    assert await dev.wait(timeout_s=30) == 2
    assert "1, 3, 5 or 7" in dev.stderr
    assert dev.stderr.count("\n") == 1


@pytest.mark.slow
async def test_a_port_in_use_is_a_clear_error_and_leaves_nothing_running(commands: CommandProcesses) -> None:
    """Each of the two ports is named with its setting; the nodes started meanwhile are gone."""
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    for option, named in (("--listen", "listen"), ("--storage-listen", "storage")):
        addresses = {
            "--listen": "127.0.0.1:0",
            "--storage-listen": "127.0.0.1:0",
            option: f"127.0.0.1:{port}",
        }
        dev = commands.start_redfence("dev", *(word for pair in addresses.items() for word in pair))
        assert await dev.wait(timeout_s=30) == 2
        assert named in dev.stderr
        assert str(port) in dev.stderr
        assert "Traceback" not in dev.stderr
    listener.close()
    await listener.wait_closed()


@pytest.mark.slow
async def test_data_without_one_node_of_three_serves_and_the_node_is_named(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """The other two remember, and let each other in; the empty one is quarantined and comes back by itself."""
    folder = tmp_path / "data"
    dev, _ = await start_dev(commands, "--data-dir", str(folder))
    assert await dev.stop(timeout_s=20) == 0
    shutil.rmtree(folder / "node-1")
    dev, _ = await start_dev(commands, "--data-dir", str(folder))
    assert await dev.stop(timeout_s=20) == 0
    assert "never formed, or wiped" in dev.stderr
