"""Embedded nodes, with real processes of every engine on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hiredis
import pytest
from structlog.testing import capture_logs

from harness.processes.node_call import call
from harness.processes.process_look import is_alive
from harness.time.eventually import eventually
from redfence_server.embedded.binary import RedisBinary
from redfence_server.embedded.nodes import NODE_DIED_EVENT, EmbeddedNodes, free_port
from redfence_server.errors import StartupError


async def ask(url: str, *command: str) -> object:
    """Send one command to a node by its address."""
    parts = urlsplit(url)
    assert parts.port is not None
    assert parts.password is not None
    return (await call(parts.port, ("AUTH", parts.password), command))[1]


async def test_nodes_answer_on_their_urls_and_are_durable_and_keep_their_data(
    tmp_path: Path, engine: RedisBinary
) -> None:
    """Their settings are the proof of durability that admission asks for."""
    settings = {
        "appendonly": "yes",
        "appendfsync": "always",
        "aof-load-truncated": "no",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    async with EmbeddedNodes(count=3, data_dir=tmp_path, binary=engine) as nodes:
        assert len({urlsplit(url).port for url in nodes.urls}) == 3
        for index, url in enumerate(nodes.urls):
            for name, value in settings.items():
                assert await ask(url, "CONFIG", "GET", name) == [name.encode(), value.encode()]
            await ask(url, "SET", "key", str(index))
    async with EmbeddedNodes(count=3, data_dir=tmp_path, binary=engine) as nodes:
        assert [await ask(url, "GET", "key") for url in nodes.urls] == [b"0", b"1", b"2"]


async def test_others_on_the_machine_are_refused_and_cannot_see_the_password(
    tmp_path: Path, engine: RedisBinary
) -> None:
    """The nodes listen on the loopback, which every user of the machine reaches."""
    async with EmbeddedNodes(count=1, data_dir=tmp_path, binary=engine) as nodes:
        parts = urlsplit(nodes.urls[0])
        assert parts.port is not None
        [refusal] = await call(parts.port, ("PING",))
        assert isinstance(refusal, hiredis.ReplyError)
        assert str(refusal).startswith("NOAUTH")
        assert parts.password is not None
        assert parts.password not in Path(f"/proc/{nodes.pids[0]}/cmdline").read_text()
        assert (tmp_path / "node-0").stat().st_mode & 0o077 == 0


@pytest.mark.slow
async def test_a_node_whose_port_is_taken_gets_another_if_there_is_one(
    tmp_path: Path, engine: RedisBinary
) -> None:
    """The product sees a port free a moment before it uses it; another program may be faster."""
    with socket.create_server(("127.0.0.1", 0)) as rival:
        taken = int(rival.getsockname()[1])
        choices = [taken, taken]
        given: dict[str, Any] = {"count": 1, "data_dir": tmp_path, "binary": engine}
        async with EmbeddedNodes(
            **given, choose_port=lambda: choices.pop() if choices else free_port()
        ) as nodes:
            assert choices == []
            assert urlsplit(nodes.urls[0]).port != taken
            assert await ask(nodes.urls[0], "PING") == b"PONG"
        with pytest.raises(StartupError, match=r"(?i)address already in use"):
            await EmbeddedNodes(**given, choose_port=lambda: taken).start()


async def test_a_node_that_does_not_start_is_an_error_with_its_log_and_stops_the_others(
    tmp_path: Path, engine: RedisBinary
) -> None:
    """A node must not load a damaged log as if it were whole; the operator sees why."""
    async with EmbeddedNodes(count=3, data_dir=tmp_path, binary=engine) as nodes:
        await ask(nodes.urls[1], "SET", "key", "value")
    [log] = (tmp_path / "node-1").glob("appendonlydir/*.incr.aof")
    os.truncate(log, log.stat().st_size - 1)
    nodes = EmbeddedNodes(count=3, data_dir=tmp_path, binary=engine)
    with pytest.raises(StartupError, match=r"(?s)node-1 ended with status 1; its log .*end of file"):
        await nodes.start()
    assert not any(map(is_alive, nodes.pids))


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path, redis_binary: RedisBinary) -> None:
    nodes = EmbeddedNodes(count=3, data_dir=tmp_path, binary=redis_binary)
    start = asyncio.create_task(nodes.start())
    await eventually((tmp_path / "node-2" / "node.log").exists)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not any(map(is_alive, nodes.pids))
    async with EmbeddedNodes(count=3, data_dir=tmp_path, binary=redis_binary):
        pass


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_a_cancelled_stop_has_stopped(tmp_path: Path, redis_binary: RedisBinary, turns: int) -> None:
    """The nodes get kill -9, whenever the cancellation comes; none lives on."""
    nodes = EmbeddedNodes(count=3, data_dir=tmp_path, binary=redis_binary)
    await nodes.start()

    async def stop() -> None:
        if turns == 0:
            this_task = asyncio.current_task()
            assert this_task is not None
            this_task.cancel()
        await nodes.stop()

    stopping = asyncio.create_task(stop())
    for _ in range(turns):
        await asyncio.sleep(0)
    if turns:
        stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not any(map(is_alive, nodes.pids))


async def test_each_node_that_dies_is_reported_once_and_the_others_go_on(
    tmp_path: Path, redis_binary: RedisBinary
) -> None:
    with capture_logs() as logs:
        async with EmbeddedNodes(count=3, data_dir=tmp_path, binary=redis_binary) as nodes:
            os.kill(nodes.pids[0], signal.SIGKILL)
            await eventually(lambda: len(logs) >= 1, interval_s=0.01)
            os.kill(nodes.pids[2], signal.SIGKILL)
            await eventually(lambda: len(logs) >= 2, interval_s=0.01)
            assert await ask(nodes.urls[1], "PING") == b"PONG"
    assert logs == [
        {"event": NODE_DIED_EVENT, "index": index, "exit_status": -9, "log_level": "error"}
        for index in (0, 2)
    ]


async def test_a_terminals_ctrl_c_does_not_reach_the_nodes(tmp_path: Path, redis_binary: RedisBinary) -> None:
    """The nodes are in sessions of their own, so the server can drain first."""
    async with EmbeddedNodes(count=3, data_dir=tmp_path, binary=redis_binary) as nodes:
        assert all(os.getsid(pid) == pid for pid in nodes.pids)
