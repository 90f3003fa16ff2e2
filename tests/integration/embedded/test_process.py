"""One node process, from start to end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from harness.processes.ports import free_port
from redfence_server.embedded.binary import RedisBinary
from redfence_server.embedded.process import HOST, NodeConf, NodeProcess, PortTakenError


async def test_a_process_is_stopped_in_good_order_and_killed_only_if_it_does_not_end(
    tmp_path: Path, redis_binary: RedisBinary
) -> None:
    """It has the time to write its data; a frozen one is killed after the bound."""
    for signals, timeout_s, status in (((), 10, 0), ((signal.SIGSTOP,), 0.05, -signal.SIGKILL)):
        process = NodeProcess(NodeConf(tmp_path, free_port(), "00ff"), binary=redis_binary)
        await process.wait_until_ready(timeout_s=10)
        for number in signals:
            process.send_signal(number)
        await process.stop(timeout_s=timeout_s)
        assert process.exit_status == status
        await process.stop(timeout_s=0)


async def test_a_program_of_another_kind_on_the_port_is_not_taken_for_the_node(
    tmp_path: Path, engine: RedisBinary
) -> None:
    """Another program may have been faster on the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    port = free_port()
    async with await asyncio.start_server(answer, HOST, port):
        process = NodeProcess(NodeConf(tmp_path, port, "00ff"), binary=engine)
        with pytest.raises(PortTakenError):
            await process.wait_until_ready(timeout_s=10)


async def test_another_node_on_the_port_is_not_taken_for_this_one(
    tmp_path: Path, engine: RedisBinary
) -> None:
    """It answers every command, and even takes the same password."""
    port = free_port()
    first = NodeProcess(NodeConf(tmp_path / "first", port, "00ff"), binary=engine)
    await first.wait_until_ready(timeout_s=10)
    second = NodeProcess(NodeConf(tmp_path / "second", port, "00ff"), binary=engine)
    with pytest.raises(PortTakenError):
        await second.wait_until_ready(timeout_s=10)
    first.kill()
