"""The server's lasting link to one node: dial, admission, commands, and again after every break.

States: JOINING until it was first reached; then READY; UNREACHABLE while there is no connection; QUARANTINED while the node answers
but must not vote.
Commands go out only in READY, so a node is never sent anything before it was admitted on that very connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog

from redfence_server import node_admission, scripts
from redfence_server.clock import Clock
from redfence_server.lock_node import (
    Command,
    Mint,
    NodeReport,
    NodeState,
    Notice,
    Release,
    Reply,
    Silence,
    Undo,
)
from redfence_server.node_admission import Admitted, Expectation, Identity, Rejected
from redfence_server.node_connection import NodeConnection, ReplyError
from redfence_server.randomness import Randomness
from redfence_server.redis_dial import DialError, DialledNode, DialRefusedError, NodeUrl, dial

# How long to wait before dialling again: doubled from the first to the last, with jitter of a half.
_BACKOFF_MS_FIRST: Final = 50
_BACKOFF_MS_LAST: Final = 2_000
# A node that is up but must not vote is looked at again this often.
_QUARANTINE_RECHECK_MS: Final = 2_000
# Undos and releases kept for a node that is away. Beyond it the oldest are dropped: their holds end by their ttl.
_KEPT_MAX: Final = 10_000
# Scripts flushed, turned into a replica, password or rights changed: admission finds out what it is.
_MENDED_BY_RECONNECTING: Final = frozenset({"NOSCRIPT", "READONLY", "NOAUTH", "NOPERM"})


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What every link of a server shares.

    Attributes:
        packer: one for all links, so that a command for all nodes is packed once.
        channel: of this server, for notices.
        node_timeout_ms: how long a command may stay unanswered.
        dial_timeout_ms: how long each step of connecting may take.
        assume_durable: the operator's word that a restarted node forgets nothing.
    """

    keys: scripts.Keyspace
    packer: scripts.Packer
    channel: str
    node_count: int
    node_timeout_ms: int
    dial_timeout_ms: int
    assume_durable: bool


class ClusterIdentity:
    """Which cluster the nodes belong to: set by the first admitted node, and binding for the others."""

    def __init__(self) -> None:
        self.cluster_id: str | None = None
        self.ttl_ms_max: int | None = None

    def learn(self, identity: Identity) -> None:
        """Take over a first node's cluster."""
        if self.cluster_id is None:
            self.cluster_id = identity.cluster_id
            self.ttl_ms_max = identity.max_ttl_ms


class NodeLink:
    """A `LockNode` over the wire. Start it once; it keeps itself connected until closed."""

    def __init__(
        self,
        url: NodeUrl,
        *,
        index: int,
        settings: LinkSettings,
        cluster: ClusterIdentity,
        clock: Clock,
        randomness: Randomness,
    ) -> None:
        self.index = index
        self._url = url
        self._settings = settings
        self._cluster = cluster
        self._clock = clock
        self._randomness = randomness
        self._log = structlog.get_logger().bind(node_index=index, node_address=url.address)
        self._connection: NodeConnection | None = None
        self._admission = b""
        self._state = NodeState.JOINING
        self._detail = "connecting for the first time"
        self._since_ms = clock.now_ms()
        self._logged_state: NodeState | None = None
        self._run_id = ""
        self._latency_ms: float | None = None
        self._last_error_code = ""
        self._notice_gap = ""
        self._kept: deque[Undo | Release] = deque(maxlen=_KEPT_MAX)
        self._on_notice: Callable[[Notice], None] = _ignore
        self._task: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] | None = None
        self.rejected: Rejected | None = None
        """Why the node was turned away, when it was."""
        self.examined = asyncio.Event()
        """Set once the first try to join has come to an end, good or bad."""

    # --- LockNode -------------------------------------------------------------------------------------------------

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> None:
        """Carry out `command` and tell `on_reply` exactly once, later; see `LockNode`."""
        connection = self._connection
        if connection is not None:
            packed = self._settings.packer.pack(command, self._admission)
            if connection.call(packed, partial(self._on_raw, command, on_reply)):
                return
        self._keep(command)
        if on_reply is not None:
            asyncio.get_running_loop().call_soon(on_reply, Silence.UNREACHABLE)

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        """Pass on the notices that this server asked for; see `LockNode`."""
        self._on_notice = on_notice

    def report(self) -> NodeReport:
        """Tell what is known of the node, without asking it."""
        return NodeReport(
            address=self._url.address,
            state=self._state,
            detail=self._detail or self._notice_gap,
            run_id=self._run_id,
            latency_ms=self._connection.latency_ms if self._connection else self._latency_ms,
            since_ms=self._clock.now_ms() - self._since_ms,
        )

    def _on_raw(self, command: Command, on_reply: Callable[[Reply], None] | None, raw: Any) -> None:
        reply: Reply
        if isinstance(raw, Silence):
            reply = raw
            # What timed out may still be carried out; but if the connection is given up, it is not.
            self._keep(command)
        elif isinstance(raw, ReplyError):
            reply = self._failed(command, str(raw))
        else:
            if self._last_error_code:
                self._last_error_code = self._detail = ""
            try:
                reply = scripts.read_reply(raw)
            except scripts.NotAdmittedError:
                reply = self._refused("not_admitted")
            except scripts.NumbersExhaustedError:
                self._log.error("node_numbers_exhausted")
                reply = Silence.REFUSED
            except ValueError:
                # Somebody else has written to our keys. The answer itself is not for the log: it has a digest.
                reply = self._refused("an answer that no script gives")
        if on_reply is not None:
            on_reply(reply)

    def _failed(self, command: Command, problem: str) -> Silence:
        """Take an error reply: start over where a new connection can mend it, and otherwise go on."""
        code = problem.partition(" ")[0]
        if code not in _MENDED_BY_RECONNECTING:
            # Out of memory, disk full, a busy script: it may pass, and reconnecting would only take the others along.
            if code != self._last_error_code:
                self._log.warning("node_command_failed", problem=problem)
            self._last_error_code = code
            # It is there, and yet of no use: whoever looks has to see why.
            self._detail = f"its last answer was an error: {problem}"
            return Silence.REFUSED
        if code == "NOSCRIPT":
            self._keep(command)  # the next connection loads it
        return self._refused(problem)

    def _refused(self, problem: str) -> Silence:
        """Start over with the node: its identity, its role or its scripts are not what was found at admission."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._log.warning("node_refused_command", problem=problem)
            connection.abort(f"it refused a command: {problem}")
        return Silence.REFUSED

    def _keep(self, command: Command) -> None:
        # Late is better than never only for what ends a hold; a missed one would block the lock until its ttl ends, if
        # another node missed another. An undo goes by an attempt's nonce and so can end nothing else; a release goes by the
        # lease id, which the contract tells callers never to use for a second acquisition.
        #
        # Of a hand-over, what it ends is kept; what it mints is the attempt's to undo.
        ends = command.ends if isinstance(command, Mint) else command
        if isinstance(ends, Undo | Release):
            self._kept.append(ends)

    def _send_kept(self) -> None:
        kept, self._kept = self._kept, deque(maxlen=_KEPT_MAX)
        now_ms = self._clock.now_ms()
        for command in kept:
            if command.worthless_at_ms > now_ms:
                self.send(command)

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect, and stay connected until `close`."""
        self._task = asyncio.create_task(self._run(), name=f"node-link-{self.index}")
        self._task.add_done_callback(self._note_death)

    async def close(self) -> None:
        """End the connection and wait for it; commands under way are told `Silence.DISCONNECTED`. May be repeated."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _note_death(self, task: asyncio.Task[None]) -> None:
        """Tell of a defect that ended the link: the node stays lost until the server is started anew."""
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._log.error("defect", where="node_link", exc_info=defect)
            self._become(NodeState.UNREACHABLE, f"a defect ended the link: {defect!r}")
            self.examined.set()

    async def _run(self) -> None:
        backoff_ms: float = _BACKOFF_MS_FIRST
        while True:
            pause_ms = backoff_ms
            try:
                await self._join_and_serve()
                backoff_ms = pause_ms = _BACKOFF_MS_FIRST
            except DialError as error:
                self._become(NodeState.UNREACHABLE, str(error))
                backoff_ms = min(2 * backoff_ms, _BACKOFF_MS_LAST)
            except _TurnedAwayError:
                pause_ms = _QUARANTINE_RECHECK_MS
            self.examined.set()
            await asyncio.sleep(pause_ms * self._randomness.uniform(0.5, 1.0) / 1000)

    async def _join_and_serve(self) -> None:
        """Return when a connection that was admitted has ended."""
        dialled = await dial(self._url, timeout_ms=self._settings.dial_timeout_ms)
        try:
            identity = await self._admit(dialled)
            for source in scripts.sources():
                await dialled.command("SCRIPT", "LOAD", source)
            self._lost = asyncio.get_running_loop().create_future()
            speaks_resp3 = await self._ask_for_resp3(dialled)
            connection = NodeConnection(
                node_timeout_ms=self._settings.node_timeout_ms,
                on_lost=self._note_loss,
                on_notice=self._on_raw_notice,
            )
            dialled.hand_over(connection)
            if speaks_resp3:
                connection.subscribe(self._settings.channel, self._on_subscribed)
            self._admission = identity.admission.encode()
            self._connection = connection
            self._send_kept()
            self._last_error_code = ""
            self._become(NodeState.READY, "")
            self.examined.set()
            reason = await self._lost
            self._become(NodeState.UNREACHABLE, reason)
        finally:
            self._connection = None
            await dialled.close()

    async def _ask_for_resp3(self, dialled: DialledNode) -> bool:
        try:
            await dialled.command("HELLO", 3)
        except DialRefusedError as error:
            self._on_subscribed(str(error))
            return False
        return True

    def _on_subscribed(self, refusal: str) -> None:
        self._notice_gap = ""
        if refusal:
            # It votes all the same: who waits is then woken by the expiry alone.
            self._notice_gap = f"it refuses to give notices: {refusal}"
            self._log.warning("node_notices_refused", problem=refusal)

    def _on_raw_notice(self, payload: bytes) -> None:
        try:
            notice = scripts.read_notice(payload, keys=self._settings.keys, node=self.index)
        except ValueError:
            self._log.warning("node_notice_malformed")
            return
        self._on_notice(notice)

    def _note_loss(self, reason: str) -> None:
        if self._connection is not None:
            self._latency_ms = self._connection.latency_ms
        self._connection = None
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    async def _admit(self, dialled: DialledNode) -> Identity:
        found = await node_admission.examine(dialled, self._settings.keys)
        self._run_id = found.run_id
        expected = Expectation(
            index=self.index,
            node_count=self._settings.node_count,
            cluster_id=self._cluster.cluster_id,
            assume_durable=self._settings.assume_durable,
        )
        judgement = node_admission.judge(expected, found)
        if isinstance(judgement, Rejected):
            self.rejected = judgement
            self._become(NodeState.QUARANTINED, judgement.detail)
            raise _TurnedAwayError
        if judgement.restarted:
            await self._note_run(dialled, judgement, found.run_id)
        self.rejected = None
        self._cluster.learn(judgement.identity)
        return judgement.identity

    async def _note_run(self, dialled: DialledNode, judgement: Admitted, run_id: str) -> None:
        identity = judgement.identity
        found = (identity.admission, identity.run_id)
        noted = (run_id, "1" if judgement.durable else "0")
        source, key = scripts.load("note_run"), self._settings.keys.node
        if await dialled.command("EVAL", source, 1, key, *found, *noted) != [b"noted"]:
            raise DialError("its identity changed while it was being admitted")
        self._log.info(
            "node_run_noted", run_id_before=identity.run_id, run_id=run_id, durable=judgement.durable
        )

    def _become(self, state: NodeState, detail: str) -> None:
        if state is not self._state:
            self._since_ms = self._clock.now_ms()
        self._state, self._detail = state, detail
        # A node that stays away is dialled again and again; that is told once.
        if state is NodeState.JOINING or state is self._logged_state:
            return
        before, self._logged_state = self._logged_state, state
        if state is NodeState.READY and before is None:
            self._log.info("node_ready", run_id=self._run_id)
        elif state is NodeState.READY:
            # As loud as its loss: whoever was told of that waits for this.
            self._log.warning("node_back", run_id=self._run_id)
        else:
            self._log.warning("node_lost", state=state.name.lower(), detail=detail)


def _ignore(_: Notice) -> None:
    """Nobody listens."""


class _TurnedAwayError(Exception):
    """The node answered but must not vote."""
