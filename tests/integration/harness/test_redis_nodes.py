"""The pool lends nodes as tests need them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from harness.processes.fixture_types import FlushedNodes
from harness.processes.redis_nodes import NodeSet
from redfence_server.embedded.binary import RedisBinary


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
