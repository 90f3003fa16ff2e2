"""Decide one attempt to grant a lease from the replies of the nodes. Pure: no clock, no I/O, no randomness.

One rule decides. A node *stands at* the token it minted for the attempt, or at M once it has acknowledged a
commit of M. M is the greatest token answered so far. A quorum that stands at one token grants the attempt.
Until then the nodes below M are asked to commit M. In the steady state a quorum mints M without a commit.

A node counts only at exactly that token. If it had minted more, the token might not exceed all earlier ones.
So a late, greater reply raises M, and the commits start over, at most once for each node.

docs/algorithm.md has the argument. tests/unit/redfence_server/locking/test_quorum.py tries all reply vectors.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum, auto

from redfence_server.locking import quorum
from redfence_server.locking.node import Granted, Held, NoReply, Reply, Status
from redfence_server.values import value


class Failure(Enum):
    """Why an attempt can no longer be granted."""

    HELD = auto()
    """Other leases hold too many nodes, and one of them may have a quorum."""
    SPLIT = auto()
    """Other leases hold too many nodes, but none of them has a quorum: no lease will be granted."""
    NO_QUORUM = auto()
    """Fewer than a quorum of nodes answered."""
    EXPIRED = auto()
    """Holds ended between mint and commit, because the nodes took longer than the ttl."""


@value
class Ask:
    """Send a commit of `token` to the targets (node index, nonce); without targets, wait."""

    token: int
    targets: tuple[tuple[int, str], ...]


@value
class Grant:
    """A quorum stands at `token`."""

    token: int


@value
class Refusal:
    """The attempt has failed; by node index, the holds that refused it and the nodes that did not answer.

    `granted` has the nodes that granted it by then; other nodes may still answer.
    """

    failure: Failure
    held: tuple[tuple[int, Held], ...]
    silent: tuple[tuple[int, NoReply], ...]
    granted: tuple[int, ...] = field(default=(), compare=False)


Decision = Ask | Grant | Refusal
WAIT = Ask(0, ())


class Tally:
    """Takes every reply to one attempt, and returns what to do next."""

    def __init__(self, node_count: int, *, nonce: str | None = None) -> None:
        """Begin without replies.

        Args:
            node_count: the number of configured nodes.
            nonce: the attempt's. A node that answers another one has the hold of this lease's earlier try.
        """
        self._quorum = quorum.majority(node_count)
        self._nonce = nonce
        self._replies: list[Reply | None] = [None] * node_count
        self._standing = [0] * node_count  # 0: no grant here, or the hold was lost
        self._asked = [0] * node_count  # the greatest token that the node was asked to commit
        self._greatest = 0
        self._granted = 0
        self._found_earlier_try = (
            False  # whether an earlier try of this lease was found, which may have been granted
        )

    def minted(self, node: int, reply: Reply) -> Decision:
        """Note a node's reply to the mint."""
        assert self._replies[node] is None, "a mint is answered once"
        if isinstance(reply, Granted) and not reply.counts:
            # An earlier hold may have ended before its ttl was over.
            reply = NoReply.CLOCK_SET
        self._replies[node] = reply
        if isinstance(reply, Granted):
            self._standing[node] = reply.token
            self._greatest = max(self._greatest, reply.token)
            self._found_earlier_try |= self._nonce is not None and reply.nonce != self._nonce
        return self._decide()

    def committed(self, node: int, token: int, reply: Reply) -> Decision:
        """Note a node's reply to the commit of `token`."""
        if reply is Status.COMMITTED:
            # A node whose earlier commit went unanswered stays lost: this error is safe.
            if self._standing[node]:
                self._standing[node] = max(self._standing[node], token)
        else:
            self._standing[node] = 0
            if isinstance(reply, NoReply):
                self._replies[node] = reply
        return self._decide()

    def _decide(self) -> Decision:
        # The order matters: a grant is sound whatever the other replies are.
        if token := self._token_of_a_quorum():
            self._granted = token
            return Grant(token)
        standing = len(self._standing) - self._standing.count(0)
        if standing >= self._quorum:
            return WAIT if self._awaits_earlier_grant() else self._ask(self._greatest)
        if standing + self._replies.count(None) < self._quorum:
            return self._refuse()
        return WAIT

    def _token_of_a_quorum(self) -> int:
        """Return the token at which a quorum stands, or 0.

        After the first commit only the greatest token counts: a node may stand higher than its replies show.
        """
        standing = self._standing
        if standing.count(self._greatest) >= self._quorum:
            return self._greatest
        if any(self._asked):
            return 0
        return next((each for each in standing if each and standing.count(each) >= self._quorum), 0)

    def _awaits_earlier_grant(self) -> bool:
        """Tell whether the missing replies can show the grant of an earlier try.

        Then the attempt waits for them, so that a retried Acquire gets the same token again. A node that the
        first try did not reach may answer a greater one.
        """
        if not self._found_earlier_try or any(self._asked):
            return False
        most = max(self._standing.count(each) for each in self._standing if each)
        return None in self._replies and most + self._replies.count(None) >= self._quorum

    def late(self, node: int, reply: Reply) -> Ask:
        """Note a mint answered after the grant; align the node, so that the next attempt needs no commit."""
        assert self._replies[node] is None, "a mint is answered once"
        self._replies[node] = reply
        if isinstance(reply, Granted) and reply.token < self._granted:
            return Ask(self._granted, ((node, reply.nonce),))
        return WAIT

    def _ask(self, token: int) -> Ask:
        targets: list[tuple[int, str]] = []
        for node, reply in enumerate(self._replies):
            behind = 0 < self._standing[node] < token and self._asked[node] < token
            if behind and isinstance(reply, Granted):
                self._asked[node] = token
                targets.append((node, reply.nonce))
        return Ask(token, tuple(targets))

    def _refuse(self) -> Decision:
        held = tuple((node, reply) for node, reply in enumerate(self._replies) if isinstance(reply, Held))
        silent = quorum.silent_nodes(self._replies)
        granted = tuple(node for node, reply in enumerate(self._replies) if isinstance(reply, Granted))
        node_count = len(self._replies)
        if len(silent) > node_count - self._quorum:
            return Refusal(Failure.NO_QUORUM, held, silent, granted)
        if node_count - self._replies.count(None) - len(silent) < self._quorum:
            # Fewer nodes than a quorum must not decide that the lock is held, because there may be no quorum.
            return WAIT
        if not held:
            return Refusal(Failure.EXPIRED, held, silent, granted)
        unknown = len(silent) + self._replies.count(None)
        most = max(len(group) for group in quorum.by_lease([reply for _, reply in held]))
        split = most + unknown < self._quorum
        return Refusal(Failure.SPLIT if split else Failure.HELD, held, silent, granted)
