"""Bring one node to where it may vote, on a fresh connection: examine, judge, take out, fence, wait, restore the vote.

Every step leaves the node as it was, or without a vote, or voting. So a server may end between any two steps, and
several servers may drive at once. Each server waits by its own clock: a fence that it did not raise itself counts from
the moment at which it saw the fence complete, so the wait is longer, never shorter.
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
from redfence_server.membership.visit import (
    AdminConnection,
    AdminSettings,
    NodeAssignment,
    NodeSnapshot,
    visits,
)
from redfence_server.randomness import Randomness
from redfence_server.redis_io.dial import DialError, DialledNode, NodeUrl

# A node that is up but must not vote is examined again this often, with jitter.
_RECHECK_MS: Final = 2_000
# A fence that another driver overtook, or that lacks peers, is tried again after a pause that doubles each time.
_FENCE_PAUSE_MS_FIRST: Final = 100.0


@dataclass(eq=False)
class AdmissionRefusedError(Exception):
    """The node answered and must not vote now.

    Attributes:
        detail: why, for humans.
        recheck_ms: when to examine it again.
        reason: what an operator has to mend; None if the node comes back by itself.
    """

    detail: str
    recheck_ms: float = _RECHECK_MS
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class JoiningSettings:
    """What the joinings of all nodes of one server share.

    Attributes:
        urls: of all nodes, by index.
        visiting: how to reach them.
        assume_durable: the operator's word that a restarted node forgets nothing.
        accept_empty_nodes: an empty node at a node index is taken for the one that was there, also if this server has never
            seen that one: only for a server that runs the nodes itself.
        fencing: held while this server raises a fence, so that its own fences do not overtake each other.
    """

    urls: Sequence[NodeUrl]
    visiting: AdminSettings
    assume_durable: bool
    accept_empty_nodes: bool
    fencing: asyncio.Lock


class Known(NamedTuple):
    """What a server knows of a node before it examines it: the least floor, and the greatest token seen with that floor."""

    floor: int
    token: int


@dataclass(frozen=True, slots=True)
class _Fenced:
    """A fence that this server saw complete."""

    quarantine: str
    floor: int
    at_ms: float


class NodeJoining:
    """Brings the node at one index to where it may vote.

    Attributes:
        run_id: of the process that was examined last.
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
        self._place = memory.places[index]
        self._clock = clock
        self._randomness = randomness
        self._log = log
        self._fenced = _Fenced("", 0, 0.0)
        # The run that this server has seen with settings that may lose what it answered.
        self._gap_in = ""
        self._fence_pause_ms = _FENCE_PAUSE_MS_FIRST
        # The last quarantine that this server began, and why.
        self._began = ("", "")
        # The greatest floor that this server gave a process here, or under which it was admitted; None before the first time.
        self._floor: int | None = None
        self.run_id = ""

    async def join(self, node: DialledNode) -> Findings:
        """Return what was found of the node, which votes.

        Cancellation: the node is as it was, or without a vote, or votes.

        Raises:
            AdmissionRefusedError: it must not vote now.
            DialError: the connection broke, or another server or an operator changed the node meanwhile.
        """
        visit = AdminConnection(
            NodeSnapshot(self._index, self._settings.urls[self._index].address, None),
            node,
            self._settings.visiting,
        )
        try:
            floor = self._place.floor
            judgement = await self._examine(visit)
            if isinstance(judgement, Forgot) or (isinstance(judgement, Restarted) and not judgement.noted):
                await self._take_out(visit, judgement, floor=floor)
                judgement = await self._examine(visit)
            if isinstance(judgement, Quarantined | Restarted):
                await self._bring_back(visit, proven=isinstance(judgement, Restarted))
                judgement = await self._examine(visit)
        except NodeRejectedError as error:
            raise DialError(str(error)) from error
        match judgement:
            case Admitted(identity):
                assert visit.look.found is not None, "what was judged was found"
                # In the same turn of the loop as the judgement: the next node is judged by what this one has told.
                self._memory.admit(identity, visit.look.found.run_id)
                # A process may still be admitted under an older floor than the one that this server gave to its successor.
                self._floor = max(self._floor or 0, identity.floor)
                return visit.look.found
            case Rejected(reason, detail):
                if reason is Reason.REPLACED:
                    # Should it be empty next, it is not the one that voted here last.
                    self._floor = None
                raise AdmissionRefusedError(detail, reason=reason)
        raise AdmissionRefusedError("quarantined a second time, while it came back", _FENCE_PAUSE_MS_FIRST)

    def leave(self) -> None:
        """Note that the connection under which the node was admitted has ended."""
        self._place.run_id = ""

    def known(self) -> Known:
        """Return what is known of the node now; `judge` needs it from before an examination."""
        return Known(self._place.floor, self._place.token)

    def judge(self, found: Findings, known: Known) -> Judgement:
        """Decide what an examination found, by what was `known` before it: what is learnt during it may be newer."""
        expected = Expectation(
            index=self._index,
            node_count=len(self._memory.places),
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
        if isinstance(judgement, Admitted) and found.high is not None:
            self._memory.see_token(self._index, floor=judgement.identity.floor, token=found.high)
        return judgement

    async def _examine(self, visit: AdminConnection) -> Judgement:
        known = self.known()
        await visit.look_again()
        found = visit.look.found
        if found is None:
            raise DialError(visit.look.problem)
        self.run_id = found.run_id
        return self.judge(found, known)

    async def _take_out(self, visit: AdminConnection, judgement: Forgot | Restarted, *, floor: int) -> None:
        """Take the vote of a node away; `floor` is the least one known before it was examined.

        With a greater floor, learnt since, a process that was superseded would pass for the one that has superseded it.
        """
        found = visit.look.found
        assert found is not None, "what was judged was found"
        identity, memory = found.identity, self._memory
        seat = (
            NodeAssignment(identity.cluster_id, identity.index, identity.node_count, identity.max_ttl_ms)
            if identity
            else NodeAssignment(
                memory.cluster_id or "", self._index, len(memory.places), memory.ttl_ms_max or 0
            )
        )
        restarted = isinstance(judgement, Restarted)
        quarantine = self._randomness.hex_id()
        if restarted:
            quarantine = fence.quarantine_id(visit.identity, quarantine)
        await visit.take_vote(
            seat,
            phase=Phase.RESTARTED if restarted else Phase.QUARANTINED,
            quarantine=quarantine,
            floor=floor,
        )
        if isinstance(judgement, Forgot):
            self._began = (quarantine, judgement.detail)
            self._log.warning("node_quarantined", detail=judgement.detail, run_id=found.run_id)
        else:
            self._log.info("node_restarted", run_id=found.run_id)

    async def _bring_back(self, visit: AdminConnection, *, proven: bool) -> None:
        """Fence, wait, restore the vote: return when the node votes.

        Raises:
            AdmissionRefusedError: the fence is not complete, or the wait is not over.
        """
        identity = visit.identity
        if (identity.admission, identity.reserved) != (self._fenced.quarantine, self._fenced.floor):
            floor = await self._fence(visit, proven=proven)
            self._fenced = _Fenced(identity.admission, floor, self._clock.now_ms())
            self._floor, self._fence_pause_ms = max(self._floor or 0, floor), _FENCE_PAUSE_MS_FIRST
        left_ms = self._fenced.at_ms + fence.wait_ms(identity.max_ttl_ms) - self._clock.now_ms()
        if left_ms > 0 and not proven:
            raise AdmissionRefusedError(
                f"{self._out(identity)}; it can vote again in {left_ms / 1000:.0f} s at the earliest",
                min(left_ms + 1, _RECHECK_MS),
            )
        restored = await visit.restore_vote(
            quarantine=identity.admission,
            admission=self._randomness.hex_id(),
            floor=self._fenced.floor,
            floors=self._memory.floors(),
            lives=self._memory.lives(),
        )
        if not restored:
            raise AdmissionRefusedError(
                "quarantined: another server is giving it its vote", _FENCE_PAUSE_MS_FIRST
            )
        self._log.warning("node_rejoined", floor=self._fenced.floor, run_id=self.run_id)

    async def _fence(self, visit: AdminConnection, *, proven: bool) -> int:
        settings = self._settings
        async with settings.fencing, visits(settings.urls, settings.visiting, but=self._index) as peers:
            chosen = choose_peers(
                visit,
                peers,
                memory=self._memory,
                assume_durable=self._settings.assume_durable,
                accept_empty=self._settings.accept_empty_nodes,
            )
            if proven and chosen.process_is_superseded:
                superseded = Forgot("another process may have had its index since")
                await self._take_out(visit, superseded, floor=visit.identity.floor)
                raise AdmissionRefusedError(f"quarantined: {superseded.detail}", _FENCE_PAUSE_MS_FIRST)
            try:
                return await fence.raise_fence(
                    visit,
                    chosen.trusted,
                    token_seen=self._place.token,
                    randomness=self._randomness,
                    out=chosen.out,
                )
            except FenceError as error:
                # What peers may know from now on is for the process that was examined here.
                self._floor = max(self._floor or 0, error.floor) or self._floor
                self._fence_pause_ms = min(2 * self._fence_pause_ms, _RECHECK_MS)
                hint = ""
                if isinstance(error, TooFewPeersError):
                    hint = "; if they have forgotten as well, run `redfence cluster recover`"
                raise AdmissionRefusedError(
                    f"{self._out(visit.identity)}; {error}{hint}", self._fence_pause_ms
                ) from None

    def _out(self, identity: Identity) -> str:
        """Return why a node is out, as far as this server knows."""
        if identity.phase is Phase.RESTARTED:
            return "restarted: it forgot nothing"
        quarantine, why = self._began
        return f"quarantined: {why if quarantine == identity.admission else 'it may have forgotten locks and tokens'}"
