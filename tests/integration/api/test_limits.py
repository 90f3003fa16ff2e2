"""The bounds that all streams of one client share."""

from __future__ import annotations

import asyncio

from harness.load.session_caller import SessionCaller, StreamEndedError
from harness.processes.servers import FormedNodes, LockServer, Serve
from redfence_proto.v1.lock_pb2 import ACQUIRE_OUTCOME_GRANTED

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
