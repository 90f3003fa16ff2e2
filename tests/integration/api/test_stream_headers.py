"""The server sends the headers of a stream at once, because some clients wait for them before they send."""

from __future__ import annotations

import asyncio

from harness.processes.servers import LockServer


async def test_a_stream_has_its_headers_before_the_first_message(server: LockServer) -> None:
    for begin in (server.locks.KeepAlive, server.locks.Session):
        call = begin()
        async with asyncio.timeout(5):
            await call.initial_metadata()
        await call.done_writing()
        assert [message async for message in call] == []
