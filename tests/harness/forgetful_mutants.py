"""How nodes come back, with one rule removed, rule by rule. Each of them must be caught, or the check that should is worth nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from harness.fake_node import FakeNodeState, Hold
from harness.forgetful_world import ForgetfulRules
from redfence_server.cluster_memory import ClusterMemory
from redfence_server.lock_node import Mint, Pulsed, Reply, Vouch
from redfence_server.node_examination import Identity
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


class MintWithoutFloor(FakeNodeState):
    """A counter that the node has kept from before it forgot goes on."""

    def _mint(self, mint: Mint, hold: Hold | None, now_ms: float, channel: str) -> Reply:
        floor, self.floor = self.floor, 0
        reply = super()._mint(mint, hold, now_ms, channel)
        self.floor = floor
        return reply


class OthersNotHeeded(ClusterMemory):
    """What a node tells of other places, their floors and changes, is not taken over."""

    def learn(self, identity: Identity) -> None:
        super().learn(replace(identity, known_floors={}, known_changes={}))

    def pulsed(self, index: int, pulsed: Pulsed, *, floor: int) -> None:
        self.heard(index, floor=floor, changes=pulsed.changes, number=pulsed.high)


MUTANTS = {
    "vote before rejoin": ForgetfulRules(rejoin=VoteBeforeRejoin),
    "rejoin that reads f nodes": ForgetfulRules(rejoin=RejoinOfF),
    "rejoin without new ids": ForgetfulRules(rejoin=NoNewIds),
    "rejoin without jump and new ids": ForgetfulRules(numbers_jump=1, rejoin=NoNewIds),
    "mint without floor": ForgetfulRules(node=MintWithoutFloor),
    "others not heeded": ForgetfulRules(cluster_memory=OthersNotHeeded),
}
