"""One node process, from start to end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from harness.processes.ports import free_port
from redfence_server.embedded.binary import RedisBinary
from redfence_server.embedded.process import HOST, NodeConf, NodeProcess, PortTakenError

_ANOTHER_REDIS = b"+OK\r\n+PONG\r\n$14\r\nprocess_id:1\r\n\r\n"


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


@pytest.mark.parametrize(
    "speech", [_ANOTHER_REDIS, b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["redis", "http"]
)
async def test_a_stranger_that_answers_on_the_port_is_not_taken_for_the_node(
    tmp_path: Path, engine: RedisBinary, speech: bytes
) -> None:
    """Another program may have been faster on the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(speech)
        if speech is _ANOTHER_REDIS:
            await reader.read()
        writer.close()

    port = free_port()
    async with await asyncio.start_server(answer, HOST, port):
        process = NodeProcess(NodeConf(tmp_path, port, "00ff"), binary=engine)
        with pytest.raises(PortTakenError):
            await process.wait_until_ready(timeout_s=10)
