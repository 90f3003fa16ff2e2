"""How often a client may ping the server over HTTP/2, and what a client that pings too often gets."""

from __future__ import annotations

import asyncio
import struct

import grpc
import pytest

from harness.processes.ports import HOST
from harness.processes.servers import LockServer, acquire_request
from harness.processes.tcp_proxy import TcpProxy
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc

_PING, _GOAWAY = 6, 7
_ENHANCE_YOUR_CALM = 11
_PING_FRAME_BYTES = 17


async def _watch(channel: grpc.aio.Channel, *, for_s: float) -> list[grpc.ChannelConnectivity]:
    """Return the states of a connected channel; one state means that its connection stayed."""
    states = [channel.get_state()]
    try:
        async with asyncio.timeout(for_s):
            while True:
                await channel.wait_for_state_change(states[-1])
                states.append(channel.get_state())
    except TimeoutError:
        return states


@pytest.mark.slow  # the third ping that comes too early would end the connection
@pytest.mark.parametrize("waiting", [False, True], ids=["without calls", "with a call"])
async def test_a_client_that_pings_each_second_keeps_its_connection(
    server: LockServer, *, waiting: bool
) -> None:
    await server.acquire("held", ttl_ms=30_000)
    options = [
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    port = int(server.target.rpartition(":")[2])
    async with (
        TcpProxy(port) as proxy,
        grpc.aio.insecure_channel(f"{HOST}:{proxy.port}", options=options) as channel,
    ):
        await asyncio.wait_for(channel.channel_ready(), timeout=5)
        call = lock_pb2_grpc.LockServiceStub(channel).Acquire(acquire_request("held", wait_ms=7_000))
        if not waiting:
            call.cancel()
        await asyncio.sleep(0.5)
        before = proxy.requests.taken_bytes
        assert await _watch(channel, for_s=6) == [grpc.ChannelConnectivity.READY]
        assert proxy.requests.taken_bytes - before >= 5 * _PING_FRAME_BYTES
        if waiting:
            assert (await call).outcome == lock_pb2.ACQUIRE_OUTCOME_WAIT_TIMEOUT


async def test_a_burst_of_pings_ends_the_connection_with_too_many_pings(
    server: LockServer,
) -> None:
    """The first ping is never early; the third early one is one too many."""
    port = int(server.target.rpartition(":")[2])
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, b"") + _frame(_PING, b"\0" * 8) * 4)
    async with asyncio.timeout(5):
        while (frame := await _read_frame(reader))[0] != _GOAWAY:
            pass
    _, payload = frame
    assert struct.unpack(">I", payload[4:8])[0] == _ENHANCE_YOUR_CALM
    assert payload[8:] == b"too_many_pings"
    writer.close()
    await writer.wait_closed()


def _frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + b"\0\0\0\0" + payload


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readexactly(9)
    return head[3], await reader.readexactly(int.from_bytes(head[:3]))
