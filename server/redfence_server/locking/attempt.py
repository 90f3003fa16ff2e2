"""Run one attempt to grant one lease: mint on all nodes, commit where needed, undo after a failure.

An attempt is one object with callbacks, not a task for each node. The deciding reply decides it in the same
turn of the event loop, without a wait for slower nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial

from redfence_server.clock import Clock
from redfence_server.locking import quorum
from redfence_server.locking.node import Commit, Granted, Held, LockNode, Mint, Reply, Undo
from redfence_server.locking.tally import WAIT, Ask, Decision, Grant, Refusal, Tally
from redfence_server.values import value


@value
class AttemptGranted:
    """The lease is granted.

    Attributes:
        token: greater than every token granted before for the resource.
        minted_at_ms: the instant before the mint was sent; the ttl counts from it.
        nonce: the attempt's, for `undo_grant`.
        contended: another server wants a notice when this lease ends.
    """

    token: int
    minted_at_ms: float
    nonce: str = field(default="", compare=False)
    contended: bool = field(default=False, compare=False)


@value
class TooLate:
    """A quorum granted when no validity was left; an undo is on its way."""

    elapsed_ms: float


AttemptOutcome = AttemptGranted | TooLate | Refusal


class Attempt:
    """Tries once to grant one lease, under a new nonce, with at most one mint on each node.

    Args:
        on_reply: called with each node's reply to the mint, also after the attempt is over.

    Attributes:
        on_outcome: called once with the outcome, but not before `start` returns, and not after `give_up`.
        on_late_reply: called with each reply to the mint after the attempt was refused.
        outcome: None until the attempt is decided, and for ever if it was given up before.
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
        self.on_outcome: Callable[[AttemptOutcome], None] | None = None
        self.on_late_reply: Callable[[int, Reply], None] | None = None
        self._on_reply = on_reply
        self._contended = False
        self._admission_ids = [""] * len(nodes)
        self._may_hold = [False] * len(nodes)
        self._tally = Tally(len(nodes), nonce=mint.nonce)
        self._minted_at_ms = 0.0
        self._given_up = False
        self.outcome: AttemptOutcome | None = None

    def start(self) -> None:
        """Send the mint to every node at once."""
        self._minted_at_ms = self._clock.now_ms()
        mint, on_mint, may_hold = self._mint, self._on_mint, self._may_hold
        try:
            for node in self._nodes:
                index = node.index
                may_hold[index] = node.send(mint, partial(on_mint, index))
        except BaseException:
            # A defect at one node: the mints to the nodes before it are on their way.
            self.give_up()
            raise

    @property
    def is_open(self) -> bool:
        """Tell whether replies can still decide the attempt."""
        return self.outcome is None and not self._given_up

    def give_up(self) -> None:
        """Undo every mint of this attempt, also one that is still on its way; ignore later replies."""
        self._given_up = True
        self._undo()

    def _on_mint(self, node: int, reply: Reply) -> None:
        if self._on_reply is not None:
            self._on_reply(node, reply)
        if isinstance(reply, Granted):
            self._contended |= reply.contended
            self._admission_ids[node] = reply.admission_id
        elif isinstance(reply, Held):
            # The attempt mints at most once on a node, and this was the reply.
            self._may_hold[node] = False
        if self.is_open:
            self._act(self._tally.minted(node, reply))
        elif isinstance(self.outcome, AttemptGranted) and not self._given_up:
            self._act(self._tally.late(node, reply))
        elif isinstance(self.outcome, Refusal) and self.on_late_reply is not None:
            self.on_late_reply(node, reply)

    def _on_commit(self, node: int, token: int, reply: Reply) -> None:
        if self.is_open:
            self._act(self._tally.committed(node, token, reply))

    def _act(self, decision: Decision) -> None:
        if decision is WAIT:
            return
        match decision:
            case Ask():
                self._commit(decision)
            case Grant(token):
                # Count from before the send, and check last: a count from the reply would be too optimistic.
                elapsed_ms = self._clock.now_ms() - self._minted_at_ms
                if quorum.validity_left_ms(self._mint.ttl_ms, elapsed_ms) > 0:
                    self._end(AttemptGranted(token, self._minted_at_ms, self._mint.nonce, self._contended))
                else:
                    self._undo()
                    self._end(TooLate(elapsed_ms))
            case Refusal():
                self._undo()
                self._end(decision)

    def _end(self, outcome: AttemptOutcome) -> None:
        self.outcome = outcome
        if self.on_outcome is not None:
            self.on_outcome(outcome)

    def _commit(self, ask: Ask) -> None:
        for node, nonce in ask.targets:
            commit = Commit(
                self._mint.resource, self._mint.digest, nonce, ask.token, self._admission_ids[node]
            )
            self._nodes[node].send(commit, partial(self._on_commit, node, ask.token))

    def _undo(self) -> None:
        """Undo on every node that may have the hold; a mint that timed out runs before this undo or never.

        A node to which the mint was never sent gets no undo: it would fill the replay queue.
        """
        expires_at_ms = self._clock.now_ms() + self._mint.ttl_ms + self._mint.lock_delay_ms
        undo = Undo(self._mint.resource, self._mint.nonce, expires_at_ms)
        for node in self._nodes:
            if self._may_hold[node.index]:
                node.send(undo)
