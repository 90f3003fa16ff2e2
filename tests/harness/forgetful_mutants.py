"""How nodes come back, with one rule removed, rule by rule. Each of them must be caught, or the check that should is worth nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness.fake_node import FakeNodeState, Hold
from harness.forgetful_server import Link
from harness.forgetful_world import ForgetfulRules
from harness.joining_commands import Readmit, Step
from redfence_server.cluster_memory import ClusterMemory
from redfence_server.lock_node import Command, Commit, Mint, Reply, Vouch
from redfence_server.rejoin import CHANGES_JUMP, Rejoin, Vouched


class VoteBeforeRejoin(Rejoin):
    """A node that forgot votes again with the numbers that it has, and nobody is asked."""

    def start(self) -> None:
        nothing = (0,) * (len(self._others) + 1)
        self.outcome.set_result(Vouched(self._number, self._changes, nothing))


class RejoinOfF(Rejoin):
    """f other nodes are read, and vouch."""

    def start(self) -> None:
        self._needed -= 1
        super().start()


class _Reckless(Rejoin):
    """What is sent to the nodes that vouch can be chosen."""

    jump = 1
    keeps_ids = False

    def _vouch(self) -> None:
        told = self._recalled.values()
        self.floor = max(self._number, *(each.high for each in told)) + self.jump
        self._changes = max(self._changes, *(each.known_changes[self._place] for each in told)) + CHANGES_JUMP
        for index, recalled in self._recalled.items():
            admission = recalled.under if self.keeps_ids else self._randomness.hex_id()
            vouch = Vouch(admission, self._place, self.floor, self._changes, recalled.under)
            self._others[index].send(vouch, self.on_vouch)


class NoJump(_Reckless):
    """Numbers begin right above those that were read."""


class NoNewIds(_Reckless):
    """Who vouches keeps its admission id, so nobody has to look at it again."""

    jump = 2**20
    keeps_ids = True


class NoJumpAndNoNewIds(_Reckless):
    """Both."""

    keeps_ids = True


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


MUTANTS = {
    "vote before rejoin": ForgetfulRules(rejoin=VoteBeforeRejoin),
    "rejoin that reads f nodes": ForgetfulRules(rejoin=RejoinOfF),
    "no jump": ForgetfulRules(rejoin=NoJump),
    "no new ids": ForgetfulRules(rejoin=NoNewIds),
    "no jump, no new ids": ForgetfulRules(rejoin=NoJumpAndNoNewIds),
    "nothing written back": ForgetfulRules(node=NothingWrittenBack),
    "nothing written back, no new ids": ForgetfulRules(node=NothingWrittenBack, rejoin=NoNewIds),
    "mint without floor": ForgetfulRules(node=MintWithoutFloor),
    "readmit from any quarantine": ForgetfulRules(node=ReadmitFromAnyQuarantine),
    "readmit from any quarantine, floors not heeded": ForgetfulRules(
        node=ReadmitFromAnyQuarantine, cluster_memory=FloorsNotHeeded
    ),
    "readmit without floors": ForgetfulRules(node=ReadmitWithoutFloors),
    "commit under the present id": ForgetfulRules(link=CommitUnderPresentId),
    "commit under the present id, no jump": ForgetfulRules(link=CommitUnderPresentId, rejoin=NoJump),
    "vouch under the present id": ForgetfulRules(link=VouchUnderPresentId),
    "vouch under the present id, no jump": ForgetfulRules(link=VouchUnderPresentId, rejoin=NoJump),
    "floors not heeded": ForgetfulRules(cluster_memory=FloorsNotHeeded),
}
