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

A hand-over is a mint that ends another lease in the same step. To a node it is a release followed by a mint with nothing
in between, and the mint is like any other: a nonce of its own and the next number. So the argument holds as it stands.

Expiry, clock jumps and late messages can end a hold early, which costs exclusion, but they cannot make two holds of
one node overlap. That is why the tokens are ordered even when exclusion is broken, and why the storage must check them.

An attempt is callbacks on one object, not a task per node: the quorum is reached in the turn of the event loop in which the
deciding reply is read, and slower nodes are not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from redfence_server import quorum
from redfence_server.clock import Clock
from redfence_server.lock_node import (
    Command,
    Commit,
    Granted,
    Held,
    Inspect,
    LockNode,
    Mint,
    Release,
    Renew,
    Reply,
    Silence,
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
        contended: another server wants to be told of the end of this lease.
    """

    token: int
    minted_at_ms: float
    nonce: str = field(default="", compare=False)
    contended: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class TooLate:
    """A quorum granted when nothing of the ttl was left; it is being undone."""

    elapsed_ms: float


AttemptOutcome = AttemptGranted | TooLate | Refusal


@dataclass(frozen=True, slots=True)
class Order:
    """What an attempt is to grant.

    Attributes:
        digest: of the lease id.
        notify: have this server told when the holds in the way have ended.
        behind: have it told when the granted lease has ended, for others wait here as well.
    """

    resource: str
    digest: str
    ttl_ms: int
    holder: str
    notify: bool = False
    behind: bool = False


class Redlock:
    """Runs the algorithm over all configured nodes."""

    def __init__(self, nodes: Sequence[LockNode], *, clock: Clock, randomness: Randomness) -> None:
        self.nodes = nodes
        self.quorum = quorum.majority(len(nodes))
        self._clock = clock
        self._randomness = randomness

    async def attempt(self, order: Order) -> AttemptOutcome:
        """Try once to grant a lease; see `finish`."""
        return await self.finish(self._begin(order))

    def hand_over(
        self, order: Order, *, ends: str, ttl_ms_max: int
    ) -> tuple[Attempt, Awaitable[Verdict[ReleaseVerdict]]]:
        """End the lease with the digest `ends` as `release` does and, in the same step, begin an attempt.

        The caller sees to it that the attempt is finished or given up; the release does not depend on it.
        """
        assert ends != order.digest, "a lease is not handed over to itself"
        release = Release(order.resource, ends, self._clock.now_ms() + ttl_ms_max)
        poll = _Poll(self.nodes, release, quorum.judge_release)

        def note(node: int, reply: Reply) -> None:
            if reply in (Silence.REFUSED, Silence.NOT_ADMITTED):
                # A node that cannot mint, out of memory or out of numbers, can still delete; and one that has to be looked at anew
                # can do so after the look.
                poll.ask(node)
            else:
                poll.note(node, quorum.release_part(reply))

        return self._begin(order, ends=release, on_reply=note), poll.verdict

    async def finish(self, attempt: Attempt) -> AttemptOutcome:
        """Return what came of an attempt.

        Whatever else than `AttemptGranted` comes of it, an undo is on its way to every node that may hold something.

        Cancellation: as any failure; the undo does not depend on the cancelled caller.
        """
        try:
            return await attempt.outcome
        except asyncio.CancelledError:
            # Also when the grant came in this very turn of the loop: nobody will be told of it.
            attempt.give_up()
            raise

    def _begin(
        self,
        order: Order,
        *,
        ends: Release | None = None,
        on_reply: Callable[[int, Reply], None] | None = None,
    ) -> Attempt:
        nonce = self._randomness.hex_id()
        mint = Mint(
            *(order.resource, order.digest, nonce, order.holder, order.ttl_ms),
            ends=ends,
            notify=order.notify,
            behind=order.behind,
        )
        attempt = Attempt(self.nodes, mint, clock=self._clock, on_reply=on_reply)
        attempt.start()
        return attempt

    def take_back(self, *, resource: str, nonce: str, ttl_ms: int) -> None:
        """Undo a grant of which nobody was told. A retry of the same Acquire that shares it keeps it."""
        undo = Undo(resource, nonce, self._clock.now_ms() + ttl_ms)
        for node in self.nodes:
            node.send(undo)

    async def renew(self, *, resource: str, digest: str) -> Renewal:
        """Start the ttl of a lease anew on every node where it holds."""
        return (await self._ask_all(Renew(resource, digest), quorum.judge_renew)).verdict

    def release(
        self, *, resource: str, digest: str, ttl_ms_max: int, yields: bool = False
    ) -> Awaitable[Verdict[ReleaseVerdict]]:
        """End a lease on every node, also on those that come back within the greatest ttl a lease can have.

        It was sent to every node when this returns, and goes on whatever becomes of the caller. With `yields`, the servers that
        wait for the lock are told, but not this one.
        """
        worthless_at_ms = self._clock.now_ms() + ttl_ms_max
        release = Release(resource, digest, worthless_at_ms, yields)
        return self._ask_all(release, quorum.judge_release)

    async def check_token(self, *, resource: str, token: int) -> Verdict[TokenJudgement]:
        """Tell whether the lease with this token holds a quorum."""
        return await self._ask_all(Inspect(resource), partial(quorum.judge_token, token=token))

    async def inspect(self, resource: str) -> quorum.Replies:
        """Return what each node says of the resource, in order of the nodes; waits for the slowest, within its timeout."""
        return (await self._ask_all(Inspect(resource), quorum.judge_all_answered)).replies

    def _ask_all(
        self, command: Command, judge: Callable[[quorum.Replies], Judged | None]
    ) -> Awaitable[Verdict[Judged]]:
        """Send to every node at once; the first verdict that the replies allow is to be awaited."""
        poll = _Poll(self.nodes, command, judge)
        for node in self.nodes:
            poll.ask(node.index)
        return poll.verdict


class _Poll(Generic[Judged]):
    """The answers of all nodes to one question. `verdict` is the first one that the answers allow."""

    def __init__(
        self,
        nodes: Sequence[LockNode],
        command: Command,
        judge: Callable[[quorum.Replies], Judged | None],
    ) -> None:
        self._nodes = nodes
        self._command = command
        self._judge = judge
        self._replies: list[Reply | None] = [None] * len(nodes)
        self.verdict: asyncio.Future[Verdict[Judged]] = asyncio.get_running_loop().create_future()

    def ask(self, node: int) -> None:
        """Send the question to a node, also when it is decided already: what ends a hold is to end it on every node."""
        self._nodes[node].send(self._command, partial(self.note, node))

    def note(self, node: int, reply: Reply) -> None:
        """Note a node's answer."""
        if self.verdict.done():
            return
        self._replies[node] = reply
        if (judged := self._judge(self._replies)) is not None:
            self.verdict.set_result(Verdict(judged, self._replies))


class Attempt:
    """One try to grant one lease. Its nonce is new, and it mints at most once on each node.

    Args:
        on_reply: is told every node's answer to the mint, also when the attempt is over.
    """

    def __init__(
        self,
        nodes: Sequence[LockNode],
        mint: Mint,
        *,
        clock: Clock,
        on_reply: Callable[[int, Reply], None] | None = None,
    ) -> None:
        self._nodes = nodes
        self._mint = mint
        self._clock = clock
        self._on_reply = on_reply
        self._contended = False
        self._under = [""] * len(nodes)
        self._may_hold = [False] * len(nodes)
        self._tally = Tally(len(nodes), nonce=mint.nonce)
        self._minted_at_ms = 0.0
        self.outcome: asyncio.Future[AttemptOutcome] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Send the mint to every node at once."""
        self._minted_at_ms = self._clock.now_ms()
        for node in self._nodes:
            self._may_hold[node.index] = node.send(self._mint, partial(self._on_mint, node.index))

    def give_up(self) -> None:
        """Undo whatever was or will be minted. Later replies change nothing."""
        self._undo()
        if not self.outcome.done():
            self.outcome.cancel()

    def _on_mint(self, node: int, reply: Reply) -> None:
        if self._on_reply is not None:
            self._on_reply(node, reply)
        if isinstance(reply, Granted):
            self._contended |= reply.contended
            self._under[node] = reply.under
        elif isinstance(reply, Held):
            # It mints at most once on a node, and that answer was it.
            self._may_hold[node] = False
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
                    self.outcome.set_result(
                        AttemptGranted(token, self._minted_at_ms, self._mint.nonce, self._contended)
                    )
                else:
                    self._undo()
                    self.outcome.set_result(TooLate(elapsed_ms))
            case Refusal():
                self._undo()
                self.outcome.set_result(decision)

    def _commit(self, ask: Ask) -> None:
        for node, nonce in ask.targets:
            commit = Commit(self._mint.resource, self._mint.digest, nonce, ask.token, self._under[node])
            self._nodes[node].send(commit, partial(self._on_commit, node, ask.token))

    def _undo(self) -> None:
        """Undo on every node that may hold something, also the silent ones: a mint that timed out may still be applied, but before this.

        Not where the mint never went: such undos are kept, and would push out those that somebody waits for.
        """
        worthless_at_ms = self._clock.now_ms() + self._mint.ttl_ms
        undo = Undo(self._mint.resource, self._mint.nonce, worthless_at_ms)
        for node in self._nodes:
            if self._may_hold[node.index]:
                node.send(undo)

    def _is_granted(self) -> bool:
        return not self.outcome.cancelled() and isinstance(self.outcome.result(), AttemptGranted)


__all__ = ["Attempt", "AttemptGranted", "AttemptOutcome", "Failure", "Order", "Redlock", "TooLate"]
