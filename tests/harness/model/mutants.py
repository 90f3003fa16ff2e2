"""The algorithm with one rule removed, rule by rule. A check must catch each of them."""

from __future__ import annotations

from dataclasses import replace

from harness.doubles.node_memory import Hold
from harness.doubles.node_state import FakeNodeState
from harness.model.adversary import Rules
from redfence_server.locking.attempt import Attempt
from redfence_server.locking.node import Commit, Granted, Mint, Release, Reply, Status, Undo
from redfence_server.locking.tally import Decision, Grant, Tally


class MaxWithoutCommit(Tally):
    """The popular recipe: a quorum of mints is a grant of the greatest."""

    def _decide(self) -> Decision:
        if len(self._standing) - self._standing.count(0) >= self._quorum:
            return Grant(self._greatest)
        return super()._decide()


class TokenOfTheFirstQuorum(Tally):
    """The first quorum of mints fixes the token; a later answer with a greater one counts as well."""

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
        return Status.COMMITTED


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


class _Handover(FakeNodeState):
    """A handover leaves something of the old hold in the new one."""

    def _mint(self, mint: Mint, hold: Hold | None, now_ms: float, channel: str) -> Reply:
        reply = super()._mint(mint, hold, now_ms, channel)
        if hold is None or not (isinstance(reply, Granted) and reply.released):
            return reply
        new = self.holds[mint.resource] = self._keep(hold, self.holds[mint.resource])
        return replace(reply, nonce=new.nonce, token=new.token)

    def _keep(self, old: Hold, new: Hold) -> Hold:
        raise NotImplementedError


class HandoverKeepsNonce(_Handover):
    """A handover passes the hold on under the nonce that it has."""

    def _keep(self, old: Hold, new: Hold) -> Hold:
        return replace(new, nonce=old.nonce)


class HandoverKeepsToken(_Handover):
    """A handover passes the hold on with the token that it has."""

    def _keep(self, old: Hold, new: Hold) -> Hold:
        return replace(new, token=old.token)


class HandoverKeepsShared(_Handover):
    """A handover leaves the mark that a retry of the lease before has set."""

    def _keep(self, old: Hold, new: Hold) -> Hold:
        return replace(new, shared=old.shared)


class HandoverEndsAnyLease(FakeNodeState):
    """A handover ends whatever lease holds the lock."""

    def _mint(self, mint: Mint, hold: Hold | None, now_ms: float, channel: str) -> Reply:
        if mint.release_first is not None and hold is not None and hold.digest != mint.digest:
            mint = replace(mint, release_first=replace(mint.release_first, digest=hold.digest))
        return super()._mint(mint, hold, now_ms, channel)


class CommitAfterHandoverWithoutNonce(_Handover):
    """A commit counts in any hold of the same lease that was made by a handover."""

    _MARK = "handed over"

    def _keep(self, old: Hold, new: Hold) -> Hold:
        return replace(new, holder=self._MARK)

    def _commit(self, commit: Commit, hold: Hold | None, now_ms: float) -> Reply:
        if hold is not None and hold.holder == self._MARK:
            commit = replace(commit, nonce=hold.nonce)
        return super()._commit(commit, hold, now_ms)


class UndoByLease(Attempt):
    """An undo deletes whatever the lease holds."""

    def _undo(self) -> None:
        for node in self._nodes:
            node.send(Release(self._mint.resource, self._mint.digest, 0))


MUTANTS = {
    "max without commit": Rules(tally=MaxWithoutCommit, breaks="T[12]"),
    "token of the first quorum": Rules(tally=TokenOfTheFirstQuorum, breaks="T[12]"),
    "unconditional commit": Rules(node=UnconditionalCommit, breaks="T[12]"),
    "commit without nonce": Rules(node=CommitWithoutNonce, breaks="T[12]"),
    "undo of a shared hold": Rules(node=UndoOfAShared, breaks="K"),
    "counter from zero": Rules(node=CounterFromZero, breaks="T[12]"),
    "undo by lease": Rules(attempt=UndoByLease, breaks="K"),
    "handover keeps the nonce": Rules(node=HandoverKeepsNonce, breaks="K"),
    "handover keeps the token": Rules(node=HandoverKeepsToken, breaks="T[12]"),
    "handover keeps the shared mark": Rules(node=HandoverKeepsShared, breaks="C"),
    "handover ends any lease": Rules(node=HandoverEndsAnyLease, breaks="K"),
    "commit after a handover without nonce": Rules(node=CommitAfterHandoverWithoutNonce, breaks="T[12]"),
}
