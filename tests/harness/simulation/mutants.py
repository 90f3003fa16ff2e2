"""The product with one rule removed, rule by rule. The simulation must catch each of them.

Only a rare order of events shows commits without condition or nonce: the searches and walks of
tests/model find them. `DIRECTED` has the rules for which a random world is too weak;
tests/simulation/test_two_processes.py shows each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

from harness.doubles.joining_commands import JoiningAnswer, JoiningCommand, RaiseFloor, RestoreVote
from harness.doubles.node_memory import Hold
from harness.doubles.node_state import FakeNodeState
from harness.model import mutants
from harness.simulation.world import Rules
from redfence_server.lock_service import ForcedRelease, LockService
from redfence_server.locking import attempt, quorum, redlock
from redfence_server.locking.node import Command, Mint, NoReply, Renew, Reply
from redfence_server.membership import fence, node_clock, peers
from redfence_server.membership import heartbeat as node_heartbeat
from redfence_server.membership import joining as node_joining
from redfence_server.membership.admin import AdminConnection
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.membership.examination import ClockReading, Identity, Phase
from redfence_server.membership.joining import NodeJoining
from redfence_server.nodes import connection


async def _force_whatever_holds(
    service: LockService, resource: str, token: int, *, reason: str
) -> ForcedRelease:
    """End the lease that holds the resource by now, whatever its token."""
    view = await service.get_lock(resource)
    if view.current is None:
        return ForcedRelease(was_held=False)
    return await _FORCE_RELEASE(service, resource, view.current.token, reason=f"{reason} {token}")


_FORCE_RELEASE = LockService.force_release
Patch = tuple[object, str, object]


class ExtendThatRecreates(FakeNodeState):
    """A renewal of a lease that has ended makes its hold anew."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]  # passed on
        self._ended: dict[tuple[str, str], Hold] = {}

    def apply(self, command: Command, now_ms: float, *, admission: str = "", channel: str = "here") -> Reply:
        for resource, hold in self.holds.items():
            self._ended[resource, hold.digest] = hold
        if (
            isinstance(command, Renew)
            and self._hold(command.resource, now_ms) is None
            and (ended := self._ended.get((command.resource, command.digest))) is not None
        ):
            self.holds[command.resource] = Hold(
                *(ended.digest, ended.nonce, False, ended.token, ended.holder, ended.ttl_ms),
                now_ms + ended.ttl_ms,
            )
        return super().apply(command, now_ms, admission=admission, channel=channel)


class FenceThatKeepsIds(FakeNodeState):
    """A fence leaves the admission id as it is, so no server examines the peer again."""

    def join(self, command: JoiningCommand, now_ms: float = 0.0) -> JoiningAnswer:
        if isinstance(command, RaiseFloor):
            command = replace(command, admission=self.admission)
        return super().join(command, now_ms)


class MintBelowTheFloor(FakeNodeState):
    """A mint goes on from a counter that the node has kept from before it forgot."""

    def _mint(self, mint: Mint, hold: Hold | None, now_ms: float, channel: str) -> Reply:
        floor, self.floor = self.floor, 0
        reply = super()._mint(mint, hold, now_ms, channel)
        self.floor = floor
        return reply


class FloorThatEndsHolds(FakeNodeState):
    """Holds do not outlive a restart with proof."""

    def join(self, command: JoiningCommand, now_ms: float = 0.0) -> JoiningAnswer:
        answer = super().join(command, now_ms)
        if isinstance(command, RestoreVote):
            self.waited_floor = self.floor
        return answer


class MintIgnoresTheDelay(FakeNodeState):
    """A closed lock is free for the next mint."""

    def _mint(self, mint: Mint, hold: Hold | None, now_ms: float, channel: str) -> Reply:
        if hold is not None and hold.is_closed(now_ms):
            hold = None
        return super()._mint(mint, hold, now_ms, channel)


class ForceDeletes(FakeNodeState):
    """A forced release frees the lock at once."""

    def _force(self, resource: str, hold: Hold, now_ms: float) -> None:
        del now_ms
        self._end(resource, hold)


class _Any:
    """Equals everything, and is found everywhere."""

    __hash__ = None  # type: ignore[assignment]  # it has none

    def __eq__(self, other: object) -> bool:
        return True

    def get(self, index: int, default: object = None) -> _Any:
        del index, default
        return self

    def __getitem__(self, _: slice) -> str:
        return ""


def _fenced_for_anybody(seen: AdminConnection) -> Identity:
    """Take a floor of another process for one's own."""
    found = seen.snapshot.found
    assert found is not None, "only a node that was examined shows an identity"
    assert found.identity is not None, "only a node that was formed has an identity"
    fences: Any = _Any()
    return replace(found.identity, known_fences=fences)


async def _wait_before_the_fence(joining: NodeJoining, visit: AdminConnection, *, proven: bool) -> None:
    """Count the wait from the quarantine, and raise the fence at its end."""
    identity, clock = visit.identity, joining._clock
    if joining._fenced.quarantine != identity.admission:
        joining._fenced = replace(joining._fenced, quarantine=identity.admission, at_ms=clock.now_ms())
    waited_ms = clock.now_ms() - joining._fenced.at_ms
    if not proven and waited_ms < fence.wait_ms(identity.max_ttl_ms):
        raise node_joining.AdmissionRefusedError("quarantined", 50)
    floor = await joining._fence(visit, proven=proven)
    joining._floor = max(joining._floor or 0, floor)
    ids = {"quarantine": identity.admission, "admission": joining._randomness.hex_id()}
    await visit.restore_vote(
        **ids, floor=floor, floors=joining._memory.floors(), fence_ids=joining._memory.fence_ids()
    )


async def _reserve_alone(process: AdminConnection, trusted: Sequence[AdminConnection], **around: Any) -> int:
    """Let a node that restarted with proof jump by itself."""
    if process.identity.phase is not Phase.RESTARTED:
        return await fence.raise_fence(process, trusted, **around)
    assert process.snapshot.found is not None, "it was examined"
    floor = max(process.snapshot.found.max_token or 0, process.identity.floor) + fence.TOKENS_JUMP
    await process.reserve_floor(floor)
    return floor


async def _fence_on_f(process: AdminConnection, trusted: Sequence[AdminConnection], **around: Any) -> int:
    """Ask one peer less."""
    size = max(1, fence.fence_size(process.identity.node_count) - 1)
    with patch.object(fence, "fence_size", lambda _: size):
        return await fence.raise_fence(process, trusted[:size], **around)


_RESTORE_VOTE = AdminConnection.restore_vote


async def _restore_with_proof(seen: AdminConnection, **ids: Any) -> bool:
    """Leave out whatever forgot."""
    return seen.identity.phase is Phase.RESTARTED and await _RESTORE_VOTE(seen, **ids)


async def _fence_what_forgot(
    process: AdminConnection, trusted: Sequence[AdminConnection], **around: Any
) -> int:
    """Leave out whatever restarted with proof."""
    if process.identity.phase is Phase.RESTARTED:
        raise fence.FenceError("it restarted")
    return await fence.raise_fence(process, trusted, **around)


def _ask_the_refusing_again(poll: redlock._Poll[Any], asked_in: int, node: int, reply: Reply) -> None:
    """Keep the answers of the nodes that did answer, and ask only the others again."""
    del asked_in
    if poll._decided:
        return
    if reply is NoReply.NOT_ADMITTED and poll._clock.now_ms() < poll._give_up_at_ms:
        asyncio.get_running_loop().call_later(0.01, poll.ask, node)
        return
    poll._replies[node] = reply
    judged = poll._judge(poll._replies)
    if judged is not None:
        poll._decided = True
        poll._on_verdict(redlock.Verdict(judged, poll._replies))


_NOTE_SAMPLE = node_heartbeat.Heartbeat._note_sample


def _know_no_clock_first(heartbeat: node_heartbeat.Heartbeat, reading: ClockReading) -> None:
    """Take no sample of the node's clock before its votes count."""
    if heartbeat.node_clock is not None:
        _NOTE_SAMPLE(heartbeat, reading)
    else:
        heartbeat.node_clock = node_clock.NodeClock(distrust_ms=1_000)


def _learn_nothing_of_others(memory: ClusterMemory, identity: Identity) -> None:
    """Take over the cluster, and no floors."""
    if memory.cluster_id is None:
        memory.cluster_id, memory.ttl_ms_max = identity.cluster_id, identity.max_ttl_ms


_LEARN = ClusterMemory.learn


def _learn_from_voters(memory: ClusterMemory, identity: Identity) -> None:
    """Take over nothing from a node without a vote, not even from the one that is to be fenced."""
    if identity.phase is Phase.READY:
        _LEARN(memory, identity)


def _count_what_is_reserved(process: Identity, peers: Sequence[Identity]) -> bool:
    """Take the floor that a process has reserved for the one under which it voted."""
    return fence.is_superseded(replace(process, voted_floor=process.floor), peers)


def _fencing(raise_fence: object = fence.raise_fence, wait_ms: object = fence.wait_ms) -> Patch:
    functions = SimpleNamespace(raise_fence=raise_fence, wait_ms=wait_ms, quarantine_id=fence.quarantine_id)
    return node_joining, "fence", functions


MUTANTS: Final = {
    "fencing off": Rules(fenced=False, breaks="F"),
    "validity counted from the answer": Rules(counts_from_answer=True, breaks="L"),
    "extend that re-creates": Rules(node=ExtendThatRecreates, breaks="L"),
    "max without commit": Rules(patches=((attempt, "Tally", mutants.MaxWithoutCommit),), breaks="T1 T2"),
    "undo by lease": Rules(patches=((redlock, "Attempt", mutants.UndoByLease),), breaks="D L"),
    "counter from zero": Rules(node=mutants.CounterFromZero, breaks="T1 T2"),
    "a minority grants": Rules(
        patches=((quorum, "majority", lambda count: max(1, count // 2)),), breaks="T1 T2"
    ),
    "a forced release ends any lease": Rules(
        patches=((LockService, "force_release", _force_whatever_holds),), breaks="D"
    ),
    "mint ignores the lock delay": Rules(node=MintIgnoresTheDelay, breaks="X"),
    "a forced release ignores the lock delay": Rules(node=ForceDeletes, breaks="X"),
    "no wait": Rules(patches=(_fencing(wait_ms=lambda _: 0.0),), breaks="L"),
    "holds end at a restart with proof": Rules(node=FloorThatEndsHolds, breaks="D L"),
    "a wiped node never votes again": Rules(
        patches=((AdminConnection, "restore_vote", _restore_with_proof),), breaks="P"
    ),
    "a restarted node is never fenced": Rules(patches=(_fencing(_fence_what_forgot),), breaks="P"),
}
"""Each is caught by random worlds."""
DIRECTED: Final = {
    "clocks not watched": Rules(patches=((node_clock.NodeClock, "trusted", lambda *_: True),)),
    "wait before fence": Rules(patches=((NodeJoining, "_bring_back", _wait_before_the_fence),)),
    "no fence for a durable restart": Rules(patches=(_fencing(_reserve_alone),)),
    "fence asks f nodes": Rules(patches=(_fencing(_fence_on_f),)),
    "fence keeps admission ids": Rules(node=FenceThatKeepsIds),
    "fence for anybody": Rules(patches=((AdminConnection, "identity", property(_fenced_for_anybody)),)),
    "mint ignores the floor": Rules(node=MintBelowTheFloor),
    "a poll combines answers from before and after": Rules(
        patches=((redlock._Poll, "note", _ask_the_refusing_again),)
    ),
    # A vote must overtake the first sample, so the mint must not wait for the sample's batch.
    "votes count before the clock is known": Rules(
        patches=(
            (node_heartbeat.Heartbeat, "_note_sample", _know_no_clock_first),
            (connection, "_GATHER_S", 0.0),
        )
    ),
    "others not heeded": Rules(patches=((ClusterMemory, "learn", _learn_nothing_of_others),)),
    "nodes without a vote not heeded": Rules(patches=((ClusterMemory, "learn", _learn_from_voters),)),
    "a reserved floor counts as voted": Rules(
        patches=((peers, "fence", SimpleNamespace(is_superseded=_count_what_is_reserved)),)
    ),
    "any node is a peer": Rules(
        patches=((peers, "_is_member", lambda look, _: bool(look.found and look.found.identity)),)
    ),
}
"""Each is caught by a scenario of its own."""
