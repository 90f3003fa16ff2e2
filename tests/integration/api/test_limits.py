"""The bounds that all streams of one client share."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import ngh2
import pytest
from structlog.testing import capture_logs

from harness.http2.raw_client import RawClient
from harness.load.session_caller import SessionCaller, StreamEndedError
from harness.processes.ports import HOST
from harness.processes.servers import FormedNodes, LockServer, Serve
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import ACQUIRE_OUTCOME_GRANTED
from redfence_server.http2.settings import Transport
from redfence_server.http2.wire import framed

CONNECTIONS = 12
ROOM = 1_000


async def test_streams_of_one_client_get_half_of_the_room_and_give_it_back(
    formed_nodes: FormedNodes, serve: Serve
) -> None:
    """An open stream counts as 16 commands. A refused one changes nothing for the others."""
    server = await serve(await formed_nodes(3), commands_server_max=ROOM)
    sessions = [SessionCaller(server) for _ in range(ROOM // 2 // 16)]
    for number, session in enumerate(sessions):
        assert (await session.acquire(f"orders/{number}")).acquire.outcome == ACQUIRE_OUTCOME_GRANTED
    refused = SessionCaller(server)
    error = await refused.ended()
    assert error is not None
    assert "open fewer streams" in (error.details() or "")
    assert (await sessions[0].acquire("orders/more")).acquire.outcome == ACQUIRE_OUTCOME_GRANTED
    for session in sessions:
        await session.cancel()
    async with asyncio.timeout(10):
        while not await _opens(server):
            pass


async def _opens(server: LockServer) -> bool:
    try:
        async with SessionCaller(server) as session:
            return (await session.acquire("orders/last")).HasField("acquire")
    except StreamEndedError:
        return False


async def test_a_peer_with_its_part_of_the_connections_leaves_some_to_another(
    formed_nodes: FormedNodes, serve: Serve, transport: Transport
) -> None:
    """With grpcio one peer may take all: it does not show a connection before its first call."""
    server = await serve(await formed_nodes(3), connections_max=CONNECTIONS)
    its_part = CONNECTIONS // 2 if transport is Transport.FAST else CONNECTIONS
    async with AsyncExitStack() as connections:

        async def is_served(source: str) -> bool:
            client = RawClient(int(server.target.rpartition(":")[2]), source=source)
            return await _is_served(await connections.enter_async_context(client))

        served = [await is_served("127.0.0.2") for _ in range(CONNECTIONS)]
        assert served == [number < its_part for number in range(CONNECTIONS)]
        assert await is_served(HOST)
        assert (await server.acquire("orders/1")).outcome == ACQUIRE_OUTCOME_GRANTED
        await connections.aclose()
        async with asyncio.timeout(10):
            while not await is_served("127.0.0.2"):
                pass


async def test_sessions_whose_results_are_not_read_end_before_they_fill_the_memory(
    formed_nodes: FormedNodes, serve: Serve, transport: Transport
) -> None:
    if transport is Transport.GRPCIO:
        pytest.skip("grpcio keeps the results, and commands_server_max bounds how many there are")
    server = await serve(await formed_nodes(3), buffered_bytes_max=4 * 1024 * 1024)
    bad = lock_pb2.SessionRequest(commands=[lock_pb2.SessionCommand(id=number) for number in range(1, 1_001)])
    with capture_logs() as logs:
        async with RawClient(
            int(server.target.rpartition(":")[2]),
            settings={ngh2.Setting.INITIAL_WINDOW_SIZE: 0},
            source="127.0.0.2",
        ) as client:
            streams = []
            for _ in range(60):
                streams.append(stream_id := client.begin("/redfence.v1.LockService/Session"))
                client.send(stream_id, framed(bad.SerializeToString()))
            answers = [client.answers[stream_id] for stream_id in streams]
            await client.until(lambda: sum(each.reset is not None for each in answers) > 20)
            for number in range(10):
                assert (await server.acquire(f"orders/{number}")).outcome == ACQUIRE_OUTCOME_GRANTED
            ended = [each.reset for each in answers if each.reset is not None]
            assert set(ended) == {ngh2.ErrorCode.ENHANCE_YOUR_CALM}
            assert len(ended) < 50, "the others keep what the peer may have"
    assert not [each for each in logs if each["log_level"] in {"warning", "error"}]


async def _is_served(client: RawClient) -> bool:
    """Tell whether the server answers a call, and does not end the connection."""
    stream_id = client.begin("/redfence.v1.LockService/Nothing")
    await client.until(lambda: client.ended or client.answers[stream_id].closed)
    return not client.ended
