"""Run the algorithm: mint on all nodes, decide on a quorum, commit where needed, undo after a failure.

Two grants of one resource never have the same token, and a later grant never has the smaller one. Clocks,
pauses, delays and lost replies cannot change that. docs/algorithm.md has the argument. It rests on three
rules in locking/attempt.py and locking/tally.py:

1. A node counts only if it *stands at* the token of the grant: it minted it, or acknowledged a commit of it.
2. A commit goes to the hold that the mint answered, by its nonce, and under the admission id of that mint.
3. A failed attempt undoes all it may have minted, by its nonce. A cancelled caller does not cancel the undo.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from redfence_server.clock import Clock
from redfence_server.locking import quorum
from redfence_server.locking.attempt import Attempt
from redfence_server.locking.backoff import revalidation_pauses
from redfence_server.locking.node import (
    REVALIDATION_MS_MAX,
    Command,
    ForceRelease,
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
from redfence_server.values import value

Judged = TypeVar("Judged")
Result = TypeVar("Result")


@value
class Verdict(Generic[Judged]):
    """A verdict, and the replies that decided it; None for a node that had not answered."""

    verdict: Judged
    replies: quorum.Replies


@value
class Order:
    """The lease that an attempt tries to grant.

    Attributes:
        digest: the digest of the lease id.
        watch_blocking_hold: send this server notices when the holds that refuse the attempt end.
        watch_own_hold: send this server notices when the granted lease ends, because others wait here.
        lock_delay_ms: how long the lock stays closed if the lease is lost.
    """

    resource: str
    digest: str
    ttl_ms: int
    holder: str
    watch_blocking_hold: bool = False
    watch_own_hold: bool = False
    lock_delay_ms: int = 0


def begun(begin: Callable[[Callable[[Result], None]], object]) -> asyncio.Future[Result]:
    """Begin an operation, and return a future of what it calls back with.

    Cancelling the future does not stop the operation, which ends in bounded time.
    """
    ended: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    begin(partial(settle, ended))
    return ended


def settle(ended: asyncio.Future[Result], result: Result) -> None:
    """Resolve a future, unless it was cancelled."""
    if not ended.done():
        ended.set_result(result)


class Redlock:
    """Runs the algorithm over all configured nodes."""

    def __init__(self, nodes: Sequence[LockNode], *, clock: Clock, randomness: Randomness) -> None:
        self.nodes = nodes
        self.quorum = quorum.majority(len(nodes))
        self._clock = clock
        self._randomness = randomness

    def hand_over(
        self,
        order: Order,
        *,
        release_first: str,
        ttl_ms_max: int,
        on_verdict: Callable[[Verdict[ReleaseVerdict]], None],
    ) -> Attempt:
        """Release the lease with the digest `release_first` and, in the same step, begin an attempt.

        The caller must set `on_outcome` of the attempt, or give it up; the release does not depend on it.
        """
        assert release_first != order.digest, "a lease is not handed over to itself"
        release = Release(order.resource, release_first, self._clock.now_ms() + ttl_ms_max)
        poll = _Poll(self.nodes, release, quorum.judge_release, clock=self._clock, on_verdict=on_verdict)

        def note(node: int, reply: Reply) -> None:
            if reply is NoReply.REFUSED:
                # A node without memory or tokens cannot mint, but it can still delete.
                poll.ask(node)
            else:
                poll.note(1, node, quorum.release_part(reply))

        return self.begin(order, release_first=release, on_reply=note)

    def begin(
        self,
        order: Order,
        *,
        release_first: Release | None = None,
        on_reply: Callable[[int, Reply], None] | None = None,
    ) -> Attempt:
        """Send the mints of an attempt; the caller must set its `on_outcome`."""
        nonce = self._randomness.hex_id()
        mint = Mint(
            *(order.resource, order.digest, nonce, order.holder, order.ttl_ms),
            release_first=release_first,
            watch_blocking_hold=order.watch_blocking_hold,
            watch_own_hold=order.watch_own_hold,
            lock_delay_ms=order.lock_delay_ms,
        )
        attempt = Attempt(self.nodes, mint, clock=self._clock, on_reply=on_reply)
        attempt.start()
        return attempt

    def undo_grant(self, *, resource: str, nonce: str, hold_ms: int) -> None:
        """Undo a grant that its caller never saw, unless a retry of the same Acquire shares it.

        A node keeps the hold for at most `hold_ms`: the ttl and the lock delay.
        """
        undo = Undo(resource, nonce, self._clock.now_ms() + hold_ms)
        for node in self.nodes:
            node.send(undo)

    def renew(self, resource: str, digest: str, on_verdict: Callable[[Verdict[Renewal]], None]) -> None:
        """Restart the ttl of a lease on every node where it holds the lock."""
        self._ask_all(Renew(resource, digest), quorum.judge_renew, on_verdict)

    def release(
        self,
        resource: str,
        digest: str,
        on_verdict: Callable[[Verdict[ReleaseVerdict]], None],
        *,
        ttl_ms_max: int,
    ) -> None:
        """End a lease on every node, also on a node that comes back within the greatest ttl.

        When this returns, the release was sent to every node.
        """
        expires_at_ms = self._clock.now_ms() + ttl_ms_max
        self._ask_all(Release(resource, digest, expires_at_ms), quorum.judge_release, on_verdict)

    def force_release(
        self,
        resource: str,
        digest: str,
        token: int,
        on_verdict: Callable[[Verdict[ReleaseVerdict]], None],
        *,
        ttl_ms_max: int,
    ) -> None:
        """End a lease for an operator, as `release` does, but no grant of it with a token above `token`."""
        expires_at_ms = self._clock.now_ms() + ttl_ms_max
        force = ForceRelease(resource, digest, expires_at_ms, token)
        self._ask_all(force, quorum.judge_release, on_verdict)

    def check_token(
        self, resource: str, token: int, on_verdict: Callable[[Verdict[TokenJudgement]], None]
    ) -> None:
        """Tell whether the lease with this token holds a quorum."""
        self._ask_all(Inspect(resource), partial(quorum.judge_token, token=token), on_verdict)

    def inspect(self, resource: str, on_verdict: Callable[[Verdict[quorum.Replies]], None]) -> None:
        """Tell each node's reply about the resource, by index, once the slowest is here or timed out."""
        self._ask_all(Inspect(resource), quorum.judge_all_answered, on_verdict)

    def _ask_all(
        self,
        command: Command,
        judge: Callable[[quorum.Replies], Judged | None],
        on_verdict: Callable[[Verdict[Judged]], None],
    ) -> None:
        """Send to every node at once; call `on_verdict` once with the first verdict that replies allow."""
        _Poll(self.nodes, command, judge, clock=self._clock, on_verdict=on_verdict).ask_all()


class _Poll(Generic[Judged]):
    """Sends one command to all nodes, and tells the first verdict that the replies of one round allow.

    A node that must be examined again does not answer in a round. If the others cannot decide without it, all
    nodes are asked again. Replies from before and after an examination are never combined: in between,
    another process may have got a node index, and another lease the lock.

    Args:
        judge: returns the verdict that the replies allow, or None.
        on_verdict: called once, within a node timeout and `REVALIDATION_MS_MAX`.
    """

    def __init__(
        self,
        nodes: Sequence[LockNode],
        command: Command,
        judge: Callable[[quorum.Replies], Judged | None],
        *,
        clock: Clock,
        on_verdict: Callable[[Verdict[Judged]], None],
    ) -> None:
        self._nodes = nodes
        self._command = command
        self._is_release = isinstance(command, Release)
        self._judge = judge
        self._clock = clock
        self._give_up_at_ms = clock.now_ms() + REVALIDATION_MS_MAX
        self._pauses = revalidation_pauses()
        self._round = 0
        self._replies: list[Reply | None] = []
        self._released = False  # a node had the hold until this release, whatever later rounds find
        # Nodes that did not answer a release. If one says later that the lease is not held, this release may
        # have ended the hold, so that answer proves nothing.
        self._unanswered: dict[int, NoReply] = {}
        self._on_verdict = on_verdict
        self._decided = False
        self._begin_round()

    def _begin_round(self) -> None:
        self._round += 1
        self._replies = [None] * len(self._nodes)

    def ask_all(self) -> None:
        """Send the command to every node."""
        for index in range(len(self._nodes)):
            self.ask(index)

    def ask(self, node: int) -> None:
        """Send the command to a node, even after the verdict, because a release must reach every node."""
        self._nodes[node].send(self._command, partial(self.note, self._round, node))

    def note(self, asked_in: int, node: int, reply: Reply) -> None:
        """Note a node's reply in one round."""
        if reply is Status.RELEASED:
            self._released = True
        if self._decided or asked_in != self._round:
            self._resend_release(node, reply)
            return
        if reply is Status.NOT_HELD:
            reply = Status.RELEASED if self._released else self._unanswered.get(node, reply)
        elif isinstance(reply, NoReply) and reply is not NoReply.NOT_ADMITTED and self._is_release:
            self._unanswered[node] = reply
        self._replies[node] = reply
        counted = replies = self._replies
        if NoReply.NOT_ADMITTED in replies:
            counted = [None if each is NoReply.NOT_ADMITTED else each for each in replies]
        judged = self._judge(counted)
        if judged is None and None not in replies:
            if self._clock.now_ms() < self._give_up_at_ms:
                self._begin_round()
                asyncio.get_running_loop().call_later(next(self._pauses) / 1000, self.ask_all)
                return
            judged = self._judge(replies)
        if judged is not None:
            self._decided = True
            for each, earlier in enumerate(replies):
                self._resend_release(each, earlier)
            self._on_verdict(Verdict(judged, replies))

    def _resend_release(self, node: int, reply: Reply | None) -> None:
        """Send a missed release again without a callback, so that the link replays it when the node votes."""
        if reply is NoReply.NOT_ADMITTED and self._decided and self._is_release:
            self._nodes[node].send(self._command)
