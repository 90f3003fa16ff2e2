"""The server's lasting link to one node: dial, admission, commands, and again after every break.

States: JOINING until it was first reached; then READY; UNREACHABLE while there is no connection; QUARANTINED while the node answers
but must not vote.
Commands go out only in READY, so a node is never sent anything before it was admitted on that very connection.

While it votes, every answer is watched for what the node shows of its memory and of its clock: a vote counts only if the clock was not set
lately, and a node that shows less than it did before is dropped and looked at anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, Final

import structlog

from redfence_server import scripts
from redfence_server.clock import WallClock
from redfence_server.cluster_memory import ClusterMemory
from redfence_server.deferred_commands import Asked, DeferredCommands, Repeatable
from redfence_server.kept_commands import KeptCommands
from redfence_server.link_state import LinkState
from redfence_server.lock_node import (
    Command,
    Commit,
    Durability,
    Granted,
    NodeReport,
    NodeState,
    Notice,
    Plain,
    Pulse,
    Pulsed,
    Renewed,
    Reply,
    Silence,
    Vouch,
)
from redfence_server.node_clock import NodeClock, Step
from redfence_server.node_connection import NodeConnection, ReplyError
from redfence_server.node_examination import Identity
from redfence_server.node_joining import JoiningSettings, NodeJoining, TurnedAwayError, quarantine_ms
from redfence_server.randomness import Randomness
from redfence_server.redis_dial import Dial, DialError, DialledNode, DialRefusedError, NodeUrl, dial

# How long to wait before dialling again: doubled from the first to the last, with jitter of a half.
_BACKOFF_MS_FIRST: Final = 50
_BACKOFF_MS_LAST: Final = 2_000
# A connection that lasted so long is made again at once.
_SERVED_WELL_MS: Final = 1_000
# How much of what was kept for the node is sent at each answered pulse.
_KEPT_PER_PULSE: Final = 100
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
        joining: how a node gets its vote.
        dial: how to connect.
    """

    packer: scripts.Packer
    channel: str
    node_timeout_ms: int
    dial_timeout_ms: int
    joining: JoiningSettings
    dial: Dial = dial


class NodeLink:
    """A `LockNode` over the wire. Start it once; it keeps itself connected until closed."""

    def __init__(
        self,
        url: NodeUrl,
        *,
        index: int,
        settings: LinkSettings,
        memory: ClusterMemory,
        clock: WallClock,
        randomness: Randomness,
        on_state: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a link that is not connected.

        Args:
            url: of the node.
            index: its place.
            settings: what all links share.
            memory: likewise.
            clock: this machine's.
            randomness: for jitter and ids.
            on_state: told when its state has changed.
        """
        self.index = index
        self._url = url
        self._settings = settings
        self._memory = memory
        self._place = memory.places[index]
        self._clock = clock
        self._randomness = randomness
        self._log = structlog.get_logger().bind(node_index=index, node_address=url.address)
        self.joining = NodeJoining(
            index, settings=settings.joining, memory=memory, clock=clock, randomness=randomness, log=self._log
        )
        self._connection: NodeConnection | None = None
        self._identity: Identity | None = None
        self._admission = ""
        self._node_clock: NodeClock | None = None
        # Until when its votes do not count by a step that was seen here. The node is told so until then, but never what it answered itself.
        self._set_until_ms = 0.0
        self._state = LinkState(clock=clock, log=self._log, on_change=on_state)
        self._latency_ms: float | None = None
        self._last_error_code = ""
        self._notice_gap = ""
        self._kept = KeptCommands()
        self._deferred = DeferredCommands(self._kept, clock=clock)
        self._on_notice: Callable[[Notice], None] = _ignore
        self._task: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] | None = None
        self.turned_away: TurnedAwayError | None = None
        """Why the node must not vote, when it was turned away."""
        self.examined = asyncio.Event()
        """Set once the first try to join has come to an end, good or bad."""

    # --- LockNode -------------------------------------------------------------------------------------------------

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Carry out `command` and tell `on_reply` exactly once, later; see `LockNode`."""
        return self._send(Asked(command, on_reply))

    def _send(self, asked: Asked) -> bool:
        connection, command = self._connection, asked.command
        if connection is not None:
            asked.under = self._admission
            if isinstance(command, Commit | Vouch) and command.under:
                asked.under = command.under
            packed = self._settings.packer.pack(command, asked.under)
            asked.changes_known = self._place.changes
            if connection.call(packed, partial(self._on_raw, asked)):
                return True
        if self._deferred.is_looking:
            self._deferred.defer(asked)
            return False
        self._kept.keep(command)
        if asked.on_reply is not None:
            quarantined = self._state.state is NodeState.QUARANTINED
            why = Silence.QUARANTINED if quarantined else Silence.UNREACHABLE
            asyncio.get_running_loop().call_soon(asked.on_reply, why)
        return False

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        """Pass on the notices that this server asked for; see `LockNode`."""
        self._on_notice = on_notice

    def report(self) -> NodeReport:
        """Tell what is known of the node, without asking it."""
        now_ms = self._clock.now_ms()
        offset_ms = self._node_clock.offset_ms if self._node_clock else None
        distrusted_ms = self._node_clock.distrusted_for_ms(now_ms) if self._node_clock else 0.0
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
            high=self._place.number,
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

    def _on_raw(self, asked: Asked, raw: Any) -> None:
        """Take what came of a command that was sent."""
        reply: Reply
        if isinstance(raw, ReplyError):
            reply = self._failed(asked.command, str(raw))
        elif not isinstance(raw, Silence):
            try:
                reply = self._answered(asked, raw)
            except scripts.NotAdmittedError:
                self._not_admitted(asked)
                return
        elif self._deferred.is_looking:
            # An admission id that was refused once is refused for ever, and so was whatever was sent behind the refused command.
            # Only where the node lacks its greatest number may what can be repeated have been carried out.
            self._deferred.defer(asked)
            return
        else:
            reply = raw
            # What timed out may still be carried out; but if the connection is given up, it is not. Once more is no harm.
            self._kept.keep(asked.command)
        if asked.on_reply is not None:
            asked.on_reply(reply)

    def _answered(self, asked: Asked, raw: Any) -> Reply:
        """Return what a script answered.

        Raises:
            NotAdmittedError: it refused.
        """
        if self._last_error_code:
            self._last_error_code = self._state.detail = ""
        try:
            reply = self._watched(scripts.read_reply(raw, under=asked.under), raw, asked.changes_known)
        except scripts.NumbersExhaustedError:
            self._log.error("node_numbers_exhausted")
            return Silence.REFUSED
        except ValueError:
            # Somebody else has written to our keys. The answer itself is not for the log: it has a digest.
            return self._refused("an answer that no script gives")
        if isinstance(asked.command, Vouch) and reply is Plain.VOUCHED:
            self._renew_admission(asked.command)
        return reply

    def _not_admitted(self, asked: Asked) -> None:
        """Look at the node anew, if that is not under way; and send again what means the same then."""
        # Under an id of before, there is nothing to look for: this server itself has given the node another one meanwhile.
        if asked.under == self._admission and self._connection is not None:
            self._deferred.begin_look()
            self._refused("not_admitted")
        if isinstance(asked.command, Repeatable):
            self._send(asked)
        elif asked.on_reply is not None:
            asked.on_reply(Silence.NOT_ADMITTED)

    def _watched(self, reply: Reply, raw: list[Any], known: int) -> Reply:
        """Take from an answer what it shows of the node's memory and clock; one of a node that has forgotten does not count."""
        if not (isinstance(reply, Granted | Renewed | Pulsed) or reply in {Plain.COMMITTED, Plain.VOUCHED}):
            return reply
        changes = scripts.read_changes(raw)
        # What it was sent is one more, but for a pulse. That it was admitted is no proof: of what is known, the decisive part may
        # have been learnt since (test_a_node_that_went_back_while_no_server_ran_…).
        if changes < known + (not isinstance(reply, Pulsed)):
            self._log.warning("node_forgot", changes=changes, changes_known=known)
            self._drop("it has forgotten changes that it had answered")
            return Silence.REFUSED
        assert self._identity is not None, "who answers was admitted"
        floor = self._identity.floor
        if not isinstance(reply, Granted):
            self._memory.heard(self.index, floor=floor, changes=changes)
            return reply
        self._memory.heard(self.index, floor=floor, changes=changes, number=reply.token)
        if self._node_clock is not None:
            now_ms = self._clock.now_ms()
            step = self._node_clock.check(received_ms=now_ms, node_ms=scripts.read_clock_ms(raw))
            self._note_step(step)
            if not self._node_clock.trusted(now_ms):
                return replace(reply, counts=False)
        return reply

    def _failed(self, command: Command, problem: str) -> Silence:
        """Take an error reply: start over where a new connection can mend it, and otherwise go on."""
        code = problem.partition(" ")[0]
        if code not in _MENDED_BY_RECONNECTING:
            # Out of memory, disk full, a busy script: it may pass, and reconnecting would only take the others along.
            if code != self._last_error_code:
                self._log.warning("node_command_failed", problem=problem)
            self._last_error_code = code
            # It is there, and yet of no use: whoever looks has to see why.
            self._state.detail = f"its last answer was an error: {problem}"
            return Silence.REFUSED
        if code == "NOSCRIPT":
            self._kept.keep(command)  # the next connection loads it
        return self._refused(problem)

    def _refused(self, problem: str) -> Silence:
        """Start over with the node: its identity, its role or its scripts are not what was found at admission."""
        if self._connection is not None:
            self._log.warning("node_refused_command", problem=problem)
            self._drop(f"it refused a command: {problem}")
        return Silence.REFUSED

    def _drop(self, reason: str) -> None:
        """End the connection, to look at the node anew."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort(reason)

    def _send_waiting(self) -> None:
        """Send what could not be sent until now."""
        deferred = self._deferred.end_look()
        self._send_kept()
        for asked in deferred:
            self._send(asked)

    def _send_kept(self, *, at_most: int | None = None) -> None:
        for command in self._kept.take(now_ms=self._clock.now_ms(), at_most=at_most):
            self.send(command)

    # --- memory and clock -----------------------------------------------------------------------------------------

    def know(self, others: Sequence[NodeLink]) -> None:
        """Get to know every other node of the cluster; to be called before `start`."""
        self.joining.others = others
        self.joining.fellows = [other.joining for other in others]

    def review(self) -> None:
        """Drop the node if what was learnt since it was admitted speaks against it."""
        if (
            self._identity is not None
            and self._identity.floor < self._place.floor
            and self._connection is not None
        ):
            self._log.warning("node_superseded", floor=self._identity.floor, floor_known=self._place.floor)
            self._drop("another node, or a later state of this one, has voted at its place since")

    def pulse(self) -> None:
        """Exchange with the node what is known of the cluster, and read its clock."""
        if self._connection is not None:
            now_ms = self._clock.now_ms()
            distrusted_ms = ceil(max(0.0, self._set_until_ms - now_ms))
            self.send(Pulse(self._memory.changes(), distrusted_ms), partial(self._on_pulse, now_ms))

    def _on_pulse(self, sent_ms: float, reply: Reply) -> None:
        if not isinstance(reply, Pulsed):
            return
        # Of what it was sent before nothing is unanswered, so there is room for what found none. A few at a time, for a node that is
        # late with many commands must not be made later by their repetition.
        self._send_kept(at_most=_KEPT_PER_PULSE)
        assert self._identity is not None, "who answers was admitted"
        self._memory.pulsed(self.index, reply, floor=self._identity.floor)
        if self._node_clock is not None:
            received_ms = self._clock.now_ms()
            # Another server saw a step, or this one in a life before.
            self._node_clock.distrust_until(received_ms + reply.distrusted_ms)
            self._note_step(
                self._node_clock.note(sent_ms=sent_ms, received_ms=received_ms, node_ms=reply.clock_ms)
            )

    def _renew_admission(self, vouch: Vouch) -> None:
        """Go on under the id that this server gave the node: it knows what the others have to look for."""
        self._memory.told(vouch.place, floor=vouch.floor, changes=vouch.changes)
        self._admission = vouch.admission

    def _note_step(self, step: Step | None) -> None:
        if step is not None and self._node_clock is not None:
            distrusted_ms = self._node_clock.distrusted_for_ms(self._clock.now_ms())
            self._log.warning(
                "node_clock_set", by_ms=round(step.by_ms), votes_count_in_ms=round(distrusted_ms)
            )
            # Whoever looks at the node next has to know.
            self._set_until_ms = self._clock.now_ms() + distrusted_ms
            self.pulse()

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
        self._deferred.fail_look(Silence.DISCONNECTED)

    def _note_death(self, task: asyncio.Task[None]) -> None:
        """Tell of a defect that ended the link: the node stays lost until the server is started anew."""
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._log.error("defect", where="node_link", exc_info=defect)
            self._become(NodeState.UNREACHABLE, f"a defect ended the link: {defect!r}")
            self._deferred.fail_look(Silence.UNREACHABLE)
            self.examined.set()

    async def _run(self) -> None:
        backoff_ms: float = _BACKOFF_MS_FIRST
        while True:
            pause_ms = backoff_ms
            began_ms = self._clock.now_ms()
            try:
                await self._join_and_serve()
                backoff_ms = _BACKOFF_MS_FIRST
                # Most often it has only got a new admission id: look at once, but not over and over.
                pause_ms = 0 if self._clock.now_ms() - began_ms > _SERVED_WELL_MS else _BACKOFF_MS_FIRST
            except (
                DialError,
                OSError,
            ) as error:  # the latter when the machine refuses a file, which may pass
                self.joining.looked.set()
                self._become(NodeState.UNREACHABLE, str(error))
                self._deferred.fail_look(Silence.UNREACHABLE)
                backoff_ms = min(2 * backoff_ms, _BACKOFF_MS_LAST)
            except TurnedAwayError as error:
                self.turned_away = error
                self._become(NodeState.QUARANTINED, error.detail)
                self._deferred.fail_look(Silence.QUARANTINED)
                pause_ms = error.recheck_ms
            self.examined.set()
            await asyncio.sleep(pause_ms * self._randomness.uniform(0.5, 1.0) / 1000)

    async def _join_and_serve(self) -> None:
        """Return when a connection that was admitted has ended."""
        dialled = await self._settings.dial(self._url, timeout_ms=self._settings.dial_timeout_ms)
        try:
            identity = await self.joining.join(dialled)
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
            self._admit(identity)
            self._connection = connection
            # Before anything else, so that the clock is known before the first vote comes.
            self.pulse()
            self._send_waiting()
            self._last_error_code = ""
            self._become(NodeState.READY, "")
            self.examined.set()
            self.review()
            reason = await self._lost
            self._become(NodeState.UNREACHABLE, reason)
        finally:
            self._connection = None
            self.joining.leave()
            await dialled.close()

    def _admit(self, identity: Identity) -> None:
        self.turned_away = None
        if self._identity is None or self._identity.floor != identity.floor:
            # It may be another machine now, with a clock of its own.
            self._node_clock = NodeClock(distrust_ms=quarantine_ms(identity.max_ttl_ms))
        self._identity = identity
        self._admission = identity.admission

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
            notice = scripts.read_notice(payload, keys=self._settings.joining.keys, node=self.index)
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
    """Nobody listens."""
