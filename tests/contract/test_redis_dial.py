"""What redis-py does for us on a real node, and the one private name of it that we use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.processes.certificates import Certificate
from harness.processes.fixture_types import FlushedNodes
from harness.processes.tls_front import tls_front
from harness.time.eventually import eventually
from redfence_server.embedded.binary import RedisBinary
from redfence_server.nodes.connection import NodeConnection
from redfence_server.redis_io.dial import DialDeniedError, DialError, NodeUrl, dial


async def test_a_dialled_connection_is_handed_over_with_nothing_lost(
    flushed_nodes: FlushedNodes, engine: RedisBinary
) -> None:
    """redis-py lends its socket by a private name; this test fails first if that changes."""
    (node,) = await flushed_nodes(1, binary=engine)
    await _talk(node.url)


async def test_a_connection_over_tls_is_handed_over_with_nothing_lost(
    flushed_nodes: FlushedNodes, certificate: Certificate
) -> None:
    (node,) = await flushed_nodes(1)
    async with tls_front(node.url, certificate) as url:
        await _talk(url)


async def _talk(url: str) -> None:
    """Dial, hand over, and have many commands and a long answer carried."""
    dialled = await dial(NodeUrl(url), timeout_ms=2_000)
    assert await dialled.command("SET", "x", "1") == b"OK"
    lost: list[str] = []
    told: list[Any] = []
    connection = NodeConnection(node_timeout_ms=2_000, on_lost=lost.append, on_notice=print)
    dialled.hand_over(connection)
    for _ in range(100):
        assert connection.call(b"*2\r\n$4\r\nINCR\r\n$1\r\nx\r\n", told.append)
    await eventually(lambda: len(told) == 100)
    assert told == list(range(2, 102))
    # More than is read at once.
    assert connection.call(b"*4\r\n$8\r\nSETRANGE\r\n$1\r\ny\r\n$6\r\n200000\r\n$1\r\nx\r\n", told.append)
    assert connection.call(b"*2\r\n$3\r\nGET\r\n$1\r\ny\r\n", told.append)
    assert connection.call(b"*2\r\n$4\r\nINCR\r\n$1\r\nx\r\n", told.append)
    await eventually(lambda: len(told) == 103)
    assert told[100:] == [200_001, bytes(200_000) + b"x", 102]
    await dialled.close()
    await eventually(lambda: lost)
    assert not connection.call(b"*1\r\n$4\r\nPING\r\n", told.append)


async def test_a_dialled_connection_is_closed_with_the_commands_under_way_told(
    flushed_nodes: FlushedNodes,
) -> None:
    (node,) = await flushed_nodes(1)
    dialled = await dial(NodeUrl(node.url), timeout_ms=2_000)
    told: list[Any] = []
    lost: list[str] = []
    connection = NodeConnection(node_timeout_ms=60_000, on_lost=lost.append, on_notice=print)
    dialled.hand_over(connection)
    connection.call(b"*3\r\n$5\r\nBLPOP\r\n$1\r\nq\r\n$1\r\n0\r\n", told.append)
    await asyncio.sleep(0)
    await dialled.close()
    await eventually(lambda: lost)
    assert len(told) == 1


async def test_an_error_of_the_node_is_a_dial_error_and_the_connection_goes_on(
    flushed_nodes: FlushedNodes,
) -> None:
    (node,) = await flushed_nodes(1)
    dialled = await dial(NodeUrl(node.url), timeout_ms=2_000)
    with pytest.raises(DialError, match="NOSUCH"):
        await dialled.command("NOSUCH")
    assert await dialled.command("PING") == b"PONG"
    await dialled.close()
    await dialled.close()


async def test_nobody_at_the_port_is_a_dial_error(flushed_nodes: FlushedNodes, engine: RedisBinary) -> None:
    (node,) = await flushed_nodes(1, binary=engine)
    await node.call("ACL", "SETUSER", "nameless", "reset", "on", ">right", "+@all", "-client|setname")
    await (await dial(NodeUrl(f"redis://nameless:right@127.0.0.1:{node.port}"), timeout_ms=2_000)).close()
    for user in ("", ":wrong@", "nobody:wrong@"):
        with pytest.raises(DialDeniedError) as told:
            await dial(NodeUrl(f"redis://{user}127.0.0.1:{node.port}"), timeout_ms=2_000)
        assert "wrong" not in str(told.value)
    await node.call("ACL", "DELUSER", "nameless")
    with pytest.raises(DialError) as absent:
        await dial(NodeUrl("redis://127.0.0.1:1"), timeout_ms=2_000)
    assert not isinstance(absent.value, DialDeniedError)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", "h:6379"),
        ("redis://:secret@h:7000/2", "h:7000"),
        ("rediss://user:secret@h:7000", "h:7000"),
        ("unix:///run/redis.sock", "/run/redis.sock"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, address: str) -> None:
    node = NodeUrl(url)
    assert node.address == address
    assert "secret" not in repr(node)


@pytest.mark.parametrize(
    "url",
    [
        "h:6379",
        "http://:secret@h",
        "redis://",
        "redis://:secret@h:port",
        "redis://:secret/more@h:1",
        "redis://h:99999999?password=secret",
        "redis://h:1?secret=secret",
        "redis://h:1?protocol=3",
        "redis://h:1?retry_on_timeout=yes",
    ],
)
def test_a_malformed_url_is_refused_without_telling_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="URL") as told:
        NodeUrl(url)
    assert "secret" not in str(told.value)
    assert told.value.__cause__ is None
