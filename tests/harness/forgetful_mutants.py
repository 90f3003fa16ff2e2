"""How nodes come back, with one rule removed, rule by rule. Each of them must be caught, or the check that should is worth nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from harness.fake_node import FakeNodeState, Hold
from harness.forgetful_server import Link
from harness.forgetful_world import ForgetfulRules
from harness.joining_commands import Claim as Claiming
from harness.joining_commands import Readmit, Step
from redfence_server.cluster_memory import ClusterMemory
from redfence_server.lock_node import Command, Commit, Mint, Reply, Vouch
from redfence_server.rejoin import Claim, Rejoin, Vouched


class VoteBeforeRejoin(Rejoin):
    """A node that forgot votes again right above the numbers that are known to be its own, and nobody is asked."""

    def start(self) -> None:
        self.recalled.set_result(Claim(self._number + 1, self._changes))

    def vouch(self, claim: Claim) -> None:
        self.outcome.set_result(Vouched(claim, (0,) * (len(self._others) + 1)))


class RejoinOfF(Rejoin):
    """f other nodes are read, and vouch."""

    def start(self) -> None:
        self._needed -= 1
        super().start()


class NoNewIds(Rejoin):
    """Who vouches keeps its admission id, so nobody has to look at it again."""

    def vouch(self, claim: Claim) -> None:
        for index, told in self._told.items():
            vouch = Vouch(told.under, self._place, claim.floor, claim.changes, told.under)
            self._others[index].send(vouch, partial(self.on_vouch, claim))


class NothingWrittenBack(FakeNodeState):
    """Who vouches does not raise its `high`."""

    def _vouch(self, vouch: Vouch) -> Reply:
        high = self.high
        reply = super()._vouch(vouch)
        self.high = high
        return reply


class MintWithoutFloor(FakeNodeState):
    """A counter that the node has kept from before it forgot goes on."""

    def _mint(self, mint: Mint, hold: Hold | None, now_ms: float, channel: str) -> Reply:
        floor, self.floor = self.floor, 0
        reply = super()._mint(mint, hold, now_ms, channel)
        self.floor = floor
        return reply


class ReadmitFromAnyQuarantine(FakeNodeState):
    """The end of one quarantine ends another one."""

    def _readmit(self, readmit: Readmit) -> Step:
        return super()._readmit(replace(readmit, quarantine=self.admission, phase=self.phase))


class ReadmitWithoutFloors(FakeNodeState):
    """What the node must know of other places is not given back."""

    def _readmit(self, readmit: Readmit) -> Step:
        kept = self.known_floors
        step = super()._readmit(readmit)
        self.known_floors = kept
        return step


class CommitUnderPresentId(Link):
    """A commit goes under the id that the node has now, whatever it had when it minted."""

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> None:
        super().send(replace(command, under="") if isinstance(command, Commit) else command, on_reply)


class VouchUnderPresentId(Link):
    """A vouch is asked for under the id that the node has now, whatever it had when it was read."""

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> None:
        super().send(replace(command, under="") if isinstance(command, Vouch) else command, on_reply)


class FloorsNotHeeded(ClusterMemory):
    """What a server learns of the floor of a place does not make it drop the node there, nor turn it away."""

    def _raise_floor(self, index: int, floor: int) -> None:
        """Do nothing."""


class NothingClaimed(FakeNodeState):
    """A driver of a rejoin leaves nothing on the node for whoever drives the next one."""

    def _claim(self, claim: Claiming) -> Step:
        before = self.floor, self.changes
        step = super()._claim(claim)
        self.floor, self.changes = before
        return step


MUTANTS = {
    "vote before rejoin": ForgetfulRules(rejoin=VoteBeforeRejoin),
    "rejoin that reads f nodes": ForgetfulRules(rejoin=RejoinOfF),
    "no jump": ForgetfulRules(numbers_jump=1),
    "no new ids": ForgetfulRules(rejoin=NoNewIds),
    "no jump, no new ids": ForgetfulRules(numbers_jump=1, rejoin=NoNewIds),
    "nothing written back": ForgetfulRules(node=NothingWrittenBack),
    "nothing written back, no new ids": ForgetfulRules(node=NothingWrittenBack, rejoin=NoNewIds),
    "nothing claimed": ForgetfulRules(node=NothingClaimed),
    "mint without floor": ForgetfulRules(node=MintWithoutFloor),
    "readmit from any quarantine": ForgetfulRules(node=ReadmitFromAnyQuarantine),
    "readmit from any quarantine, floors not heeded": ForgetfulRules(
        node=ReadmitFromAnyQuarantine, cluster_memory=FloorsNotHeeded
    ),
    "readmit without floors": ForgetfulRules(node=ReadmitWithoutFloors),
    "commit under the present id": ForgetfulRules(link=CommitUnderPresentId),
    "vouch under the present id": ForgetfulRules(link=VouchUnderPresentId),
    "floors not heeded": ForgetfulRules(cluster_memory=FloorsNotHeeded),
}
