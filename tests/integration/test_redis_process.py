"""One node process, from start to end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from harness.processes.ports import free_port
from redfence_server.embedded.binary import RedisBinary
from redfence_server.embedded.process import HOST, NodeConf, NodeProcess, PortTakenError


async def test_a_process_that_does_not_end_is_killed(tmp_path: Path, redis_binary: RedisBinary) -> None:
    """A frozen node holds nobody up for longer than the bound."""
    process = NodeProcess(NodeConf(tmp_path, free_port(), "00ff"), binary=redis_binary)
    await process.wait_until_ready(timeout_s=10)
    process.send_signal(signal.SIGSTOP)
    await process.stop(timeout_s=0.05)
    assert process.exit_status == -signal.SIGKILL


async def test_a_process_that_ends_in_good_order_is_not_killed(
    tmp_path: Path, redis_binary: RedisBinary
) -> None:
    """It has the time to write what it holds."""
    process = NodeProcess(NodeConf(tmp_path, free_port(), "00ff"), binary=redis_binary)
    await process.wait_until_ready(timeout_s=10)
    await process.stop(timeout_s=10)
    assert process.exit_status == 0
    await process.stop(timeout_s=0)


async def test_a_stranger_who_answers_on_the_port_is_not_taken_for_the_node(
    tmp_path: Path, engine: RedisBinary
) -> None:
    """Another Redis may have been faster on the port; it says PONG as well."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(b"+OK\r\n+PONG\r\n$14\r\nprocess_id:1\r\n\r\n")
        await reader.read()
        writer.close()

    port = free_port()
    async with await asyncio.start_server(answer, HOST, port):
        process = NodeProcess(NodeConf(tmp_path, port, "00ff"), binary=engine)
        with pytest.raises(PortTakenError):
            await process.wait_until_ready(timeout_s=10)


async def test_a_stranger_who_speaks_something_else_is_not_taken_for_the_node(
    tmp_path: Path, engine: RedisBinary
) -> None:
    """An HTTP server may have been faster on the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    port = free_port()
    async with await asyncio.start_server(answer, HOST, port):
        process = NodeProcess(NodeConf(tmp_path, port, "00ff"), binary=engine)
        with pytest.raises(PortTakenError):
            await process.wait_until_ready(timeout_s=10)
