"""Give one node its vote on a fresh connection: examine, judge, take the vote, fence, wait, restore the vote.

After every step the node is as it was, or without a vote, or voting. So a server may die between any two
steps, and several servers may drive at once. Each server waits by its own clock, from the moment at which it
saw the fence complete. For another server's fence the wait is therefore longer, never shorter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from redfence_server.clock import Clock
from redfence_server.errors import NodeRejectedError
from redfence_server.membership import fence
from redfence_server.membership.admin import (
    AdminConnection,
    AdminSettings,
    NodeAssignment,
    NodeSnapshot,
    connect_all,
)
from redfence_server.membership.admission import (
    Admitted,
    Expectation,
    Forgot,
    Judgement,
    Quarantined,
    Reason,
    Rejected,
    Restarted,
    judge,
)
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.examination import Findings, Identity, Phase
from redfence_server.membership.fence import FenceError, TooFewPeersError
from redfence_server.membership.peers import choose_peers
from redfence_server.randomness import Randomness
from redfence_server.redis_io.dial import DialError, DialledNode, NodeUrl

# The server examines a node that is up but must not vote again at this interval, with jitter.
_RECHECK_MS: Final = 2_000
# After another driver overtook a fence, or peers lacked, the server pauses; the pause doubles each time.
_FENCE_PAUSE_MS_FIRST: Final = 100.0


@dataclass(eq=False)
class AdmissionRefusedError(Exception):
    """The node answered and must not vote now.

    Attributes:
        detail: why, for humans.
        recheck_ms: when to examine it again.
        reason: what an operator must repair; None if the node comes back by itself.
    """

    detail: str
    recheck_ms: float = _RECHECK_MS
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class JoiningSettings:
    """The joinings of all nodes of one server share these.

    Attributes:
        urls: of all nodes, by index.
        admin: how to reach them.
        assume_durable: the operator asserts that a restarted node forgets nothing.
        accept_empty_nodes: take an empty node for the earlier one at its index, even if this server never saw
            that one; only for a server that runs the nodes itself.
        fencing: held while this server raises a fence, so that its own fences do not overtake each other.
    """

    urls: Sequence[NodeUrl]
    admin: AdminSettings
    assume_durable: bool
    accept_empty_nodes: bool
    fencing: asyncio.Lock


class Known(NamedTuple):
    """A node's least floor and the greatest token seen with it, as known before an examination."""

    floor: int
    token: int


@dataclass(frozen=True, slots=True)
class _Fenced:
    """A fence that this server saw complete."""

    quarantine: str
    floor: int
    at_ms: float


class NodeJoining:
    """Gives the node at one index its vote as soon as that is safe.

    Attributes:
        run_id: the run id of the process that `join` examined last; empty before the first.
    """

    def __init__(
        self,
        index: int,
        *,
        settings: JoiningSettings,
        memory: ClusterMemory,
        clock: Clock,
        randomness: Randomness,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._index = index
        self._settings = settings
        self._memory = memory
        self._known = memory.nodes[index]
        self._clock = clock
        self._randomness = randomness
        self._log = log
        self._fenced = _Fenced("", 0, 0.0)
        # The run that this server has seen with settings that may lose answered commands.
        self._gap_in = ""
        self._fence_pause_ms = _FENCE_PAUSE_MS_FIRST
        # The last quarantine that this server began, and why.
        self._began = ("", "")
        # The greatest floor that this server gave to, or saw on, an admitted process here.
        self._floor: int | None = None
        self.run_id = ""

    async def join(self, node: DialledNode) -> Findings:
        """Return the findings of the node once it votes.

        Cancellation: the node is as it was, or without a vote, or votes.

        Raises:
            AdmissionRefusedError: it must not vote now.
            DialError: the connection broke, or another server or an operator changed the node meanwhile.
        """
        connection = AdminConnection(
            NodeSnapshot(self._index, self._settings.urls[self._index].address, None),
            node,
            self._settings.admin,
        )
        try:
            floor = self._known.floor
            judgement = await self._examine(connection)
            if isinstance(judgement, Forgot) or (isinstance(judgement, Restarted) and not judgement.noted):
                await self._take_out(connection, judgement, floor=floor)
                judgement = await self._examine(connection)
            if isinstance(judgement, Quarantined | Restarted):
                await self._bring_back(connection, proven=isinstance(judgement, Restarted))
                judgement = await self._examine(connection)
        except NodeRejectedError as error:
            raise DialError(str(error)) from error
        match judgement:
            case Admitted(identity):
                assert connection.snapshot.found is not None, "what was judged was found"
                # In the same turn of the loop as the judgement: the next judgement needs this node's floors.
                self._memory.admit(identity, connection.snapshot.found.run_id)
                # The process may have an older floor than the one that this server gave to its successor.
                self._floor = max(self._floor or 0, identity.floor)
                return connection.snapshot.found
            case Rejected(reason, detail):
                if reason is Reason.REPLACED:
                    # If it is empty next time, it is not the node that voted here last.
                    self._floor = None
                raise AdmissionRefusedError(detail, reason=reason)
        raise AdmissionRefusedError("quarantined again while it came back", _FENCE_PAUSE_MS_FIRST)

    def leave(self) -> None:
        """Forget the admitted run: the connection under which the node was admitted has ended."""
        self._known.run_id = ""

    def known(self) -> Known:
        """Return this server's knowledge of the node; `judge` needs it from before an examination."""
        return Known(self._known.floor, self._known.token)

    def judge(self, found: Findings, known: Known) -> Judgement:
        """Judge findings by what was `known` before them: later knowledge may be newer than the findings."""
        expected = Expectation(
            index=self._index,
            node_count=len(self._memory.nodes),
            cluster_id=self._memory.cluster_id,
            assume_durable=self._settings.assume_durable,
            floor=known.floor,
            token=known.token,
            previously_admitted=self._settings.accept_empty_nodes
            or (self._floor is not None and self._floor >= known.floor),
            gap_seen=self._gap_in == found.run_id,
            runs=self._memory.runs_of_others(self._index),
        )
        judgement = judge(expected, found)
        if found.durability_gap:
            self._gap_in = found.run_id
        elif isinstance(judgement, Admitted):
            self._gap_in = ""
        if isinstance(judgement, Admitted) and found.max_token is not None:
            self._memory.see_token(self._index, floor=judgement.identity.floor, token=found.max_token)
        return judgement

    async def _examine(self, connection: AdminConnection) -> Judgement:
        known = self.known()
        await connection.refresh()
        found = connection.snapshot.found
        if found is None:
            raise DialError(connection.snapshot.problem)
        self.run_id = found.run_id
        return self.judge(found, known)

    async def _take_out(
        self, connection: AdminConnection, judgement: Forgot | Restarted, *, floor: int
    ) -> None:
        """Take the vote of a node away; `floor` is the least one known before its examination.

        With a greater floor, learnt since, a superseded process would pass for its successor.
        """
        found = connection.snapshot.found
        assert found is not None, "what was judged was found"
        identity, memory = found.identity, self._memory
        assignment = (
            NodeAssignment(identity.cluster_id, identity.index, identity.node_count, identity.max_ttl_ms)
            if identity
            else NodeAssignment(
                memory.cluster_id or "", self._index, len(memory.nodes), memory.ttl_ms_max or 0
            )
        )
        restarted, quarantine = isinstance(judgement, Restarted), self._randomness.hex_id()
        if restarted:
            quarantine = fence.quarantine_id(connection.identity, quarantine)
        await connection.take_vote(
            assignment,
            phase=Phase.RESTARTED if restarted else Phase.QUARANTINED,
            quarantine=quarantine,
            floor=floor,
        )
        if isinstance(judgement, Forgot):
            self._began = (quarantine, judgement.detail)
            self._log.warning("node_quarantined", detail=judgement.detail, run_id=found.run_id)
        else:
            self._log.info("node_restarted", run_id=found.run_id)

    async def _bring_back(self, connection: AdminConnection, *, proven: bool) -> None:
        """Fence, wait, and restore the vote; return when the node votes.

        Raises:
            AdmissionRefusedError: the fence is not complete, or the wait is not over.
        """
        identity = connection.identity
        if (identity.admission, identity.reserved) != (self._fenced.quarantine, self._fenced.floor):
            floor = await self._fence(connection, proven=proven)
            self._fenced = _Fenced(identity.admission, floor, self._clock.now_ms())
            self._floor, self._fence_pause_ms = max(self._floor or 0, floor), _FENCE_PAUSE_MS_FIRST
        left_ms = self._fenced.at_ms + fence.wait_ms(identity.max_ttl_ms) - self._clock.now_ms()
        if left_ms > 0 and not proven:
            raise AdmissionRefusedError(
                f"{self._out(identity)}; it can vote again in {left_ms / 1000:.0f} s at the earliest",
                min(left_ms + 1, _RECHECK_MS),
            )
        restored = await connection.restore_vote(
            quarantine=identity.admission,
            admission=self._randomness.hex_id(),
            floor=self._fenced.floor,
            floors=self._memory.floors(),
            fence_ids=self._memory.fence_ids(),
        )
        if not restored:
            raise AdmissionRefusedError(
                "quarantined: another server is giving it its vote", _FENCE_PAUSE_MS_FIRST
            )
        self._log.warning("node_rejoined", floor=self._fenced.floor, run_id=self.run_id)

    async def _fence(self, connection: AdminConnection, *, proven: bool) -> int:
        settings = self._settings
        async with settings.fencing, connect_all(settings.urls, settings.admin, but=self._index) as peers:
            chosen = choose_peers(
                connection,
                peers,
                memory=self._memory,
                assume_durable=self._settings.assume_durable,
                accept_empty=self._settings.accept_empty_nodes,
            )
            if proven and chosen.process_is_superseded:
                superseded = Forgot("another process may have had its index since")
                await self._take_out(connection, superseded, floor=connection.identity.floor)
                raise AdmissionRefusedError(f"quarantined: {superseded.detail}", _FENCE_PAUSE_MS_FIRST)
            try:
                return await fence.raise_fence(
                    connection,
                    chosen.trusted,
                    token_seen=self._known.token,
                    randomness=self._randomness,
                    out=chosen.out,
                )
            except FenceError as error:
                # Peers may know this floor from now on; it is for the process that was examined here.
                self._floor = max(self._floor or 0, error.floor) or self._floor
                self._fence_pause_ms = min(2 * self._fence_pause_ms, _RECHECK_MS)
                hint = ""
                if isinstance(error, TooFewPeersError):
                    hint = "; if they have forgotten as well, run `redfence cluster recover`"
                raise AdmissionRefusedError(
                    f"{self._out(connection.identity)}; {error}{hint}", self._fence_pause_ms
                ) from None

    def _out(self, identity: Identity) -> str:
        """Return the reason why a node has no vote, as far as this server knows."""
        if identity.phase is Phase.RESTARTED:
            return "restarted: it forgot nothing"
        quarantine, reason = self._began
        known = quarantine == identity.admission
        return f"quarantined: {reason if known else 'it may have forgotten locks and tokens'}"
