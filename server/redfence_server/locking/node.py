"""What the algorithm says to one node, and what it hears back: the seam between the quorum and the wire.

`NodeLink` implements it over a real connection; the tests' fake node implements it in memory and is held to the
real one by one contract suite (tests/contract/test_lock_node.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class Release:
    """Delete the hold of a lease, where it holds. A node that cannot be reached gets it later, as it does an `Undo`."""

    resource: str
    digest: str
    expires_at_ms: float


@dataclass(frozen=True, slots=True)
class Mint:
    """Take the lock for a lease, with the node's next token.

    Attributes:
        nonce: the attempt's id.
        release_first: a release of the same resource to carry out in the same step, which makes this a hand-over.
        watch_blocking_hold: give this server a `Notice` when the hold that is in the way has ended.
        watch_own_hold: further callers wait at this server; give it a notice of the end of the hold that this makes.
    """

    resource: str
    digest: str
    nonce: str
    holder: str
    ttl_ms: int
    release_first: Release | None = None
    watch_blocking_hold: bool = False
    watch_own_hold: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """Raise the hold that answered `nonce` to the token of the grant.

    Attributes:
        admission_id: the admission id under which the mint was answered. If the node has taken another one since, a fence was
            raised on it, and an attempt that began before the fence must not be granted after it.
    """

    resource: str
    digest: str
    nonce: str
    token: int
    admission_id: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Undo:
    """Delete the hold that the attempt `nonce` made, unless a retry shares it.

    A node that cannot be reached gets it when it is back, unless that is after `expires_at_ms` on the server's clock,
    when the hold has expired by itself.
    """

    resource: str
    nonce: str
    expires_at_ms: float


@dataclass(frozen=True, slots=True)
class Renew:
    """Start the ttl of a lease anew, where it holds."""

    resource: str
    digest: str


@dataclass(frozen=True, slots=True)
class Inspect:
    """Tell who holds the lock."""

    resource: str


Command = Mint | Commit | Undo | Renew | Release | Inspect
"""One for each Lua script of the algorithm."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease holds the lock on this node; nonce and token are those of the hold, which a retry may have found there.

    Attributes:
        contended: other servers want a notice of this hold's end.
        released: of a hand-over: the lease to end did hold the lock here.
        counts: the vote may be counted: the node's clock has not been set lately.
        admission_id: the admission id under which it was granted.
    """

    nonce: str
    token: int
    contended: bool = False
    released: bool = False
    counts: bool = True
    admission_id: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Held:
    """A lease with this digest holds the lock on this node; or on most nodes, where their answers are summed up."""

    digest: str
    token: int
    holder: str
    remaining_ms: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease still holds the lock on this node and its ttl starts anew."""

    token: int
    ttl_ms: int


class Status(Enum):
    """Replies that carry nothing but themselves."""

    COMMITTED = auto()
    """The hold lasted without a gap from its mint to this commit."""
    LOST = auto()
    """The hold to commit is not there any more."""
    UNDONE = auto()
    """The hold was this attempt's alone and is gone."""
    KEPT = auto()
    """There was nothing to undo, or a retry shares it."""
    NOT_HELD = auto()
    """The lease does not hold the lock on this node."""
    RELEASED = auto()
    """The lease held the lock on this node and does not any more."""
    FREE = auto()
    """The lock is free on this node."""


class NoReply(Enum):
    """Why there is no reply that counts. The command may have been applied, except for UNREACHABLE and QUARANTINED; see NOT_ADMITTED."""

    TIMED_OUT = auto()
    """No reply came within the node timeout."""
    UNREACHABLE = auto()
    """The command was not sent, for there is no admitted connection or too much is unanswered on it; or it was refused, and then the node
    was lost."""
    QUARANTINED = auto()
    """The command was not sent, or was refused: the node answers and must not vote."""
    DISCONNECTED = auto()
    """The connection broke before the reply came."""
    REFUSED = auto()
    """The node answered with an error."""
    NOT_ADMITTED = auto()
    """This server has to examine the node again before the node takes commands, and is about to. A mint or commit has
    changed nothing, or only what an undo will find. Make a command to several nodes again whole: replies from before and
    after an examination must not be combined."""
    CLOCK_SET = auto()
    """It answered, but its clock was set lately: its vote for a new grant does not count."""


Reply = Granted | Held | Renewed | Status | NoReply


@dataclass(frozen=True, slots=True)
class Notice:
    """The hold with this token has ended on a node, by index, before its time.

    This is a hint: it may be lost, and another lease may hold the lock by now.
    """

    node: int
    resource: str
    token: int


class Durability(Enum):
    """Whether the present run of a node loses nothing at a crash, so that it votes again at once after a restart."""

    UNKNOWN = auto()
    """It was not looked at yet."""
    PROVEN = auto()
    """By its settings, from the run's beginning."""
    DECLARED = auto()
    """By the operator's word alone."""
    NONE = auto()
    """A restart means quarantine."""


REVALIDATION_MS_MAX: Final = 800
"""To examine a node again takes some ten round trips. A node that is not back after so long counts as lost."""


class NodeState(Enum):
    """Whether a node votes."""

    JOINING = auto()
    """The server is connecting to it for the first time."""
    READY = auto()
    """It votes."""
    QUARANTINED = auto()
    """It is reachable but not trusted."""
    UNREACHABLE = auto()
    """There is no connection to it."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """This server's knowledge of one node.

    Attributes:
        address: HOST:PORT or a socket's path, never with a password.
        detail: why it does not vote, or what is wrong with it although it does; empty when all is well.
        run_id: of its present run; empty before it was first reached.
        latency_ms: how long the last answered command took; None before the first.
        since_ms: for how long it has been in this state.
        max_token: the greatest token that it was last seen to have minted or learnt.
        clock_offset_ms: its wall clock less this machine's; None before it was first asked.
        clock_distrusted_ms: for how much longer its votes for new grants do not count, because its clock was set.
        state_changes: since the server's start.
    """

    address: str
    state: NodeState
    detail: str
    run_id: str
    latency_ms: float | None
    since_ms: float
    durability: Durability = Durability.UNKNOWN
    max_token: int = 0
    clock_offset_ms: float | None = None
    clock_distrusted_ms: float = 0.0
    state_changes: int = 0


class LockNode(Protocol):
    """One node. `index` is its place in the cluster, from 0."""

    index: int

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        """Carry out `command` and tell `on_reply` exactly once, never before `send` has returned.

        Return whether it is on its way to the node. If not, an undo or a release follows when the node votes again.

        Commands of one node are applied in the order they were sent. A reply or a `NoReply` comes within the node timeout.
        """
        ...

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        """Pass on the notices that this server asked for, in order with the replies of the node."""
        ...

    def report(self) -> NodeReport:
        """Tell what is known of the node, without asking it."""
        ...
