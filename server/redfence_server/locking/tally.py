"""Decide one attempt to grant a lease from what the nodes answered. Pure: no clock, no I/O, no randomness.

One rule decides. A node *stands at* the token it minted for the attempt, raised to M once it has acknowledged a commit of M.
The attempt is granted when a quorum stands at one token. Until then, nodes below M, the greatest token that any node has
answered so far, are asked to commit it. In the steady state a quorum mints M at once, and nothing is committed.

Why a node counts only at exactly that token: it must not have minted more, for its mint proves that the token is greater
than those before. So a late, greater answer raises M and the commits start over; that happens at most once per node.

docs/algorithm.md has the safety argument. tests/unit/redfence_server/locking/test_quorum.py enumerates all reply vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from redfence_server.locking import quorum
from redfence_server.locking.node import Granted, Held, NoReply, Reply, Status


class Failure(Enum):
    """Why an attempt cannot be granted any more."""

    HELD = auto()
    """Enough nodes are held by other leases, and one of those may have a quorum."""
    SPLIT = auto()
    """Enough nodes are held by other leases, but none of those has a quorum: no lease will be granted."""
    NO_QUORUM = auto()
    """Fewer than a quorum of nodes answered."""
    EXPIRED = auto()
    """Holds ended between mint and commit: the nodes were slower than the ttl is long."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a commit of `token` to these nodes (index, nonce); an empty tuple means wait."""

    token: int
    targets: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """A quorum stands at `token`."""

    token: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The attempt has failed. `held` are the holds in its way and `silent` the nodes that did not answer, each by node index."""

    failure: Failure
    held: tuple[tuple[int, Held], ...]
    silent: tuple[tuple[int, NoReply], ...]


Decision = Ask | Grant | Refusal
WAIT = Ask(0, ())


class Tally:
    """The answers to one attempt so far. Feed it every answer; it returns what to do next."""

    def __init__(self, node_count: int, *, nonce: str | None = None) -> None:
        """Begin with no answers.

        Args:
            node_count: of the configured nodes.
            nonce: the attempt's own. A node that answers another shows the hold of an earlier try of this lease.
        """
        self._quorum = quorum.majority(node_count)
        self._nonce = nonce
        self._replies: list[Reply | None] = [None] * node_count
        self._standing = [0] * node_count  # 0: not granted here, or the hold was lost
        self._asked = [0] * node_count  # the greatest token this node was asked to commit
        self._greatest = 0
        self._granted = 0
        self._found_earlier_try = (
            False  # whether an earlier try of this lease was found, which may have been granted
        )

    def minted(self, node: int, reply: Reply) -> Decision:
        """Note a node's answer to the mint."""
        assert self._replies[node] is None, "a mint is answered once"
        if isinstance(reply, Granted) and not reply.counts:
            # The hold that was in the way may have ended before its time.
            reply = NoReply.CLOCK_SET
        self._replies[node] = reply
        if isinstance(reply, Granted):
            self._standing[node] = reply.token
            self._greatest = max(self._greatest, reply.token)
            self._found_earlier_try |= self._nonce is not None and reply.nonce != self._nonce
        return self._decide()

    def committed(self, node: int, token: int, reply: Reply) -> Decision:
        """Note a node's answer to the commit of `token`."""
        if reply is Status.COMMITTED:
            # A hold lost to an earlier commit's silence stays lost: being wrong in that direction is safe.
            if self._standing[node]:
                self._standing[node] = max(self._standing[node], token)
        else:
            self._standing[node] = 0
            if isinstance(reply, NoReply):
                self._replies[node] = reply
        return self._decide()

    def _decide(self) -> Decision:
        # The order matters: a grant is sound whatever else was answered.
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

        Below the greatest only before any commit was asked for: the nodes asked may stand higher by now than we know.
        """
        candidates = {self._greatest} if any(self._asked) else set(self._standing)
        return next((each for each in candidates if each and self._standing.count(each) >= self._quorum), 0)

    def _awaits_earlier_grant(self) -> bool:
        """Tell whether the answers still missing can show the grant of an earlier try.

        It is worth waiting for: a retried Acquire shall get the same token, and a node that was ahead and missed by the first try shows a
        greater one.
        """
        if not self._found_earlier_try or any(self._asked):
            return False
        most = max(self._standing.count(each) for each in self._standing if each)
        return None in self._replies and most + self._replies.count(None) >= self._quorum

    def late(self, node: int, reply: Reply) -> Ask:
        """Note a mint answered after the grant. A node left behind is aligned, so that the next attempt needs no commit."""
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
        node_count = len(self._replies)
        if len(silent) > node_count - self._quorum:
            return Refusal(Failure.NO_QUORUM, held, silent)
        if node_count - self._replies.count(None) - len(silent) < self._quorum:
            # Fewer nodes than a quorum must not decide that the lock is held: there may be no quorum at all.
            return WAIT
        if not held:
            return Refusal(Failure.EXPIRED, held, silent)
        unknown = len(silent) + self._replies.count(None)
        most = max(len(group) for group in quorum.by_lease([reply for _, reply in held]))
        split = most + unknown < self._quorum
        return Refusal(Failure.SPLIT if split else Failure.HELD, held, silent)
