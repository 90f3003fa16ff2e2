"""Know every connection from its first byte to the end of its socket, and give each peer its part of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from redfence_server.http2.peer import Peer
from redfence_server.sharing.budget import Budget
from redfence_server.sharing.peer import peer_of


class Places:
    """Gives each connection of a server a place, and takes it back.

    Args:
        budget: how many there are for all peers.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        # Each connection with its transport and its peer.
        self._taken: dict[asyncio.BaseProtocol, tuple[asyncio.Transport, str]] = {}
        self._empty = asyncio.Event()

    def take(self, connection: asyncio.BaseProtocol, transport: asyncio.BaseTransport) -> bool:
        """Give the connection a place, unless it has one; return False if it was aborted instead."""
        assert isinstance(transport, asyncio.Transport)
        if connection in self._taken:
            return True
        peer = peer_of(Peer.of(transport).address)
        if not self._budget.take(peer):
            transport.abort()
            return False
        self._taken[connection] = transport, peer
        return True

    def leave(self, connection: asyncio.BaseProtocol) -> None:
        """Take the place back, if the connection has one."""
        _, peer = self._taken.pop(connection, (None, None))
        if peer is not None:
            self._budget.give_back(peer)
        if not self._taken:
            self._empty.set()

    async def all_left(self, *, timeout_s: float) -> None:
        """Return when no connection has a place, or after the timeout."""
        if self._taken:
            self._empty.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()

    def abort_all(self) -> None:
        """Close every socket at once."""
        for transport, _ in list(self._taken.values()):
            transport.abort()
