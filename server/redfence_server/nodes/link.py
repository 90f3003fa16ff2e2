"""Keep a link to one node: dial, admit, send commands, and start again after every break.

A link is JOINING until the server first reaches the node, then READY. It is UNREACHABLE without a connection,
and QUARANTINED while the node answers but must not vote. Commands leave only in READY, so a node gets no
command before its admission on that connection.

While the node votes, membership/heartbeat.py examines it at intervals. A node that would not be admitted now
is dropped, and examined on a new connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog

from redfence_server.clock import WallClock
from redfence_server.locking.node import Durability, NodeReport, NodeState, Notice
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.examination import Findings, Identity
from redfence_server.membership.heartbeat import Heartbeat, HeartbeatSettings, NotAdmitted
from redfence_server.membership.joining import AdmissionRefusedError, JoiningSettings, NodeJoining
from redfence_server.nodes.commands import NodeCommands
from redfence_server.nodes.connection import NodeConnection
from redfence_server.nodes.fault_log import FaultLog
from redfence_server.nodes.key_reader import KeyReader
from redfence_server.nodes.link_state import LinkState
from redfence_server.randomness import Randomness
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import DialError, DialledNode, DialRefusedError

# How long to wait before dialling again: doubles from the first to the last, and jitter takes up to half.
_BACKOFF_MS_FIRST: Final = 50
_BACKOFF_MS_LAST: Final = 2_000
# A connection that lasted this long is dialled again at once.
_STABLE_CONNECTION_MS: Final = 1_000
# How many kept commands are sent after each heartbeat.
_REPLAYED_PER_HEARTBEAT: Final = 100


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The settings that all links of a server share.

    Attributes:
        packer: shared, so that a command for all nodes is packed once.
        channel: the channel of this server's notices.
        node_timeout_ms: how long a command may stay unanswered.
    """

    packer: scripts.Packer
    channel: str
    node_timeout_ms: int
    joining: JoiningSettings
    heartbeat: HeartbeatSettings


class NodeLink:
    """Implements `LockNode` over the wire; stays connected from `start` until `close`.

    Attributes:
        admission_refused: why the node must not vote; None if it was not refused.
        examined: set when the first try to join has ended, with or without success.

    Args:
        on_state: called after each change of the state.
        on_heartbeat: called after each heartbeat of a node that votes, also after a missed one.
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
        on_heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = index
        self._url = settings.joining.urls[index]
        self._settings = settings
        self._memory = memory
        self._node_memory = memory.nodes[index]
        self._clock = clock
        self._randomness = randomness
        self._log = structlog.get_logger().bind(node_index=index, node_address=self._url.address)
        self.joining = NodeJoining(
            index, settings=settings.joining, memory=memory, clock=clock, randomness=randomness, log=self._log
        )
        self.heartbeat = Heartbeat(
            index,
            settings=settings.heartbeat,
            joining=self.joining,
            clock=clock,
            randomness=randomness,
            log=self._log,
        )
        self._state = LinkState(clock=clock, log=self._log, on_change=on_state)
        self._faults = FaultLog(clock=clock, log=self._log)
        self._on_heartbeat = on_heartbeat
        self._last_connection: NodeConnection | None = None
        self._commands = NodeCommands(
            index,
            packer=settings.packer,
            memory=memory,
            heartbeat=self.heartbeat,
            state=self._state,
            faults=self._faults,
            clock=clock,
            log=self._log,
        )
        # Bound directly, because every command takes this path.
        self.send = self._commands.send
        self.drop_if_superseded = self._commands.drop_if_superseded
        keys = KeyReader(self._commands, clock=clock, log=self._log)
        self.scan, self.read = keys.scan, keys.read
        self._notice_problem = ""
        self._on_notice: Callable[[Notice], None] = lambda _: None  # until the lock service listens
        self._task: asyncio.Task[None] | None = None
        self.admission_refused: AdmissionRefusedError | None = None
        self.examined = asyncio.Event()

    @property
    def in_time(self) -> int:
        """How many commands the node may still answer in time."""
        connection = self._commands.connection
        return 0 if connection is None else len(connection.in_time)

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        """Pass the notices for this server to `on_notice`; see `LockNode`."""
        self._on_notice = on_notice

    def report(self) -> NodeReport:
        """Return what this server knows about the node, without asking it."""
        now_ms = self._clock.now_ms()
        node_clock = self.heartbeat.node_clock
        offset_ms = node_clock.offset_ms if node_clock else None
        distrusted_ms = node_clock.distrusted_for_ms(now_ms) if node_clock else 0.0
        refusal = self.heartbeat.grant_refusal if self._state.state is NodeState.READY else ""
        return NodeReport(
            address=self._url.address,
            state=self._state.state,
            detail=self._state.detail or self._problem(refusal, distrusted_ms),
            run_id=self.joining.run_id,
            latency_ms=self._last_connection.latency_ms if self._last_connection else None,
            since_ms=now_ms - self._state.since_ms,
            durability=_durability(
                self._commands.identity, assume_durable=self._settings.joining.assume_durable
            ),
            max_token=self._node_memory.token,
            clock_offset_ms=None if offset_ms is None else offset_ms + now_ms - self._clock.wall_ms(),
            clock_distrusted_ms=distrusted_ms,
            state_changes=self._state.change_count,
            grant_refusal=refusal,
            unanswered=self._commands.connection.unanswered if self._commands.connection else 0,
            failures=self._commands.failures,
        )

    def _problem(self, refusal: str, distrusted_ms: float) -> str:
        """Return what is wrong with a node that votes; empty when all is well."""
        if refusal:
            return f"it would not grant now: {refusal}"
        if distrusted_ms:
            return f"its clock was set: its votes do not count for {distrusted_ms / 1000:.0f} s"
        if self._faults.problem:
            return f"its last answer was an error: {self._faults.problem}"
        return self._notice_problem

    def start(self) -> None:
        """Connect, and stay connected until `close`."""
        self._task = asyncio.create_task(self._run(), name=f"node-link-{self.index}")
        self._task.add_done_callback(self._on_task_done)

    async def close(self) -> None:
        """Close the connection, answer unanswered commands with `NoReply.DISCONNECTED`; safe to repeat."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Report a defect that ended the link; the node stays lost until the server restarts."""
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._log.error("internal_error", where="node_link", exc_info=defect)
            self._become(NodeState.UNREACHABLE, f"an internal error ended the link: {defect!r}")
            self.examined.set()

    async def _run(self) -> None:
        backoff_ms: float = _BACKOFF_MS_FIRST
        while True:
            pause_ms = backoff_ms
            began_ms = self._clock.now_ms()
            try:
                await self._join_and_serve()
                backoff_ms = _BACKOFF_MS_FIRST
                # Usually the node only has a new admission id: examine it at once, but not in a tight loop.
                pause_ms = 0 if self._clock.now_ms() - began_ms > _STABLE_CONNECTION_MS else _BACKOFF_MS_FIRST
            except (DialError, OSError) as error:  # OSError: no file descriptor is free, which may pass
                self._commands.end_revalidation()
                self._become(NodeState.UNREACHABLE, str(error))
                backoff_ms = min(2 * backoff_ms, _BACKOFF_MS_LAST)
            except AdmissionRefusedError as error:
                self._commands.end_revalidation()
                self.admission_refused = error
                self._become(NodeState.QUARANTINED, error.detail)
                pause_ms = error.recheck_ms
            self.examined.set()
            await asyncio.sleep(pause_ms * self._randomness.uniform(0.5, 1.0) / 1000)

    async def _join_and_serve(self) -> None:
        """Dial and admit the node, and serve it until the connection ends."""
        admin = self._settings.joining.admin
        dialled = await admin.dial(self._url, timeout_ms=admin.dial_timeout_ms)
        try:
            found = await self.joining.join(dialled)
            for answer in await dialled.commands(
                *(("SCRIPT", "LOAD", source) for source in scripts.sources())
            ):
                if isinstance(answer, DialRefusedError):
                    raise answer
            lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            speaks_resp3 = await self._ask_for_resp3(dialled)
            self._last_connection = connection = NodeConnection(
                node_timeout_ms=self._settings.node_timeout_ms,
                on_lost=partial(self._on_lost, lost),
                on_notice=self._on_raw_notice,
            )
            dialled.hand_over(connection)
            if speaks_resp3:
                connection.subscribe(self._settings.channel, self._on_subscribed)
            await self._serve(connection, found, lost)
        finally:
            if self._commands.connection is not None:
                # The undos of the calls that end with this server may still wait for the batch before them.
                self._commands.connection.flush()
            self._commands.connection = None
            self.joining.leave()
            await dialled.close()

    async def _serve(self, connection: NodeConnection, found: Findings, lost: asyncio.Future[str]) -> None:
        """Send commands to an admitted node until the connection ends."""
        self.admission_refused = None
        self.heartbeat.begin(found, node_timeout_ms=self._settings.node_timeout_ms)
        self._faults.examined(found.grant_refusal)
        self._commands.begin(connection, found.identity)
        self._become(NodeState.READY, "")
        self.examined.set()
        self.drop_if_superseded()
        heartbeat = asyncio.create_task(
            self.heartbeat.run(connection, self._on_alive, self._on_heartbeat), name=f"heartbeat-{self.index}"
        )
        either: set[asyncio.Future[Any]] = {lost, heartbeat}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not lost.done():
                self._on_heartbeat_end(heartbeat.result())
            self._become(NodeState.UNREACHABLE, await lost)
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)

    def _on_alive(self) -> None:
        # Each heartbeat replays a few commands that did not fit before; more would slow down a slow node.
        self._commands.replay(at_most=_REPLAYED_PER_HEARTBEAT)
        self._faults.examined(self.heartbeat.grant_refusal)
        self._on_heartbeat()

    def _on_heartbeat_end(self, end: NotAdmitted) -> None:
        if end.admission_is_void:
            self._commands.revalidate(end.reason)
        else:
            self._log.warning("node_dropped", reason=end.reason)
            self._commands.drop(end.reason)

    async def _ask_for_resp3(self, dialled: DialledNode) -> bool:
        try:
            await dialled.command("HELLO", 3)
        except DialRefusedError as error:
            self._on_subscribed(str(error))
            return False
        return True

    def _on_subscribed(self, refusal: str) -> None:
        self._notice_problem = ""
        if refusal:
            # The node still votes, but waiters then wake only when a ttl ends.
            self._notice_problem = f"it refuses to send notices: {refusal}"
            self._log.warning("node_notices_refused", problem=refusal)

    def _on_raw_notice(self, payload: bytes) -> None:
        try:
            notice = scripts.read_notice(payload, keys=self._settings.joining.admin.keys, node=self.index)
        except ValueError:
            self._log.warning("node_notice_malformed")
            return
        try:
            self._on_notice(notice)
        except Exception as defect:
            # The connection must go on.
            self._log.error("internal_error", where="node_notice", exc_info=defect)

    def _on_lost(self, lost: asyncio.Future[str], reason: str) -> None:
        self._commands.connection = None
        if not lost.done():
            lost.set_result(reason)

    def _become(self, state: NodeState, detail: str) -> None:
        self._state.become(state, detail, run_id=self.joining.run_id)


def _durability(identity: Identity | None, *, assume_durable: bool) -> Durability:
    if identity is None:
        return Durability.UNKNOWN
    if identity.durable:
        return Durability.PROVEN
    return Durability.DECLARED if assume_durable else Durability.NONE
