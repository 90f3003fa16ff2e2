"""Faults between servers and nodes that come and go while callers wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from harness.simulation.network import Network, NodeHost
from harness.simulation.processes import Chance, now_ms
from harness.simulation.servers import ServerHost


class WaitingFaults:
    """Breaks or silences a connection or a whole node, or loses its notices, and heals it.

    Attributes:
        go_on: more of them may come.
        last_at_ms: when the last one ended.
    """

    def __init__(
        self, chance: Chance, network: Network, hosts: Sequence[NodeHost], servers: Sequence[ServerHost]
    ) -> None:
        self._chance = chance
        self._network = network
        self._hosts = hosts
        self._servers = servers
        self.go_on = True
        self.last_at_ms = 0.0

    async def strike(self) -> None:
        """Go on striking, one fault after another, until cancelled."""
        chance = self._chance
        while True:
            await asyncio.sleep(chance.expovariate(4.0))
            host, server = chance.choice(self._hosts), chance.choice(self._servers)
            fault = chance.choice((self._cut, self._silence, self._lose_notices, None))
            struck = [server] if fault else self._servers
            for each in struck:
                (fault or self._silence)(host, each)
            await asyncio.sleep(chance.choice((0.01, 0.05, 0.3)))
            self._heal(host, struck)

    def end(self) -> None:
        """Heal whatever is broken."""
        self.go_on = False
        for host in self._hosts:
            self._heal(host, self._servers)

    def _cut(self, host: NodeHost, server: ServerHost) -> None:
        self._network.block(server, host)
        host.disconnect(server.process, "cut off")

    def _silence(self, host: NodeHost, server: ServerHost) -> None:
        self._network.route(server, host).blocked = True

    def _lose_notices(self, host: NodeHost, server: ServerHost) -> None:
        del server  # no server hears of the node
        host.redis.loses_notices = True

    def _heal(self, host: NodeHost, servers: Sequence[ServerHost]) -> None:
        self.last_at_ms = now_ms()
        host.redis.loses_notices = False
        for server in servers:
            self._network.unblock(server, host)
