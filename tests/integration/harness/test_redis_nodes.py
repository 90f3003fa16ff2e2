"""Nodes of the harness start, break and come back as tests need."""

from __future__ import annotations

import asyncio
from pathlib import Path

import hiredis
import pytest

from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.redis_nodes import NodeSet, run_id
from harness.time.eventually import eventually
from redfence_server.embedded.binary import RedisBinary
from redfence_server.embedded.process import AppendFsync, NodeStartError


async def test_a_restart_keeps_the_port_and_the_data_and_changes_the_run_id(
    fresh_nodes: FreshNodes, engine: RedisBinary
) -> None:
    """With an fsync for every write, kill -9 loses no acknowledged write."""
    [node] = await fresh_nodes(1, binary=engine)
    await node.call("SET", "key", "value")
    before = (node.url, await run_id(node))
    await node.restart()
    assert await node.call("GET", "key") == b"value"
    assert node.url == before[0]
    assert await run_id(node) != before[1]


async def test_a_restart_without_data_is_empty(fresh_nodes: FreshNodes, engine: RedisBinary) -> None:
    [node] = await fresh_nodes(1, binary=engine)
    await node.call("SET", "key", "value")
    await node.restart(with_data=False)
    assert await node.call("GET", "key") is None


async def test_a_node_with_a_cut_log_refuses_to_start(fresh_nodes: FreshNodes, engine: RedisBinary) -> None:
    [node] = await fresh_nodes(1, binary=engine)
    await node.call("SET", "key", "value")
    node.kill()
    node.cut_aof(3)
    with pytest.raises(NodeStartError, match=r"(?s)ended with status 1.*end of file"):
        await node.start()
    assert not node.is_running


async def test_a_paused_node_answers_after_the_pause_and_not_before(fresh_nodes: FreshNodes) -> None:
    [node] = await fresh_nodes(1)
    node.pause()
    asked = asyncio.create_task(node.call("PING"))
    done, _ = await asyncio.wait({asked}, timeout=0.05)
    assert not done
    node.resume()
    assert await asked == b"PONG"


@pytest.mark.parametrize("appendfsync", ["always", "everysec", "no"])
async def test_the_durability_is_as_chosen(fresh_nodes: FreshNodes, appendfsync: AppendFsync) -> None:
    [node] = await fresh_nodes(1, appendfsync=appendfsync)
    assert await node.call("CONFIG", "GET", "appendfsync") == [b"appendfsync", appendfsync.encode()]


async def test_an_error_reply_is_raised(fresh_nodes: FreshNodes) -> None:
    [node] = await fresh_nodes(1)
    with pytest.raises(hiredis.ReplyError, match="unknown command"):
        await node.call("NO-SUCH-COMMAND")


async def test_lent_nodes_are_the_same_processes_but_empty_and_without_old_connections(
    tmp_path: Path, redis_binary: RedisBinary
) -> None:
    pool = NodeSet(tmp_path)
    try:
        first = await pool.borrow(2, binary=redis_binary)
        await first[0].call("SET", "key", "value")
        reader, writer = await asyncio.open_connection("127.0.0.1", first[0].port)
        writer.write(b"PING\r\n")
        await reader.readline()
        pool.take_back()
        second = await pool.borrow(2, binary=redis_binary)
        assert [node.pid for node in second] == [node.pid for node in first]
        assert await second[0].call("DBSIZE") == 0
        assert await reader.read() == b""
        writer.close()
    finally:
        pool.close()
    assert not any(node.is_running for node in first)


async def test_a_mistreated_node_is_not_lent_again(tmp_path: Path, redis_binary: RedisBinary) -> None:
    pool = NodeSet(tmp_path)
    try:
        [frozen] = await pool.borrow(1, binary=redis_binary)
        frozen.pause()
        pool.take_back()
        [other] = await pool.borrow(1, binary=redis_binary)
        assert other is not frozen
        assert not frozen.is_running
    finally:
        pool.close()


async def test_two_loans_in_one_test_are_different_nodes(flushed_nodes: FlushedNodes) -> None:
    assert not set(await flushed_nodes(1)) & set(await flushed_nodes(1))


async def test_a_node_behind_a_proxy_is_lost_and_comes_back(
    fresh_nodes: FreshNodes, start_proxy: StartProxy
) -> None:
    [node] = await fresh_nodes(1)
    proxy = await start_proxy(node)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    proxy.hold(requests=False)
    password = node.url.split(":")[2].partition("@")[0]
    writer.write(f"AUTH {password}\r\nSET key value\r\n".encode())
    await eventually(lambda: proxy.replies.kept_bytes)
    assert await node.call("GET", "key") == b"value"
    await proxy.heal()
    assert await reader.readline() == b"+OK\r\n"
    writer.close()
