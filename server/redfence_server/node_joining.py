"""Bring one node to where it may vote, on a fresh connection: examine, judge, quarantine, rejoin.

Every step leaves the node either as it was, or in quarantine, or voting; so a server may end between any two of them, and several may be at
it at once. The waiting is each server's own: a quarantine that this server has not watched from its beginning lasts longer, never less.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from redfence_server import quorum, rejoin, scripts
from redfence_server.clock import Clock
from redfence_server.cluster_memory import ClusterMemory
from redfence_server.lock_node import LockNode
from redfence_server.node_admission import (
    Admitted,
    Expectation,
    Forgot,
    Judgement,
    Quarantined,
    Reason,
    Rejected,
    judge,
)
from redfence_server.node_examination import Findings, Identity, Phase, examine
from redfence_server.randomness import Randomness
from redfence_server.redis_dial import DialError, DialledNode
from redfence_server.rejoin import Claim, Rejoin, Vouched

# A node that is up but must not vote is looked at again this often, with jitter.
_RECHECK_MS: Final = 2_000
# How long a node that restarted waits for the first look at every other one.
_ASK_AROUND_TIMEOUT_MS: Final = 2_000
# A rejoin that another one overtook is tried again soon.
_OVERTAKEN_RECHECK_MS: Final = 100


@dataclass(eq=False)
class TurnedAwayError(Exception):
    """The node answered and must not vote now.

    Attributes:
        detail: why, for humans.
        recheck_ms: when to look again.
        reason: what an operator has to mend; None if the node comes back by itself.
    """

    detail: str
    recheck_ms: float = _RECHECK_MS
    reason: Reason | None = None


class _ChangedError(DialError):
    """Somebody else has changed the node's identity: it has to be looked at again."""


@dataclass(frozen=True, slots=True)
class JoiningSettings:
    """What the joining of every node has in common.

    Attributes:
        assume_durable: the operator's word that a restarted node forgets nothing.
        adopts_empty: an empty node at a place of the cluster is taken for the one that was there, also if this server
            has never seen it: only for a server that runs the nodes itself.
    """

    keys: scripts.Keyspace
    assume_durable: bool
    adopts_empty: bool = False


def quarantine_ms(ttl_ms_max: int) -> float:
    """Return how long a node that forgot stays out: every lease that it may have forgotten has ended by then."""
    return ttl_ms_max + ttl_ms_max * quorum.DRIFT_RATIO + quorum.DRIFT_FIXED_MS


class NodeJoining:
    """Brings the node at one place to where it may vote.

    Attributes:
        run_id: of the process that was looked at last.
        others: every other node of the cluster; to be set before the first `join`, as `fellows`.
        fellows: who brings those.
        looked: set once the first look has come to an end, good or bad.
        seen: the identity that was found last.
    """

    def __init__(
        self,
        place: int,
        *,
        settings: JoiningSettings,
        memory: ClusterMemory,
        clock: Clock,
        randomness: Randomness,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._place = place
        self._settings = settings
        self._memory = memory
        self._clock = clock
        self._randomness = randomness
        self._log = log
        # Its id, and in which run of the process: one that comes again out of an older copy of the data has to last anew.
        self._quarantine = ("", "")
        self._quarantine_seen_ms = 0.0
        # The floor under which this server was last admitted here; None before the first time.
        self._floor: int | None = None
        self.run_id = ""
        self.others: Sequence[LockNode] = ()
        self.fellows: Sequence[NodeJoining] = ()
        self.looked = asyncio.Event()
        self.seen: Identity | None = None

    async def join(self, node: DialledNode) -> Identity:
        """Return the identity under which the node votes.

        Cancellation: the node is as it was, in quarantine, or votes.

        Raises:
            TurnedAwayError: it must not vote now.
            DialError: the connection broke, or somebody else changed the node meanwhile.
        """
        judgement, found = await self._look(node)
        if isinstance(judgement, Forgot) or (isinstance(judgement, Admitted) and judgement.restarted):
            await self._ask_around()
            judgement, found = await self._look(node)
        if isinstance(judgement, Quarantined):
            await self._bring_back(node, judgement.identity, found)
            judgement, found = await self._look(node)
        match judgement:
            case Admitted():
                # In the same turn of the loop as the judgement: the next node is judged by what this one has told.
                self._memory.admit(judgement.identity, found.run_id)
                await self._note_run(node, judgement, found)
                self._floor = judgement.identity.floor
                self._quarantine = ("", "")
                return judgement.identity
            case Forgot(detail):
                await self._put_in_quarantine(node, found, detail)
                raise TurnedAwayError(
                    f"quarantined: {detail}", min(self._quarantine_left_ms(found) + 1, _RECHECK_MS)
                )
            case Rejected(reason, detail):
                if reason is Reason.REPLACED:
                    # Should it be empty next, it is not the one that voted here last.
                    self._floor = None
                raise TurnedAwayError(detail, reason=reason)
            case Quarantined():
                raise TurnedAwayError("quarantined a second time, while it came back")

    def leave(self) -> None:
        """Note that the connection under which the node was admitted has ended."""
        self._memory.places[self._place].run_id = ""

    async def _look(self, node: DialledNode) -> tuple[Judgement, Findings]:
        # Of what grows with the node, what was known before the look: what is learnt during it may be newer than what is seen.
        place = self._memory.places[self._place]
        floor, changes = place.floor, place.changes
        found = await examine(node, self._settings.keys)
        self.run_id, self.seen = found.run_id, found.identity
        self.looked.set()
        expected = Expectation(
            index=self._place,
            node_count=len(self._memory.places),
            cluster_id=self._memory.cluster_id,
            assume_durable=self._settings.assume_durable,
            floor=floor,
            changes=changes,
            familiar=self._settings.adopts_empty or (self._floor is not None and self._floor >= floor),
            runs=self._memory.runs_of_others(self._place),
        )
        return judge(expected, found), found

    async def _ask_around(self) -> None:
        """Take over what the other nodes have noted of this one: a server that has just started remembers nothing itself.

        Not only from those that vote: when all were restarted at once, each has to be judged before the first of them does.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ASK_AROUND_TIMEOUT_MS / 1000):
                for fellow in self.fellows:
                    await fellow.looked.wait()
        for seen in (fellow.seen for fellow in self.fellows):
            if seen is not None and self.seen is not None and seen.cluster_id == self.seen.cluster_id:
                floor, changes = seen.known_floors.get(self._place, 0), seen.known_changes.get(self._place, 0)
                self._memory.told(self._place, floor=floor, changes=changes)

    async def _note_run(self, node: DialledNode, judgement: Admitted, found: Findings) -> None:
        if not judgement.restarted:
            return
        identity = judgement.identity
        before, noted = (
            (identity.admission, identity.run_id),
            (found.run_id, "1" if judgement.durable else "0"),
        )
        await self._step(node, "note_run", (self._settings.keys.node,), *before, *noted)
        self._log.info(
            "node_run_noted", run_id_before=before[1], run_id=found.run_id, durable=judgement.durable
        )

    # --- quarantine -----------------------------------------------------------------------------------------------

    async def _put_in_quarantine(self, node: DialledNode, found: Findings, detail: str) -> None:
        identity = found.identity
        before = (identity.admission, identity.run_id) if identity else ("", "")
        place = (
            (identity.cluster_id, identity.index, identity.node_count, identity.max_ttl_ms)
            if identity
            else (self._memory.cluster_id, self._place, len(self._memory.places), self._memory.ttl_ms_max)
        )
        quarantine = self._randomness.hex_id()
        keys = (self._settings.keys.node, self._settings.keys.high)
        state = Phase.QUARANTINED.value
        floor = str(self._memory.places[self._place].floor)
        await self._step(
            node, "quarantine", keys, *before, quarantine, state, *map(str, place), found.run_id, floor
        )
        self._see_quarantine(quarantine, found)
        self._log.warning("node_quarantined", detail=detail, run_id=found.run_id)

    def _see_quarantine(self, quarantine: str, found: Findings) -> None:
        if (quarantine, found.run_id) != self._quarantine:
            self._quarantine, self._quarantine_seen_ms = (quarantine, found.run_id), self._clock.now_ms()

    def _quarantine_left_ms(self, found: Findings) -> float:
        ttl_ms_max = found.identity.max_ttl_ms if found.identity else self._memory.ttl_ms_max or 0
        return max(0.0, self._quarantine_seen_ms + quarantine_ms(ttl_ms_max) - self._clock.now_ms())

    async def _bring_back(self, node: DialledNode, identity: Identity, found: Findings) -> None:
        """Rejoin a node whose quarantine has lasted long enough."""
        self._see_quarantine(identity.admission, found)
        left_ms = self._quarantine_left_ms(found)
        if left_ms > 0:
            raise TurnedAwayError(
                f"quarantined: it may have forgotten locks and tokens; it can vote again in {left_ms / 1000:.0f} s at the earliest",
                min(left_ms + 1, _RECHECK_MS),
            )
        place = self._memory.places[self._place]
        attempt = Rejoin(
            self._place,
            self.others,
            number=max(place.number, place.floor, identity.floor, found.high or 0),
            changes=max(place.changes, identity.changes),
            randomness=self._randomness,
        )
        attempt.start()
        claim = await attempt.recalled
        if claim is rejoin.Failure.EXHAUSTED:
            raise TurnedAwayError("quarantined: the numbers below 2^53 are used up")
        if not isinstance(claim, Claim):
            raise TurnedAwayError(
                "quarantined: it can vote again once a quorum of the other nodes does; if those have forgotten as well, "
                "run `redfence cluster recover`"
            )
        numbers = (str(claim.floor), str(claim.changes))
        try:
            await self._step(node, "claim", (self._settings.keys.node,), identity.admission, *numbers)
        except _ChangedError:
            raise _overtaken() from None
        # Whatever comes of it, the floor that the others may know from now on is for the node that is looked at here.
        self._floor = max(self._floor or 0, claim.floor)
        attempt.vouch(claim)
        vouched = await attempt.outcome
        if not isinstance(vouched, Vouched):
            raise _overtaken()
        await self._readmit(node, identity, found, vouched)

    async def _readmit(
        self, node: DialledNode, identity: Identity, found: Findings, vouched: Vouched
    ) -> None:
        keys = (self._settings.keys.node, self._settings.keys.high)
        quarantine = (identity.admission, Phase.QUARANTINED.value)
        life = (self._randomness.hex_id(), str(vouched.claim.floor), str(vouched.claim.changes), found.run_id)
        durable = "0" if found.durability_gap else "1"
        floors = map(str, vouched.known_floors)
        await self._step(node, "readmit", keys, *quarantine, *life, durable, str(found.evicted), *floors)
        self._log.warning("node_rejoined", floor=vouched.claim.floor, run_id=found.run_id)

    async def _step(self, node: DialledNode, script: str, keys: tuple[str, ...], *arguments: str) -> None:
        """Carry out a script that changes the node's identity.

        Raises:
            _ChangedError: it is not what was judged any more.
            DialError: the connection broke, or the node is not only ours.
        """
        answer = await node.command("EVAL", scripts.load(script), len(keys), *keys, *arguments)
        if answer == [b"not_empty"]:
            raise DialError("it has no identity, and somebody has begun to write to it")
        if answer == [b"changed"]:
            raise _ChangedError("its identity was changed by somebody else meanwhile")


def _overtaken() -> TurnedAwayError:
    return TurnedAwayError("quarantined: its return was overtaken and is tried again", _OVERTAKEN_RECHECK_MS)
