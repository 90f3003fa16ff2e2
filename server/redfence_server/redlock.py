"""The algorithm: mint on all nodes, decide on a quorum, commit where needed, undo what failed.

What must never happen: two grants of one resource with one token, or a later grant with the smaller one. This is the
argument that it cannot, whatever clocks, pauses, delays and lost replies do; it needs only that no node forgets.

1. A node gives its lock to one lease at a time, and each mint there takes a number greater than every number the node
   minted or learnt for the resource before.
2. A grant of token M has a quorum of nodes that *stand at M* (quorum.py): each minted at most M for this attempt, and either minted M itself
   or acknowledged a commit of M. M is at least what each of them minted.
3. The node acknowledges a commit only for the very hold that its mint made or found, told by the hold's nonce. So on each of those
   nodes the lease held the lock from its mint until the node stood at M, without a gap.
4. Take two grants of different leases, with M1 and M2. Their quorums share a node. There the two holds, each from mint
   to standing, cannot overlap; say the first ended before the second began. Then the second mint saw a counter of at
   least M1 and minted more. By 2, M2 is at least that. So M2 > M1.
5. Which comes first? If grant 1 was answered before attempt 2 began, its quorum stood at M1 before any mint of attempt 2, so the order
   of 4 is the order of time.

Expiry, clock jumps and late messages can end a hold early, which costs exclusion, but they cannot make two holds of
one node overlap. That is why the tokens are ordered even when exclusion is broken, and why the storage must check them.

An attempt is callbacks on one object, not a task per node: the quorum is reached in the turn of the event loop in which the
deciding reply is read, and slower nodes are not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from redfence_server import quorum
from redfence_server.clock import Clock
from redfence_server.lock_node import (
    Command,
    Commit,
    Inspect,
    LockNode,
    Mint,
    Release,
    Renew,
    Reply,
    Undo,
)
from redfence_server.quorum import (
    Ask,
    Failure,
    Grant,
    Refusal,
    ReleaseVerdict,
    Renewal,
    Tally,
    TokenJudgement,
)
from redfence_server.randomness import Randomness

Judged = TypeVar("Judged")


@dataclass(frozen=True, slots=True)
class Verdict(Generic[Judged]):
    """What was judged, and the replies it was judged by: None where none had come yet."""

    verdict: Judged
    replies: quorum.Replies


@dataclass(frozen=True, slots=True)
class AttemptGranted:
    """The lease is granted.

    Attributes:
        token: greater than every token granted before for the resource.
        minted_at_ms: the instant before the mint was sent, from which the ttl counts.
        nonce: of the attempt, for `take_back`.
    """

    token: int
    minted_at_ms: float
    nonce: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class TooLate:
    """A quorum granted when nothing of the ttl was left; it is being undone."""

    elapsed_ms: float


AttemptOutcome = AttemptGranted | TooLate | Refusal


class Redlock:
    """Runs the algorithm over all configured nodes."""

    def __init__(self, nodes: Sequence[LockNode], *, clock: Clock, randomness: Randomness) -> None:
        self.nodes = nodes
        self.quorum = quorum.majority(len(nodes))
        self._clock = clock
        self._randomness = randomness

    async def attempt(self, *, resource: str, digest: str, ttl_ms: int, holder: str) -> AttemptOutcome:
        """Try once to grant the lease with this digest.

        Whatever else than `AttemptGranted` comes of it, an undo is on its way to every node that may hold something.

        Cancellation: as any failure; the undo does not depend on the cancelled caller.
        """
        mint = Mint(resource, digest, self._randomness.hex_id(), holder, ttl_ms)
        attempt = _Attempt(self.nodes, mint, clock=self._clock)
        attempt.start()
        try:
            return await attempt.outcome
        except asyncio.CancelledError:
            # Also when the grant came in this very turn of the loop: nobody will be told of it.
            attempt.give_up()
            raise

    def take_back(self, *, resource: str, nonce: str, ttl_ms: int) -> None:
        """Undo a grant of which nobody was told. A retry of the same Acquire that shares it keeps it."""
        undo = Undo(resource, nonce, self._clock.now_ms() + ttl_ms)
        for node in self.nodes:
            node.send(undo)

    async def renew(self, *, resource: str, digest: str) -> Renewal:
        """Start the ttl of a lease anew on every node where it holds."""
        return (await self._ask_all(Renew(resource, digest), quorum.judge_renew)).verdict

    async def release(self, *, resource: str, digest: str, ttl_ms_max: int) -> Verdict[ReleaseVerdict]:
        """End a lease on every node, also on those that come back within the greatest ttl a lease can have.

        Cancellation: the release goes on; it was sent to every node already.
        """
        worthless_at_ms = self._clock.now_ms() + ttl_ms_max
        return await self._ask_all(Release(resource, digest, worthless_at_ms), quorum.judge_release)

    async def check_token(self, *, resource: str, token: int) -> Verdict[TokenJudgement]:
        """Tell whether the lease with this token holds a quorum."""
        return await self._ask_all(Inspect(resource), partial(quorum.judge_token, token=token))

    async def inspect(self, resource: str) -> quorum.Replies:
        """Return what each node says of the resource, in order of the nodes; waits for the slowest, within its timeout."""
        return (await self._ask_all(Inspect(resource), quorum.judge_all_answered)).replies

    async def _ask_all(
        self, command: Command, judge: Callable[[quorum.Replies], Judged | None]
    ) -> Verdict[Judged]:
        """Send to every node at once and return the first verdict that the replies allow."""
        replies: list[Reply | None] = [None] * len(self.nodes)
        verdict: asyncio.Future[Verdict[Judged]] = asyncio.get_running_loop().create_future()

        def note(node: int, reply: Reply) -> None:
            if verdict.done():
                return
            replies[node] = reply
            if (judged := judge(replies)) is not None:
                verdict.set_result(Verdict(judged, replies))

        for node in self.nodes:
            node.send(command, partial(note, node.index))
        return await verdict


class _Attempt:
    """One try to grant one lease. Its nonce is new, and it mints at most once on each node."""

    def __init__(self, nodes: Sequence[LockNode], mint: Mint, *, clock: Clock) -> None:
        self._nodes = nodes
        self._mint = mint
        self._clock = clock
        self._tally = Tally(len(nodes), nonce=mint.nonce)
        self._minted_at_ms = 0.0
        self.outcome: asyncio.Future[AttemptOutcome] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Send the mint to every node at once."""
        self._minted_at_ms = self._clock.now_ms()
        for node in self._nodes:
            node.send(self._mint, partial(self._on_mint, node.index))

    def give_up(self) -> None:
        """Undo whatever was or will be minted. Later replies change nothing."""
        self._undo()
        if not self.outcome.done():
            self.outcome.cancel()

    def _on_mint(self, node: int, reply: Reply) -> None:
        if not self.outcome.done():
            self._act(self._tally.minted(node, reply))
        elif self._is_granted():
            self._commit(self._tally.late(node, reply))

    def _on_commit(self, node: int, token: int, reply: Reply) -> None:
        if not self.outcome.done():
            self._act(self._tally.committed(node, token, reply))

    def _act(self, decision: quorum.Decision) -> None:
        match decision:
            case Ask():
                self._commit(decision)
            case Grant(token):
                # Counted from before the send, and checked after everything else (field note 5: others count from the reply).
                elapsed_ms = self._clock.now_ms() - self._minted_at_ms
                if quorum.validity_left_ms(self._mint.ttl_ms, elapsed_ms) > 0:
                    self.outcome.set_result(AttemptGranted(token, self._minted_at_ms, self._mint.nonce))
                else:
                    self._undo()
                    self.outcome.set_result(TooLate(elapsed_ms))
            case Refusal():
                self._undo()
                self.outcome.set_result(decision)

    def _commit(self, ask: Ask) -> None:
        for node, nonce in ask.targets:
            commit = Commit(self._mint.resource, self._mint.digest, nonce, ask.token)
            self._nodes[node].send(commit, partial(self._on_commit, node, ask.token))

    def _undo(self) -> None:
        """Undo on every node, also the silent ones: a mint that timed out may still be applied, but before this.

        Not on those that answered `Held`: an attempt mints at most once on a node, and that answer was it.
        """
        worthless_at_ms = self._clock.now_ms() + self._mint.ttl_ms
        undo = Undo(self._mint.resource, self._mint.nonce, worthless_at_ms)
        for node in self._nodes:
            if self._tally.may_hold(node.index):
                node.send(undo)

    def _is_granted(self) -> bool:
        return not self.outcome.cancelled() and isinstance(self.outcome.result(), AttemptGranted)


__all__ = ["AttemptGranted", "AttemptOutcome", "Failure", "Redlock", "TooLate"]
