"""Send commands to a node over a connection of their own, and show its very replies."""

from __future__ import annotations

import asyncio
import contextlib

import hiredis

from harness.processes.ports import HOST


async def call(port: int, *commands: tuple[str | int | bytes, ...]) -> list[object]:
    """Send commands on a connection of their own and return the replies; an error reply is a value.

    Cancellation: the connection is closed; the commands may or may not have taken effect.

    Raises:
        OSError: no connection, or it broke before the last reply.
        hiredis.ProtocolError: another kind of server listens there.
    """
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        # The stub of `pack_command` allows only a tuple of one.
        writer.write(b"".join(hiredis.pack_command(command) for command in commands))  # type: ignore[arg-type]
        parser = hiredis.Reader()
        replies: list[object] = []
        while len(replies) < len(commands):
            received = await reader.read(64 * 1024)
            if not received:
                raise ConnectionResetError("the connection was closed before the last reply")
            parser.feed(received)
            # `gets` returns False until a reply is complete. (RESP2 has no booleans.)
            while (reply := parser.gets()) is not False:
                replies.append(reply)
        return replies
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
