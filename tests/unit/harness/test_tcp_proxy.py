"""The faults of the proxy that other tests would not miss, shown against an echo server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from harness.processes.ports import HOST, free_port
from harness.processes.tcp_proxy import TcpProxy
from harness.time.eventually import eventually

_DEADLINE_S = 5.0


@dataclass(slots=True)
class Node:
    """Echoes every byte, and remembers it."""

    port: int
    server: asyncio.Server
    received: bytes = b""


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65_536):
                echoing.received += chunk
                writer.write(chunk)
        except ConnectionResetError:
            pass
        finally:
            writer.close()

    port = free_port()
    echoing = Node(port, await asyncio.start_server(echo, HOST, port))
    yield echoing
    echoing.server.close()


@pytest.fixture
async def proxy(node: Node) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(node.port) as started:
        yield started


@dataclass(slots=True)
class Peer:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def exchange(self, data: bytes) -> bytes:
        self.writer.write(data)
        async with asyncio.timeout(_DEADLINE_S):
            return await self.reader.readexactly(len(data))


Connect = Callable[[], Awaitable[Peer]]


@pytest.fixture
async def connect(proxy: TcpProxy) -> AsyncIterator[Connect]:
    """Opens connections through the proxy and closes them after the test."""
    peers: list[Peer] = []

    async def open_one() -> Peer:
        peers.append(Peer(*await asyncio.open_connection(HOST, proxy.port)))
        return peers[-1]

    yield open_one
    for peer in peers:
        peer.writer.close()


async def meanwhile(node: Node) -> None:
    """Return after a round trip past the proxy: what could arrive has arrived."""
    peer = Peer(*await asyncio.open_connection(HOST, node.port))
    await peer.exchange(b"!")
    peer.writer.close()


async def test_bytes_pass_both_ways_and_an_orderly_end_passes_too(
    node: Node, proxy: TcpProxy, connect: Connect
) -> None:
    assert (
        proxy.url(f"redis://:{node.port}@{HOST}:{node.port}/0")
        == f"redis://:{node.port}@{HOST}:{proxy.port}/0"
    )
    peer = await connect()
    assert await peer.exchange(b"x" * 200_000) == b"x" * 200_000
    assert proxy.requests.passed_bytes == proxy.replies.passed_bytes == 200_000
    peer.writer.close()
    await eventually(lambda: proxy.connection_count == 0)


@pytest.mark.parametrize("direction", ["requests", "replies"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["held", "dropped"])
async def test_what_is_held_or_dropped_in_one_direction_passes_in_the_other(
    node: Node, proxy: TcpProxy, connect: Connect, *, direction: str, is_lost: bool
) -> None:
    peer = await connect()
    fault = proxy.drop if is_lost else proxy.hold
    fault(requests=direction == "requests", replies=direction == "replies")
    way = proxy.requests if direction == "requests" else proxy.replies
    peer.writer.write(b"late")
    await eventually(lambda: way.kept_bytes == 4)
    await meanwhile(node)
    assert node.received == (b"!" if direction == "requests" else b"late!")
    assert proxy.replies.passed_bytes == 0
    await proxy.heal()
    if is_lost:
        with pytest.raises(ConnectionResetError):
            await peer.exchange(b"more")
        assert b"more" not in node.received
        assert await (await connect()).exchange(b"again") == b"again"
    else:
        async with asyncio.timeout(_DEADLINE_S):
            assert await peer.reader.readexactly(4) == b"late"


@pytest.mark.slow
async def test_a_delay_is_kept_in_each_direction_and_requests_overlap_on_their_way(
    node: Node, proxy: TcpProxy, connect: Connect
) -> None:
    loop = asyncio.get_running_loop()
    peer = await connect()
    # So long that one of each and a stall of a second are less than ten of either.
    proxy.delay(requests_ms=200, replies_ms=200)
    started_at = loop.time()
    for count in range(1, 11):
        peer.writer.write(b"x")
        # Each on its own: bytes that are taken together take one delay in any case.
        await eventually(lambda: proxy.requests.taken_bytes == count)  # noqa: B023  (awaited here)
    async with asyncio.timeout(_DEADLINE_S):
        assert await peer.reader.readexactly(10) == b"x" * 10
    assert 0.4 <= loop.time() - started_at < 2.0


async def test_slices_arrive_whole_in_the_end(node: Node, proxy: TcpProxy, connect: Connect) -> None:
    peer = await connect()
    proxy.slice(slice_bytes=1)
    peer.writer.write(b"abcdef")
    async with asyncio.timeout(_DEADLINE_S):
        first = await peer.reader.read(6)
        rest = await peer.reader.readexactly(6 - len(first))
    assert len(first) < 6
    assert first + rest == b"abcdef"


@pytest.mark.parametrize("refuses", [False, True], ids=["reset", "refuse"])
async def test_a_reset_or_refusing_proxy_breaks_connections_with_an_rst(
    node: Node, proxy: TcpProxy, connect: Connect, *, refuses: bool
) -> None:
    peer = await connect()
    await peer.exchange(b"x")
    (proxy.refuse if refuses else proxy.reset)()
    with pytest.raises(ConnectionResetError):
        await peer.reader.read()
    if refuses:
        with pytest.raises(ConnectionRefusedError):
            await connect()
        await proxy.heal()
    assert await (await connect()).exchange(b"y") == b"y"
    node.server.close()
    with pytest.raises(ConnectionResetError):
        await (await connect()).reader.read()


async def test_a_stopped_proxy_leaves_no_task_and_no_connection(
    node: Node, proxy: TcpProxy, connect: Connect
) -> None:
    before = asyncio.all_tasks()
    peers = [await connect() for _ in range(3)]
    proxy.delay(requests_ms=10_000)
    peers[0].writer.write(b"on its way")
    proxy.drop(requests=False)
    peers[1].writer.write(b"lost")
    await eventually(lambda: proxy.connection_count == 3)
    await proxy.stop()
    assert proxy.connection_count == 0
    for peer in peers:
        with pytest.raises(ConnectionResetError):
            await peer.reader.read()
    await eventually(lambda: not (asyncio.all_tasks() - before))


@pytest.mark.parametrize("pieces", [1, 3])
async def test_requests_are_held_back_from_the_one_on_that_was_named(
    pieces: int, node: Node, proxy: TcpProxy, connect: Connect
) -> None:
    peer, other = await connect(), await connect()
    came = proxy.hold_before(b"MARK")
    await peer.exchange(b"one ")
    assert not came.is_set()
    # In pieces, what arrives of it is no whole command.
    for piece in (b"MARK",) if pieces == 1 else (b"MA", b"R", b"K"):
        peer.writer.write(piece)
        await peer.writer.drain()
        await eventually(lambda: came.is_set() or node.received.endswith(piece))  # noqa: B023  (awaited here)
    await came.wait()
    other.writer.write(b"two ")
    await eventually(lambda: proxy.requests.kept_bytes >= 5)
    await meanwhile(node)
    assert node.received == (b"one !" if pieces == 1 else b"one MAR!")
    await proxy.heal()
    await eventually(lambda: b"two" in node.received and b"K" in node.received)


async def test_replies_are_held_back_after_the_request_that_was_named(
    node: Node, proxy: TcpProxy, connect: Connect
) -> None:
    peer = await connect()
    await peer.exchange(b"MARK")
    came = proxy.hold_after(b"MARK")
    await peer.exchange(b"one ")
    peer.writer.write(b"MARK")
    async with asyncio.timeout(_DEADLINE_S):
        await came.wait()
    await eventually(lambda: node.received == b"MARKone MARK")
    await eventually(lambda: proxy.replies.kept_bytes == 4)
    assert proxy.replies.passed_bytes == 8
