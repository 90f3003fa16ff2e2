"""The algorithm with one rule removed, rule by rule. Each of them must be caught, or the check that should is worth nothing."""

from __future__ import annotations

from dataclasses import replace

from harness.adversary import Rules
from harness.fake_node import FakeNodeState, Hold
from redfence_server.lock_node import Commit, Plain, Release, Reply, Undo
from redfence_server.quorum import Decision, Grant, Tally
from redfence_server.redlock import Attempt


class MaxWithoutCommit(Tally):
    """The popular recipe: a quorum of mints is a grant of the greatest."""

    def _decide(self) -> Decision:
        if len(self._standing) - self._standing.count(0) >= self._quorum:
            return Grant(self._greatest)
        return super()._decide()


class TokenOfTheFirstQuorum(Tally):
    """The token is fixed by the first quorum of mints; a node that minted more, and answers later, counts as well."""

    _fixed = 0

    def _decide(self) -> Decision:
        if not self._fixed and len(self._standing) - self._standing.count(0) >= self._quorum:
            self._fixed = self._greatest
        if self._fixed:
            if sum(standing >= self._fixed for standing in self._standing) >= self._quorum:
                return Grant(self._fixed)
            self._greatest = self._fixed
        return super()._decide()


class UnconditionalCommit(FakeNodeState):
    """A commit raises the counter and counts, whether the hold is still there or not."""

    def _commit(self, commit: Commit, hold: Hold | None, now_ms: float) -> Reply:
        if self._counted(commit.resource, now_ms) < commit.token:
            self._count(commit.resource, commit.token, now_ms)
        super()._commit(commit, hold, now_ms)
        return Plain.COMMITTED


class CommitWithoutNonce(FakeNodeState):
    """A commit counts in any hold of the same lease."""

    def _commit(self, commit: Commit, hold: Hold | None, now_ms: float) -> Reply:
        return super()._commit(replace(commit, nonce=hold.nonce) if hold else commit, hold, now_ms)


class UndoOfAShared(FakeNodeState):
    """An undo deletes a hold that a retry shares."""

    def _undo(self, undo: Undo, hold: Hold | None) -> Reply:
        return super()._undo(undo, replace(hold, shared=False) if hold else None)


class CounterFromZero(FakeNodeState):
    """A counter that was dropped as idle starts at zero again, and not at `high`."""

    def _counted(self, resource: str, now_ms: float) -> int:
        return super()._counted(resource, now_ms) if resource in self.counters else 0


class UndoByLease(Attempt):
    """An undo deletes whatever the lease holds."""

    def _undo(self) -> None:
        for node in self._nodes:
            node.send(Release(self._mint.resource, self._mint.digest, 0))


MUTANTS = {
    "max without commit": Rules(tally=MaxWithoutCommit),
    "token of the first quorum": Rules(tally=TokenOfTheFirstQuorum),
    "unconditional commit": Rules(node=UnconditionalCommit),
    "commit without nonce": Rules(node=CommitWithoutNonce),
    "undo of a shared hold": Rules(node=UndoOfAShared),
    "counter from zero": Rules(node=CounterFromZero),
    "undo by lease": Rules(attempt=UndoByLease),
}
