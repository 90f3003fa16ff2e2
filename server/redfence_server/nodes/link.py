"""The server's lasting link to one node: dial, admission, commands, and again after every break.

States: JOINING until it was first reached; then READY; UNREACHABLE while there is no connection; QUARANTINED while the node
answers but must not vote. Commands go out only in READY, so a node is sent nothing before it was admitted on that very
connection.

While the node votes, membership/heartbeat.py examines it again and again. A node that would not be admitted now is dropped and
examined on a new connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import structlog

from redfence_server.clock import WallClock
from redfence_server.locking.node import (
    REVALIDATION_MS_MAX,
    Command,
    Commit,
    Durability,
    Granted,
    NodeReport,
    NodeState,
    Notice,
    Reply,
    Silence,
)
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.examination import Findings, Identity
from redfence_server.membership.heartbeat import Heartbeat, HeartbeatSettings, NotAdmitted
from redfence_server.membership.joining import JoiningSettings, NodeJoining, TurnedAwayError
from redfence_server.nodes.connection import NodeConnection, ReplyError
from redfence_server.nodes.link_state import LinkState
from redfence_server.nodes.replay_queue import KeptCommands
from redfence_server.randomness import Randomness
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import DialError, DialledNode, DialRefusedError

# How long to wait before dialling again: doubled from the first to the last, with jitter of a half.
_BACKOFF_MS_FIRST: Final = 50
_BACKOFF_MS_LAST: Final = 2_000
# A connection that lasted so long is made again at once.
_SERVED_WELL_MS: Final = 1_000
# How many of the commands kept for the node are sent after each heartbeat.
_KEPT_PER_HEARTBEAT: Final = 100
# Scripts flushed, turned into a replica, password or rights changed: admission finds out what it is.
_MENDED_BY_RECONNECTING: Final = frozenset({"NOSCRIPT", "READONLY", "NOAUTH", "NOPERM"})


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What every link of a server shares.

    Attributes:
        packer: one for all links, so that a command for all nodes is packed once.
        channel: on which this server is given notices.
        node_timeout_ms: how long a command may stay unanswered.
    """

    packer: scripts.Packer
    channel: str
    node_timeout_ms: int
    joining: JoiningSettings
    heartbeat: HeartbeatSettings


@dataclass(slots=True, eq=False)
class _Sent:
    """A command on its way, under an admission id; `on_reply` is called exactly once."""

    command: Command
    on_reply: Callable[[Reply], None] | None
    admission: str


class NodeLink:
    """A `LockNode` over the wire. Start it once; it keeps itself connected until closed.

    Attributes:
        turned_away: why the node must not vote; None if the node was not turned away.
        examined: set once the first try to join has ended, good or bad.
    """

    def __init__(
        self,
        index: int,
        *,
        settings: LinkSettings,
        memory: ClusterMemory,
        clock: WallClock,
        randomness: Randomness,
        on_state: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = index
        self._url = settings.joining.urls[index]
        self._settings = settings
        self._memory = memory
        self._place = memory.places[index]
        self._clock = clock
        self._randomness = randomness
        self._log = structlog.get_logger().bind(node_index=index, node_address=self._url.address)
        self.joining = NodeJoining(
            index, settings=settings.joining, memory=memory, clock=clock, randomness=randomness, log=self._log
        )
        self._connection: NodeConnection | None = None
        self._identity: Identity | None = None
        self.heartbeat = Heartbeat(
            index,
            settings=settings.heartbeat,
            joining=self.joining,
            clock=clock,
            randomness=randomness,
            log=self._log,
        )
        self._state = LinkState(clock=clock, log=self._log, on_change=on_state)
        self._latency_ms: float | None = None
        self._last_error_code = ""
        self._notice_gap = ""
        self._kept = KeptCommands()
        self._revalidating_until_ms = 0.0
        self._void_admission = ""
        self._on_notice: Callable[[Notice], None] = _ignore
        self._task: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] | None = None
        self.turned_away: TurnedAwayError | None = None
        self.examined = asyncio.Event()

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Carry out `command` and tell `on_reply` exactly once, later; see `LockNode`."""
        if self._connection is not None and self._identity is not None:
            admission = self._identity.admission
            if isinstance(command, Commit) and command.under:
                admission = command.under
            sent = _Sent(command, on_reply, admission)
            if self._connection.call(
                self._settings.packer.pack(command, admission), partial(self._on_raw, sent)
            ):
                return True
        absence = self._absence()
        self._keep(command, absence, is_awaited=on_reply is not None)
        if on_reply is not None:
            asyncio.get_running_loop().call_soon(on_reply, absence)
        return False

    def _keep(self, command: Command, silence: Silence, *, is_awaited: bool) -> None:
        """Keep what ends a hold for later, unless its caller makes it again: that one must be the first to arrive."""
        if not (is_awaited and silence is Silence.NOT_ADMITTED):
            self._kept.keep(command)

    def _absence(self) -> Silence:
        """Return why a command cannot be sent."""
        if self._is_revalidating:
            return Silence.NOT_ADMITTED
        return Silence.QUARANTINED if self._state.state is NodeState.QUARANTINED else Silence.UNREACHABLE

    @property
    def _is_revalidating(self) -> bool:
        """Tell whether the node has to be examined again, and not for too long."""
        return self._clock.now_ms() < self._revalidating_until_ms

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        """Pass on the notices that this server asked for; see `LockNode`."""
        self._on_notice = on_notice

    def report(self) -> NodeReport:
        """Tell what is known of the node, without asking it."""
        now_ms = self._clock.now_ms()
        node_clock = self.heartbeat.node_clock
        offset_ms = node_clock.offset_ms if node_clock else None
        distrusted_ms = node_clock.distrusted_for_ms(now_ms) if node_clock else 0.0
        clock_set = (
            f"its clock was set: its votes do not count for {distrusted_ms / 1000:.0f} s"
            if distrusted_ms
            else ""
        )
        return NodeReport(
            address=self._url.address,
            state=self._state.state,
            detail=self._state.detail or clock_set or self._notice_gap,
            run_id=self.joining.run_id,
            latency_ms=self._connection.latency_ms if self._connection else self._latency_ms,
            since_ms=now_ms - self._state.since_ms,
            durability=self._durability(),
            high=self._place.token,
            clock_offset_ms=None if offset_ms is None else offset_ms + now_ms - self._clock.wall_ms(),
            clock_distrusted_ms=distrusted_ms,
            state_changes=self._state.changes,
        )

    def _durability(self) -> Durability:
        if self._identity is None:
            return Durability.UNKNOWN
        if self._identity.durable:
            return Durability.PROVEN
        return Durability.DECLARED if self._settings.joining.assume_durable else Durability.NONE

    def _on_raw(self, sent: _Sent, raw: Any) -> None:
        """Take what came of a command that was sent."""
        reply: Reply
        if isinstance(raw, ReplyError):
            reply = self._failed(sent.command, str(raw))
        elif isinstance(raw, Silence):
            # A node refuses a void admission id for ever, so it has refused what it did not answer as well.
            reply = Silence.NOT_ADMITTED if sent.admission == self._void_admission else raw
            # What timed out may still be carried out; but if the connection is given up, it is not. Once more is no harm.
            self._keep(sent.command, reply, is_awaited=sent.on_reply is not None)
        else:
            reply = self._answered(sent, raw)
        if sent.on_reply is not None:
            sent.on_reply(reply)

    def _answered(self, sent: _Sent, raw: Any) -> Reply:
        """Return what a script answered."""
        if self._last_error_code:
            self._last_error_code = self._state.detail = ""
        try:
            reply = scripts.read_reply(raw, under=sent.admission)
        except scripts.NotAdmittedError:
            self._keep(sent.command, Silence.NOT_ADMITTED, is_awaited=sent.on_reply is not None)
            # A late commit of an attempt that began under an earlier id tells nothing of the present one.
            if self._identity is not None and sent.admission == self._identity.admission:
                self._revalidate("it refused a command: not_admitted")
            return Silence.NOT_ADMITTED
        except scripts.NumbersExhaustedError:
            self._log.error("node_numbers_exhausted")
            return Silence.REFUSED
        except ValueError:
            # Another program has written redfence's keys. The answer has a digest, so it is not logged.
            return self._refused("an answer that no script gives")
        return self._watched(reply, raw) if isinstance(reply, Granted) else reply

    def _watched(self, reply: Granted, raw: list[Any]) -> Granted:
        """Take from a granted mint what it shows of the node's memory and clock."""
        assert self._identity is not None, "a node that answers was admitted"
        self._memory.see_token(self.index, floor=self._identity.floor, token=reply.token)
        return reply if self.heartbeat.counts(scripts.read_clock_ms(raw)) else replace(reply, counts=False)

    def _failed(self, command: Command, problem: str) -> Silence:
        """Take an error reply: start over where a new connection can mend it, and otherwise go on."""
        code = problem.partition(" ")[0]
        if code not in _MENDED_BY_RECONNECTING:
            # Out of memory, disk full, a busy script: it may pass, and reconnecting would only take the others along.
            if code != self._last_error_code:
                self._log.warning("node_command_failed", problem=problem)
            self._last_error_code = code
            # It answers, and yet is of no use: an operator has to see why.
            self._state.detail = f"its last answer was an error: {problem}"
            return Silence.REFUSED
        if code == "NOSCRIPT":
            self._kept.keep(command)  # the next connection loads it
        return self._refused(problem)

    def _refused(self, problem: str) -> Silence:
        """Start over with the node: its role or its scripts are not what was found at admission."""
        if self._connection is not None:
            self._log.warning("node_refused_command", problem=problem)
            self._drop(f"it refused a command: {problem}")
        return Silence.REFUSED

    def _revalidate(self, reason: str) -> None:
        """Examine the node again on a new connection, for the admission id is void; until then commands are NOT_ADMITTED."""
        if self._connection is not None and self._identity is not None:
            self._void_admission = self._identity.admission
            self._revalidating_until_ms = self._clock.now_ms() + REVALIDATION_MS_MAX
            self._log.info("node_revalidation", reason=reason)
            self._drop(reason)

    def _drop(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort(reason)

    def drop_if_superseded(self) -> None:
        """Drop the node if another process has got its index since it was admitted."""
        if self._identity is not None and self._connection is not None:
            floor, known = self._identity.floor, self._place.floor
            if floor < known:
                self._log.warning("node_superseded", floor=floor, floor_known=known)
                self._drop("another process has been given its node index since")

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
            began_ms = self._clock.now_ms()
            try:
                await self._join_and_serve()
                backoff_ms = _BACKOFF_MS_FIRST
                # Most often it has only got a new admission id: examine it at once, but not over and over.
                pause_ms = 0 if self._clock.now_ms() - began_ms > _SERVED_WELL_MS else _BACKOFF_MS_FIRST
            except (
                DialError,
                OSError,
            ) as error:  # the latter when the machine refuses a file, which may pass
                self._revalidating_until_ms = 0.0
                self._become(NodeState.UNREACHABLE, str(error))
                backoff_ms = min(2 * backoff_ms, _BACKOFF_MS_LAST)
            except TurnedAwayError as error:
                self._revalidating_until_ms = 0.0
                self.turned_away = error
                self._become(NodeState.QUARANTINED, error.detail)
                pause_ms = error.recheck_ms
            self.examined.set()
            await asyncio.sleep(pause_ms * self._randomness.uniform(0.5, 1.0) / 1000)

    async def _join_and_serve(self) -> None:
        """Return when a connection that was admitted has ended."""
        visiting = self._settings.joining.visiting
        dialled = await visiting.dial(self._url, timeout_ms=visiting.dial_timeout_ms)
        try:
            found = await self.joining.join(dialled)
            for answer in await dialled.commands(
                *(("SCRIPT", "LOAD", source) for source in scripts.sources())
            ):
                if isinstance(answer, DialRefusedError):
                    raise answer
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
            await self._serve(connection, found)
        finally:
            self._connection = None
            self.joining.leave()
            await dialled.close()

    async def _serve(self, connection: NodeConnection, found: Findings) -> None:
        """Send commands to a node that was admitted, until the connection ends."""
        assert self._lost is not None, "the loss of the connection is told"
        self.turned_away = None
        self._identity = found.identity
        self.heartbeat.begin(found)
        self._connection = connection
        self._revalidating_until_ms = 0.0
        self._send_kept()
        self._last_error_code = ""
        self._become(NodeState.READY, "")
        self.examined.set()
        self.drop_if_superseded()
        heartbeat = asyncio.create_task(
            self.heartbeat.run(connection, self._send_some_kept), name=f"heartbeat-{self.index}"
        )
        either: set[asyncio.Future[Any]] = {self._lost, heartbeat}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._lost.done():
                self._note_end(heartbeat.result())
            self._become(NodeState.UNREACHABLE, await self._lost)
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)

    def _note_end(self, end: NotAdmitted) -> None:
        if end.admission_is_void:
            self._revalidate(end.reason)
        else:
            self._log.warning("node_dropped", reason=end.reason)
            self._drop(end.reason)

    def _send_some_kept(self) -> None:
        # There is room now for what found none. A few at a time: repetition must not make a late node later.
        self._send_kept(at_most=_KEPT_PER_HEARTBEAT)

    def _send_kept(self, *, at_most: int | None = None) -> None:
        for command in self._kept.take(now_ms=self._clock.now_ms(), at_most=at_most):
            self.send(command)

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
            # It votes all the same: only expiry then wakes waiters.
            self._notice_gap = f"it refuses to give notices: {refusal}"
            self._log.warning("node_notices_refused", problem=refusal)

    def _on_raw_notice(self, payload: bytes) -> None:
        try:
            notice = scripts.read_notice(payload, keys=self._settings.joining.visiting.keys, node=self.index)
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

    def _become(self, state: NodeState, detail: str) -> None:
        self._state.become(state, detail, run_id=self.joining.run_id)


def _ignore(_: Notice) -> None:
    """Do nothing: the lock service does not listen yet."""
