"""The commands to one node, and its replies. While the node is away, what ends a hold is kept for it.

A command goes out only under the admission id of the present connection, so a node is sent nothing before it was admitted on
that very connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import structlog

from redfence_server.clock import Clock
from redfence_server.locking.node import (
    REVALIDATION_MS_MAX,
    Command,
    Commit,
    Granted,
    NodeState,
    NoReply,
    Reply,
)
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.examination import Identity
from redfence_server.membership.heartbeat import Heartbeat
from redfence_server.nodes.connection import NodeConnection, ReplyError
from redfence_server.nodes.link_state import LinkState
from redfence_server.nodes.replay_queue import ReplayQueue
from redfence_server.redis_io import scripts

# Scripts flushed, turned into a replica, password or rights changed: admission finds out what it is.
_FIXED_BY_RECONNECTING: Final = frozenset({"NOSCRIPT", "READONLY", "NOAUTH", "NOPERM"})


@dataclass(slots=True, eq=False)
class _Sent:
    """A command on its way, under an admission id; `on_reply` is called exactly once."""

    command: Command
    on_reply: Callable[[Reply], None] | None
    admission_id: str


class NodeCommands:
    """Sends commands while the node is admitted. A reply that shows that it no longer is ends the connection.

    Attributes:
        connection: to the node that was admitted; None while there is none.
        identity: the one under which the node was last admitted.
    """

    def __init__(
        self,
        index: int,
        *,
        packer: scripts.Packer,
        memory: ClusterMemory,
        heartbeat: Heartbeat,
        state: LinkState,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._index = index
        self._packer = packer
        self._memory = memory
        self._heartbeat = heartbeat
        self._state = state
        self._clock = clock
        self._log = log
        self.connection: NodeConnection | None = None
        self.identity: Identity | None = None
        self._replay_queue = ReplayQueue()
        self._last_error_code = ""
        self._revalidating_until_ms = 0.0
        self._void_admission_id = ""

    def begin(self, connection: NodeConnection, identity: Identity | None) -> None:
        """Send over a connection on which the node was just admitted, first of all what was kept for it."""
        self.identity, self.connection = identity, connection
        self._revalidating_until_ms = 0.0
        self.replay()
        self._last_error_code = ""

    def end_revalidation(self) -> None:
        """Expect the node back soon no longer: it was examined and did not get its vote, or cannot be examined."""
        self._revalidating_until_ms = 0.0

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Carry out `command` and tell `on_reply` exactly once, later; see `LockNode`."""
        if self.connection is not None and self.identity is not None:
            admission_id = self.identity.admission
            if isinstance(command, Commit) and command.admission_id:
                admission_id = command.admission_id
            sent = _Sent(command, on_reply, admission_id)
            if self.connection.call(self._packer.pack(command, admission_id), partial(self._on_raw, sent)):
                return True
        why_not_sent = self._why_not_sent()
        self._keep(command, why_not_sent, is_awaited=on_reply is not None)
        if on_reply is not None:
            asyncio.get_running_loop().call_soon(on_reply, why_not_sent)
        return False

    def _keep(self, command: Command, reason: NoReply, *, is_awaited: bool) -> None:
        """Keep what ends a hold for later, unless its caller makes it again: that one must be the first to arrive."""
        if not (is_awaited and reason is NoReply.NOT_ADMITTED):
            self._replay_queue.keep(command)

    def _why_not_sent(self) -> NoReply:
        """Return why a command cannot be sent."""
        if self._clock.now_ms() < self._revalidating_until_ms:
            return NoReply.NOT_ADMITTED
        return NoReply.QUARANTINED if self._state.state is NodeState.QUARANTINED else NoReply.UNREACHABLE

    def replay(self, *, at_most: int | None = None) -> None:
        """Send what was kept for the node, the oldest first."""
        for command in self._replay_queue.take(now_ms=self._clock.now_ms(), at_most=at_most):
            self.send(command)

    def _on_raw(self, sent: _Sent, raw: Any) -> None:
        """Take what came of a command that was sent."""
        reply: Reply
        if isinstance(raw, ReplyError):
            reply = self._on_error_reply(sent.command, str(raw))
        elif isinstance(raw, NoReply):
            # A node refuses a void admission id for ever, so it has refused what it did not answer as well.
            reply = NoReply.NOT_ADMITTED if sent.admission_id == self._void_admission_id else raw
            # What timed out may still be carried out; but if the connection is given up, it is not. Once more is no harm.
            self._keep(sent.command, reply, is_awaited=sent.on_reply is not None)
        else:
            reply = self._read_reply(sent, raw)
        if sent.on_reply is not None:
            sent.on_reply(reply)

    def _read_reply(self, sent: _Sent, raw: Any) -> Reply:
        """Return what a script answered."""
        if self._last_error_code:
            self._last_error_code = self._state.detail = ""
        try:
            reply = scripts.read_reply(raw, admission_id=sent.admission_id)
        except scripts.NotAdmittedError:
            self._keep(sent.command, NoReply.NOT_ADMITTED, is_awaited=sent.on_reply is not None)
            # A late commit of an attempt that began under an earlier id tells nothing of the present one.
            if self.identity is not None and sent.admission_id == self.identity.admission:
                self.revalidate("it refused a command: not_admitted")
            return NoReply.NOT_ADMITTED
        except scripts.NumbersExhaustedError:
            self._log.error("node_numbers_exhausted")
            return NoReply.REFUSED
        except ValueError:
            # Another program has written redfence's keys. The answer has a digest, so it is not logged.
            return self._reconnect("an answer that no script gives")
        return self._observe_grant(reply, raw) if isinstance(reply, Granted) else reply

    def _observe_grant(self, reply: Granted, raw: list[Any]) -> Granted:
        """Take from a granted mint what it shows of the node's memory and clock."""
        assert self.identity is not None, "a node that answers was admitted"
        self._memory.see_token(self._index, floor=self.identity.floor, token=reply.token)
        return reply if self._heartbeat.counts(scripts.read_clock_ms(raw)) else replace(reply, counts=False)

    def _on_error_reply(self, command: Command, problem: str) -> NoReply:
        """Take an error reply: start over where a new connection can mend it, and otherwise go on."""
        code = problem.partition(" ")[0]
        if code not in _FIXED_BY_RECONNECTING:
            # Out of memory, disk full, a busy script: it may pass, and reconnecting would only take the others along.
            if code != self._last_error_code:
                self._log.warning("node_command_failed", problem=problem)
            self._last_error_code = code
            # It answers, and yet is of no use: an operator has to see why.
            self._state.detail = f"its last answer was an error: {problem}"
            return NoReply.REFUSED
        if code == "NOSCRIPT":
            self._replay_queue.keep(command)  # the next connection loads it
        return self._reconnect(problem)

    def _reconnect(self, problem: str) -> NoReply:
        """Start over with the node: its role or its scripts are not what was found at admission."""
        if self.connection is not None:
            self._log.warning("node_refused_command", problem=problem)
            self.drop(f"it refused a command: {problem}")
        return NoReply.REFUSED

    def revalidate(self, reason: str) -> None:
        """Examine the node again on a new connection, for the admission id is void; until then commands are NOT_ADMITTED."""
        if self.connection is not None and self.identity is not None:
            self._void_admission_id = self.identity.admission
            self._revalidating_until_ms = self._clock.now_ms() + REVALIDATION_MS_MAX
            self._log.info("node_revalidation", reason=reason)
            self.drop(reason)

    def drop(self, reason: str) -> None:
        """End the connection."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort(reason)

    def drop_if_superseded(self) -> None:
        """Drop the node if another process has got its index since it was admitted."""
        if self.identity is not None and self.connection is not None:
            floor, known = self.identity.floor, self._memory.nodes[self._index].floor
            if floor < known:
                self._log.warning("node_superseded", floor=floor, floor_known=known)
                self.drop("another process has been given its node index since")
