"""The algorithm: mint on all nodes, decide on a quorum, commit where needed, undo what failed.

Two grants of one resource never carry one token, and a later grant never the smaller one, whatever clocks, pauses, delays and
lost replies do. docs/algorithm.md has the argument. It rests on three rules that locking/attempt.py and locking/tally.py keep:

1. A node counts only if it *stands at* the token of the grant: it minted that token, or acknowledged a commit of it.
2. A commit goes to the very hold that the mint answered, told by its nonce, and under the admission id of that mint.
3. A failed attempt undoes by its nonce all that it may have minted. Cancelling the caller does not cancel the undo.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from redfence_server.clock import Clock
from redfence_server.locking import quorum
from redfence_server.locking.attempt import Attempt, AttemptOutcome
from redfence_server.locking.backoff import revalidation_pauses
from redfence_server.locking.node import (
    REVALIDATION_MS_MAX,
    Command,
    Inspect,
    LockNode,
    Mint,
    NoReply,
    Release,
    Renew,
    Reply,
    Status,
    Undo,
)
from redfence_server.locking.quorum import ReleaseVerdict, Renewal, TokenJudgement
from redfence_server.randomness import Randomness

Judged = TypeVar("Judged")


@dataclass(frozen=True, slots=True)
class Verdict(Generic[Judged]):
    """A verdict, and the replies that it rests on: None where none had come yet."""

    verdict: Judged
    replies: quorum.Replies


@dataclass(frozen=True, slots=True)
class Order:
    """The lease that an attempt tries to grant.

    Attributes:
        digest: of the lease id.
        watch_blocking_hold: have this server told when the holds in the way have ended.
        watch_own_hold: have it told when the granted lease has ended, for others wait here as well.
    """

    resource: str
    digest: str
    ttl_ms: int
    holder: str
    watch_blocking_hold: bool = False
    watch_own_hold: bool = False


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
        self, order: Order, *, release_first: str, ttl_ms_max: int
    ) -> tuple[Attempt, Awaitable[Verdict[ReleaseVerdict]]]:
        """End the lease with the digest `release_first` as `release` does and, in the same step, begin an attempt.

        The caller sees to it that the attempt is finished or given up; the release does not depend on it.
        """
        assert release_first != order.digest, "a lease is not handed over to itself"
        release = Release(order.resource, release_first, self._clock.now_ms() + ttl_ms_max)
        poll = _Poll(self.nodes, release, quorum.judge_release, clock=self._clock)

        def note(node: int, reply: Reply) -> None:
            if reply is NoReply.REFUSED:
                # A node that cannot mint, out of memory or out of tokens, can still delete.
                poll.ask(node)
            else:
                poll.note(1, node, quorum.release_part(reply))

        return self._begin(order, release_first=release, on_reply=note), poll.verdict

    async def finish(self, attempt: Attempt) -> AttemptOutcome:
        """Return what came of an attempt.

        After any other outcome than `AttemptGranted`, an undo is on its way to every node that may hold something.

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
        release_first: Release | None = None,
        on_reply: Callable[[int, Reply], None] | None = None,
    ) -> Attempt:
        nonce = self._randomness.hex_id()
        mint = Mint(
            *(order.resource, order.digest, nonce, order.holder, order.ttl_ms),
            release_first=release_first,
            watch_blocking_hold=order.watch_blocking_hold,
            watch_own_hold=order.watch_own_hold,
        )
        attempt = Attempt(self.nodes, mint, clock=self._clock, on_reply=on_reply)
        attempt.start()
        return attempt

    def undo_grant(self, *, resource: str, nonce: str, ttl_ms: int) -> None:
        """Undo a grant that its caller was not told of. A retry of the same Acquire that shares it keeps it."""
        undo = Undo(resource, nonce, self._clock.now_ms() + ttl_ms)
        for node in self.nodes:
            node.send(undo)

    async def renew(self, *, resource: str, digest: str) -> Renewal:
        """Start the ttl of a lease anew on every node where it holds."""
        return (await self._ask_all(Renew(resource, digest), quorum.judge_renew)).verdict

    def release(self, *, resource: str, digest: str, ttl_ms_max: int) -> Awaitable[Verdict[ReleaseVerdict]]:
        """End a lease on every node, also on those that come back within the greatest ttl a lease can have.

        It was sent to every node when this returns, and goes on whatever becomes of the caller.
        """
        expires_at_ms = self._clock.now_ms() + ttl_ms_max
        release = Release(resource, digest, expires_at_ms)
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
        poll = _Poll(self.nodes, command, judge, clock=self._clock)
        poll.ask_all()
        return poll.verdict


class _Poll(Generic[Judged]):
    """One question to all nodes. `verdict` is the first one that the answers of one round allow.

    A node that has to be examined again does not answer in this round. If the others cannot decide without it, all nodes
    are asked anew: answers from before and after an examination are never combined, for another process may have
    got a node index, and another lease the lock, in between.

    Args:
        judge: returns the verdict that the answers allow, or None.
    """

    def __init__(
        self,
        nodes: Sequence[LockNode],
        command: Command,
        judge: Callable[[quorum.Replies], Judged | None],
        *,
        clock: Clock,
    ) -> None:
        self._nodes = nodes
        self._command = command
        self._judge = judge
        self._clock = clock
        self._give_up_at_ms = clock.now_ms() + REVALIDATION_MS_MAX
        self._pauses = revalidation_pauses()
        self._round = 0
        self._replies: list[Reply | None] = []
        self._released = False  # a node held the lease until this release, whatever later rounds find
        self.verdict: asyncio.Future[Verdict[Judged]] = asyncio.get_running_loop().create_future()
        self.verdict.add_done_callback(self._end)  # also when its caller goes away
        self._begin_round()

    def _begin_round(self) -> None:
        self._round += 1
        self._replies = [None] * len(self._nodes)

    def ask_all(self) -> None:
        """Send the question to every node."""
        for node in self._nodes:
            self.ask(node.index)

    def ask(self, node: int) -> None:
        """Send the question to a node, also when it is decided already: what ends a hold is to end it on every node."""
        self._nodes[node].send(self._command, partial(self.note, self._round, node))

    def note(self, asked_in: int, node: int, reply: Reply) -> None:
        """Note a node's answer to the question of one round."""
        self._released |= reply is Status.RELEASED
        if self.verdict.done() or asked_in != self._round:
            self._resend_release(node, reply)
            return
        self._replies[node] = Status.RELEASED if self._released and reply is Status.NOT_HELD else reply
        replies = self._replies
        counted = [None if each is NoReply.NOT_ADMITTED else each for each in replies]
        judged = self._judge(counted)
        if judged is None and None not in replies:
            if self._clock.now_ms() < self._give_up_at_ms:
                self._begin_round()
                asyncio.get_running_loop().call_later(next(self._pauses) / 1000, self.ask_all)
                return
            judged = self._judge(replies)
        if judged is not None:
            self.verdict.set_result(Verdict(judged, replies))

    def _end(self, _: asyncio.Future[Verdict[Judged]]) -> None:
        for node, reply in enumerate(self._replies):
            self._resend_release(node, reply)

    def _resend_release(self, node: int, reply: Reply | None) -> None:
        """Have a node that missed a release carry it out once it votes again: this poll does not ask it any more."""
        if reply is NoReply.NOT_ADMITTED and self.verdict.done() and isinstance(self._command, Release):
            self._nodes[node].send(self._command)
