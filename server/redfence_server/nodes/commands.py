"""Send commands to one node and read its replies; keep releases and undos while the node is unavailable.

A command leaves only under the admission id of the present connection. So a node gets no command before this
server has admitted it on that connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
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
from redfence_server.nodes.fault_log import FaultLog
from redfence_server.nodes.link_state import LinkState
from redfence_server.nodes.replay_queue import ReplayQueue
from redfence_server.redis_io import scripts

# Scripts flushed, node made a replica, password changed: the next admission finds the cause.
_FIXED_BY_RECONNECTING: Final = frozenset({"NOSCRIPT", "READONLY", "NOAUTH"})


class NodeCommands:
    """Sends commands while the node is admitted; drops the connection when a reply shows that it is not.

    Attributes:
        connection: the admitted connection; None while there is none.
        identity: the identity at the last admission.
        failures: how many commands got no reply that counts, by cause.
    """

    def __init__(
        self,
        index: int,
        *,
        packer: scripts.Packer,
        memory: ClusterMemory,
        heartbeat: Heartbeat,
        state: LinkState,
        faults: FaultLog,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._index = index
        self._packer = packer
        self._memory = memory
        self._heartbeat = heartbeat
        self._state = state
        self._faults = faults
        self._clock = clock
        self._log = log
        self.connection: NodeConnection | None = None
        self.identity: Identity | None = None
        self.failures: Counter[NoReply] = Counter()
        self._replay_queue = ReplayQueue()
        self._revalidating_until_ms = 0.0
        self._void_admission_id = ""

    def begin(self, connection: NodeConnection, identity: Identity | None) -> None:
        """Send over a newly admitted connection, beginning with the kept commands."""
        self.identity, self.connection = identity, connection
        self._revalidating_until_ms = 0.0
        self.replay()

    def end_revalidation(self) -> None:
        """Stop answering NOT_ADMITTED: the node did not get its vote back, or cannot be examined."""
        self._revalidating_until_ms = 0.0

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Send `command`, and later call `on_reply` exactly once; see `LockNode`."""
        if self.connection is not None and self.identity is not None:
            admission_id = self.identity.admission
            if isinstance(command, Commit) and command.admission_id:
                admission_id = command.admission_id
            packed = self._packer.pack(command, admission_id)
            if self.connection.call(packed, partial(self._on_raw, command, on_reply, admission_id)):
                return True
        why_not_sent = self._why_not_sent()
        self.failures[why_not_sent] += 1
        self._keep(command, why_not_sent, is_awaited=on_reply is not None)
        if on_reply is not None:
            asyncio.get_running_loop().call_soon(on_reply, why_not_sent)
        return False

    def _keep(self, command: Command, reason: NoReply, *, is_awaited: bool) -> None:
        """Keep a release or an undo for later, unless its caller sends it again, which must arrive first."""
        if not (is_awaited and reason is NoReply.NOT_ADMITTED):
            self._replay_queue.keep(command)

    def _why_not_sent(self) -> NoReply:
        """Return why a command cannot be sent."""
        if self._clock.now_ms() < self._revalidating_until_ms:
            return NoReply.NOT_ADMITTED
        return NoReply.QUARANTINED if self._state.state is NodeState.QUARANTINED else NoReply.UNREACHABLE

    def replay(self, *, at_most: int | None = None) -> None:
        """Send the kept commands, oldest first."""
        for command in self._replay_queue.take(now_ms=self._clock.now_ms(), at_most=at_most):
            self.send(command)

    def _on_raw(
        self, command: Command, on_reply: Callable[[Reply], None] | None, admission_id: str, raw: Any
    ) -> None:
        """Turn the outcome of a command into a reply, and call `on_reply` exactly once.

        A defect ends here: in the connection it would cost other commands their replies, or their timeouts.
        """
        reply: Reply
        try:
            if isinstance(raw, list):
                reply = self._read_reply(command, admission_id, raw, is_awaited=on_reply is not None)
            elif isinstance(raw, ReplyError):
                reply = self._on_error_reply(command, str(raw))
                self.failures[reply] += 1
            elif isinstance(raw, NoReply):
                # A node refuses a void admission id for ever, so it also refused the unanswered commands.
                reply = NoReply.NOT_ADMITTED if admission_id == self._void_admission_id else raw
                # A timed-out command may never run, if the connection is given up; running it twice does no
                # harm.
                self._keep(command, reply, is_awaited=on_reply is not None)
                self.failures[reply] += 1
            else:
                reply = self._on_alien_reply()
            if on_reply is not None:
                on_reply(reply)
        except Exception as defect:
            self._log.error("internal_error", where="node_reply", exc_info=defect)

    def _read_reply(self, command: Command, admission_id: str, raw: list[Any], *, is_awaited: bool) -> Reply:
        """Return the reply of a script."""
        try:
            reply = scripts.read_reply(raw, admission_id=admission_id)
        except scripts.NotAdmittedError:
            self._keep(command, NoReply.NOT_ADMITTED, is_awaited=is_awaited)
            # A late commit under an earlier id shows nothing about the present id.
            if self.identity is not None and admission_id == self.identity.admission:
                self.revalidate("it refused a command: not_admitted")
            return NoReply.NOT_ADMITTED
        except scripts.NumbersExhaustedError:
            self._faults.failed("EXHAUSTED no token below 2^53 is left for a resource")
            return NoReply.REFUSED
        except ValueError:
            return self._on_alien_reply()
        return self._observe_grant(reply, raw) if isinstance(reply, Granted) else reply

    def _on_alien_reply(self) -> NoReply:
        """Handle a reply of another program that has written redfence's keys.

        The reply may have a digest, so it is not logged.
        """
        return self._reconnect("an answer that no script gives")

    def _observe_grant(self, reply: Granted, raw: list[Any]) -> Granted:
        """Check the token and the clock in the reply to a granted mint."""
        assert self.identity is not None, "a node that answers was admitted"
        self._memory.see_token(self._index, floor=self.identity.floor, token=reply.token)
        return (
            reply if self._heartbeat.vote_counts(scripts.read_clock_ms(raw)) else replace(reply, counts=False)
        )

    def _on_error_reply(self, command: Command, problem: str) -> NoReply:
        """Handle an error reply: reconnect if that can fix the cause, otherwise go on."""
        code = problem.partition(" ")[0]
        if code not in _FIXED_BY_RECONNECTING:
            # Out of memory, disk full, a right lost: it may pass, and a reconnect would fail other commands.
            self._faults.failed(problem)
            return NoReply.REFUSED
        if code == "NOSCRIPT":
            self._replay_queue.keep(command)  # the next connection loads the script
        return self._reconnect(problem)

    def _reconnect(self, problem: str) -> NoReply:
        """Drop the connection: the node's role or scripts have changed since its admission."""
        if self.connection is not None:
            self._log.warning("node_refused_command", problem=problem)
            self.drop(f"it refused a command: {problem}")
        return NoReply.REFUSED

    def revalidate(self, reason: str) -> None:
        """Drop a connection with a void admission id; answer NOT_ADMITTED until the next examination."""
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
        """Drop the node if another process has got its node index since the admission."""
        if self.identity is not None and self.connection is not None:
            floor, known = self.identity.floor, self._memory.nodes[self._index].floor
            if floor < known:
                self._log.warning("node_superseded", floor=floor, floor_known=known)
                self.drop("another process has got its node index since")
