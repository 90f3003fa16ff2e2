"""Read keys of one node for lists and watches of locks; log refusals once for each fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from redfence_server.clock import Clock
from redfence_server.locking.node import NoReply, ScannedKeys
from redfence_server.nodes.commands import NodeCommands
from redfence_server.nodes.fault_log import FaultLog
from redfence_server.redis_io.dial import DialError, DialRefusedError


class KeyReader:
    """Reads keys over the connection of a node's commands, and changes nothing.

    It has a fault log of its own, because a node that refuses to scan may still grant.
    """

    def __init__(
        self, commands: NodeCommands, *, clock: Clock, log: structlog.typing.FilteringBoundLogger
    ) -> None:
        self._commands = commands
        self._faults = FaultLog(
            clock=clock, log=log, on_failure="node_scan_refused", on_recovery="node_scan_recovered"
        )

    async def scan(self, pattern: str, *, cursor: int, count: int) -> ScannedKeys | NoReply:
        """Return keys that match a glob pattern; look at about `count` keys, from `cursor` on."""
        answer = await self._ask("SCAN", cursor, "MATCH", pattern, "COUNT", count)
        return answer if isinstance(answer, NoReply) else ScannedKeys(int(answer[0]), answer[1])

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None] | NoReply:
        """Return the values of string keys; None for each that does not exist."""
        answer: Sequence[bytes | None] | NoReply = await self._ask("MGET", *keys)
        return answer

    async def _ask(self, *command: str | int) -> Any:
        """Return the reply to a raw command, or a `NoReply`."""
        if self._commands.connection is None:
            return NoReply.UNREACHABLE
        try:
            (answer,) = await self._commands.connection.commands(command)
        except DialError:
            return NoReply.TIMED_OUT
        if isinstance(answer, DialRefusedError):
            self._faults.failed(str(answer))
            return NoReply.REFUSED
        self._faults.examined("")
        return answer
